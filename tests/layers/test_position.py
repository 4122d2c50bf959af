import math

import pytest
import torch

from uniquery.layers.position import map_positions, sine_positions


def naive(shape, extent, channels, where=1.0):
    height, width = shape
    out = torch.zeros(height * width, channels)
    half = channels // 2
    for row in range(height):
        for column in range(width):
            for axis, (place, size) in enumerate(((row, extent[0]), (column, extent[1]))):
                angle = (place + where) / (size + 1e-6) * 2 * math.pi
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


def test_centers_of_cells():
    positions = sine_positions((3, 4), torch.tensor([[3.0, 4.0]]), 16, place=0.5)
    torch.testing.assert_close(positions[0], naive((3, 4), (3, 4), 16, 0.5), rtol=1e-4, atol=1e-5)


def test_the_cells_of_a_map():
    x = torch.zeros(2, 16, 3, 4)
    shared = map_positions(x, 8, [(24, 30), (24, 30)])
    torch.testing.assert_close(shared, naive((3, 4), (3, 4), 16)[None], rtol=1e-4, atol=1e-5)
    own = map_positions(x, 8, [(24, 30), (10, 8)], place=0.5)
    for positions, extent in zip(own, [(3, 4), (2, 1)], strict=True):
        torch.testing.assert_close(positions, naive((3, 4), extent, 16, 0.5), rtol=1e-4, atol=1e-5)
