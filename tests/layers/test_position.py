import math

import pytest
import torch

from uniquery.layers.position import sine_positions


def naive(shape, extent, channels):
    height, width = shape
    out = torch.zeros(height * width, channels)
    half = channels // 2
    for row in range(height):
        for column in range(width):
            for axis, (place, size) in enumerate(((row, extent[0]), (column, extent[1]))):
                angle = (place + 1) / (size + 1e-6) * 2 * math.pi
                for c in range(half):
                    wave = angle / 10000 ** (2 * (c // 2) / half)
                    out[row * width + column, axis * half + c] = math.cos(wave) if c % 2 else math.sin(wave)
    return out


@pytest.mark.parametrize("extents", [[(3, 4)], [(3, 4), (2, 1)]])
def test_the_naive_way(extents):
    positions = sine_positions((3, 4), torch.tensor(extents, dtype=torch.float32), 16)
    for ours, extent in zip(positions, extents, strict=True):
        torch.testing.assert_close(ours, naive((3, 4), extent, 16), rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing_inside():
    small = sine_positions((2, 3), torch.tensor([[2.0, 3.0]]), 8).view(2, 3, 8)
    large = sine_positions((5, 7), torch.tensor([[2.0, 3.0]]), 8).view(5, 7, 8)
    assert torch.equal(small, large[:2, :3])
