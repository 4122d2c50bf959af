import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from uniquery.layers import deformable_conv
from uniquery.layers.deformable_conv import DeformableConvNorm, TapChunk, deformable_conv2d
from uniquery.layers.norm import ConvNorm

GEOMETRIES = pytest.mark.parametrize(
    ("side", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (3, 1, 0), (1, 1, 0), (2, 2, 1)]
)
IMAGES, INPUTS, OUTPUTS, HEIGHT, WIDTH = 2, 2, 2, 3, 4


@pytest.fixture(params=["cpu", "any device"])
def way(request, monkeypatch):
    """Both ways to compute the gradients: by sparse products, and by indexing on devices that have none."""
    if request.param == "any device":
        for name in ("table_gradient", "point_gradients"):
            monkeypatch.setattr(TapChunk, name, elsewhere(getattr(TapChunk, name)))
    return request.param


def elsewhere(method):
    """The method as it runs for a tensor that is not on a CPU."""

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    return lambda self, gradient: method(self, gradient.as_subclass(Elsewhere)).as_subclass(torch.Tensor)


def inputs(side, stride, padding, seed=0):
    """x, offset, mask, weight and bias in float64; taps inside, at the edge of and far outside of the map."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    height, width = ((n + 2 * padding - side) // stride + 1 for n in (HEIGHT, WIDTH))
    return [
        t.requires_grad_()
        for t in (
            random(IMAGES, INPUTS, HEIGHT, WIDTH),
            2 * random(IMAGES, 2 * side**2, height, width),
            random(IMAGES, side**2, height, width),
            random(OUTPUTS, INPUTS, side, side),
            random(OUTPUTS),
        )
    ]


def naive_value(channel, y, x):
    """Bilinear value of an (h, w) map, by the four cells around the place."""
    total = 0.0
    for row, column in itertools.product(*((math.floor(p), math.floor(p) + 1) for p in (y, x))):
        if 0 <= row < channel.shape[0] and 0 <= column < channel.shape[1]:
            total += (1 - abs(y - row)) * (1 - abs(x - column)) * channel[row, column].item()
    return total


def naive_conv(x, offset, mask, weight, bias, stride, padding):
    """One output, tap and channel after the other."""
    side = weight.shape[2]
    out = torch.zeros(len(x), len(weight), *offset.shape[2:], dtype=torch.float64)
    for i, row, column in itertools.product(range(len(x)), *map(range, offset.shape[2:])):
        out[i, :, row, column] = bias
        for ky, kx in itertools.product(range(side), repeat=2):
            tap = ky * side + kx
            down, right = offset[i, 2 * tap : 2 * tap + 2, row, column].tolist()
            y, x_ = row * stride - padding + ky + down, column * stride - padding + kx + right
            for c in range(x.shape[1]):
                value = naive_value(x[i, c], y, x_) * mask[i, tap, row, column]
                out[i, :, row, column] += weight[:, c, ky, kx] * value
    return out


class TestFunction:
    @GEOMETRIES
    @pytest.mark.parametrize("modulated", [False, True])
    @torch.no_grad()
    def test_the_naive_way(self, side, stride, padding, modulated):
        x, offset, mask, weight, bias = inputs(side, stride, padding)
        factors = mask if modulated else torch.ones_like(mask)
        expected = naive_conv(x, offset, factors, weight, bias, stride, padding)
        found = deformable_conv2d(
            x, offset, weight, bias, mask=mask if modulated else None, stride=stride, padding=padding
        )
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("side", "stride", "padding"), [(3, 2, 1), (2, 1, 0), (1, 1, 0)])
    def test_gradients(self, side, stride, padding, way):
        def of(x, offset, mask, weight, bias):
            return deformable_conv2d(x, offset, weight, bias, mask=mask, stride=stride, padding=padding)

        assert gradcheck(of, inputs(side, stride, padding), eps=1e-7, atol=1e-5)

    def test_gradients_without_mask_and_bias(self, way):
        x, offset, _, weight, _ = inputs(3, 2, 1, seed=1)
        assert gradcheck(
            lambda *a: deformable_conv2d(*a, stride=2, padding=1), (x, offset, weight), eps=1e-7, atol=1e-5
        )

    def test_both_ways_agree(self):
        gradients = []
        for other in (False, True):
            arguments = inputs(3, 1, 1)
            x, offset, mask, weight, bias = arguments
            with pytest.MonkeyPatch.context() as patch:
                if other:
                    for name in ("table_gradient", "point_gradients"):
                        patch.setattr(TapChunk, name, elsewhere(getattr(TapChunk, name)))
                deformable_conv2d(x, offset, weight, bias, mask=mask, padding=1).square().sum().backward()
            gradients.append([t.grad for t in arguments])
        for first, second in zip(*gradients, strict=True):
            torch.testing.assert_close(first, second)

    def test_some_pixels_at_a_time(self, monkeypatch):
        results = []
        for at_once in (1024, 7):
            monkeypatch.setattr(deformable_conv, "_PIXELS_AT_ONCE", at_once)
            arguments = inputs(3, 1, 1)
            x, offset, mask, weight, bias = arguments
            y = deformable_conv2d(x, offset, weight, bias, mask=mask, padding=1)
            y.square().sum().backward()
            results.append([y.detach(), *(t.grad for t in arguments)])
        for whole, parts in zip(*results, strict=True):
            torch.testing.assert_close(whole, parts)

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (1, 0)])
    def test_without_offsets_it_is_a_convolution(self, layout, stride, padding):
        x = torch.randn(2, 3, 7, 6).contiguous(memory_format=layout)
        weight, bias = torch.randn(4, 3, 3, 3), torch.randn(4)
        expected = F.conv2d(x, weight, bias, stride, padding)
        offset = torch.zeros(2, 18, *expected.shape[2:])
        found = deformable_conv2d(x, offset, weight, bias, stride=stride, padding=padding)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert found.is_contiguous(memory_format=torch.channels_last)

    def test_whole_offsets_shift_the_map(self):
        x, weight = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)
        offset = torch.zeros(1, 9, 2, 6, 6)
        offset[:, :, 0], offset[:, :, 1] = 2, -1  # two rows down, one column to the left
        shifted = F.pad(x, (1, -1, -2, 2))
        found = deformable_conv2d(x, offset.flatten(1, 2), weight, padding=1)
        torch.testing.assert_close(
            found[..., 1:-1, 1:-1], F.conv2d(shifted, weight, padding=1)[..., 1:-1, 1:-1], rtol=1e-4, atol=1e-5
        )

    def test_far_outside_there_is_nothing(self):
        x = torch.randn(1, 2, 4, 4, requires_grad=True)
        offset = torch.full((1, 18, 4, 4), 1e6, requires_grad=True)
        y = deformable_conv2d(x, offset, torch.randn(3, 2, 3, 3), padding=1)
        y.sum().backward()
        assert not y.any()
        assert not x.grad.any()
        assert not offset.grad.any()

    def test_offsets_that_are_not_numbers(self):
        y = deformable_conv2d(
            torch.randn(1, 2, 4, 4), torch.full((1, 18, 4, 4), torch.nan), torch.randn(3, 2, 3, 3), padding=1
        )
        assert y.isnan().all()

    def test_no_image(self):
        weight = torch.randn(3, 2, 3, 3, requires_grad=True)
        y = deformable_conv2d(torch.randn(0, 2, 4, 4), torch.zeros(0, 18, 4, 4), weight, padding=1)
        y.sum().backward()
        assert y.shape == (0, 3, 4, 4)
        assert not weight.grad.any()

    def test_half_precision_is_close(self):
        x, offset, mask, weight, bias = (t.detach().float() for t in inputs(3, 1, 1))
        single = deformable_conv2d(x, offset, weight, bias, mask=mask, padding=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(deformable_conv2d(x, offset, weight, bias, mask=mask, padding=1), single)
        half = deformable_conv2d(x.bfloat16(), offset, weight, bias, mask=mask, padding=1)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), single, rtol=0.05, atol=0.1)

    def test_twice_the_same(self):
        results = []
        for _ in range(2):
            arguments = inputs(3, 1, 1)
            x, offset, mask, weight, bias = arguments
            deformable_conv2d(x, offset, weight, bias, mask=mask, padding=1).square().sum().backward()
            results.append([t.grad for t in arguments])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    @GEOMETRIES
    @pytest.mark.parametrize("modulated", [False, True])
    def test_it_is_torchvisions(self, side, stride, padding, modulated):
        ops = pytest.importorskip("torchvision.ops", exc_type=ImportError)
        results = []
        for theirs in (False, True):
            arguments = inputs(side, stride, padding)
            x, offset, mask, weight, bias = arguments
            convolve = ops.deform_conv2d if theirs else deformable_conv2d
            y = convolve(x, offset, weight, bias, mask=mask if modulated else None, stride=stride, padding=padding)
            y.square().sum().backward()
            results.append([y.detach(), *(t.grad for t in arguments if t.grad is not None)])
        assert len(results[0]) == len(results[1]) == (6 if modulated else 5)
        for ours, original in zip(*results, strict=True):
            torch.testing.assert_close(ours, original)


class TestConvNorm:
    @pytest.mark.parametrize("kind", ["frozen", "batch"])
    @pytest.mark.parametrize("stride", [1, 2])
    def test_without_offsets_it_is_a_convolution_with_its_norm(self, kind, stride):
        torch.manual_seed(0)
        plain, ours = (made(3, 4, 3, norm=kind, stride=stride).double() for made in (ConvNorm, DeformableConvNorm))
        for conv in (plain, ours):
            conv.norm.weight.data.copy_(torch.linspace(0.5, 2, 4))
            conv.norm.running_mean.copy_(torch.linspace(-1, 1, 4))
        ours.load_state_dict(plain.state_dict())
        x = torch.randn(2, 3, 6, 8, dtype=torch.float64)
        expected = plain(x)
        offset, mask = torch.zeros(2, 18, *expected.shape[2:]), torch.full((2, 9, *expected.shape[2:]), 1.0)
        torch.testing.assert_close(ours(x, offset.double()), expected)
        torch.testing.assert_close(ours(x, offset.double(), mask.double()), expected)
        assert not torch.allclose(ours(x, offset.double() + 0.5), expected)
