import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from uniquery.layers.fpn import FPN


def naive_conv(x, convolution, stride, padding):
    """A convolution as four loops over (C, h, w) and an inner product."""
    weight, bias = convolution.weight.detach(), convolution.bias.detach()
    side = weight.shape[-1]
    height, width = ((length + 2 * padding - side) // stride + 1 for length in x.shape[1:])
    out = torch.zeros(len(weight), height, width, dtype=x.dtype)
    for o, y, z in itertools.product(range(len(weight)), range(height), range(width)):
        total = bias[o].item()
        for dy, dx in itertools.product(range(side), range(side)):
            row, column = y * stride + dy - padding, z * stride + dx - padding
            if 0 <= row < x.shape[1] and 0 <= column < x.shape[2]:
                total += (weight[o, :, dy, dx] @ x[:, row, column]).item()
        out[o, y, z] = total
    return out


def naive_fpn(fpn, features, strides, extra):
    """From the coarsest down: lateral, plus the level above with each cell repeated, then the output convolution."""
    pyramid, above = {}, None
    for stride in sorted(strides, reverse=True):
        merged = naive_conv(features[stride], fpn.laterals[str(stride)], 1, 0)
        if above is not None:
            for y, x in itertools.product(*map(range, merged.shape[1:])):
                merged[:, y, x] += above[:, y // 2, x // 2]
        pyramid[stride] = naive_conv(merged, fpn.outputs[str(stride)], 1, 1)
        above = merged
    coarsest = max(strides)
    for i in range(extra):
        source = pyramid[coarsest * 2**i]
        pyramid[coarsest * 2 ** (i + 1)] = naive_conv(source.clamp(min=0) if i else source, fpn.extras[i], 2, 1)
    return pyramid


def made(channels, extra):
    torch.manual_seed(0)
    fpn = FPN(channels, 4, extra_levels=extra).double()
    for parameter in fpn.parameters():
        parameter.data.normal_(std=0.5)
    return fpn


def features_of(channels, height, width, images=1):
    """Maps whose sides are rounded up at each stride."""
    return {
        stride: torch.randn(images, c, -(-height // stride), -(-width // stride), dtype=torch.float64)
        for stride, c in channels.items()
    }


@pytest.mark.parametrize("size", [(64, 96), (40, 72), (33, 31)])
@pytest.mark.parametrize(("channels", "extra"), [({8: 2, 16: 3, 32: 5}, 2), ({16: 3, 32: 2}, 0), ({4: 1, 8: 2}, 3)])
def test_equals_loops(size, channels, extra):
    if 4 in channels:
        size = tuple(side // 4 for side in size)
    fpn = made(channels, extra)
    features = features_of(channels, *size, images=2)
    pyramid = fpn(features)
    assert list(pyramid) == [min(channels) * 2**i for i in range(len(channels) + extra)]
    for i in range(2):
        expected = naive_fpn(fpn, {s: f[i] for s, f in features.items()}, channels, extra)
        for stride, level in pyramid.items():
            torch.testing.assert_close(level[i], expected[stride])


def test_features_of_other_strides_are_left_alone():
    channels = {8: 2, 16: 3}
    fpn = made(channels, 0)
    features = features_of(channels, 32, 32)
    with_more = {**features, 4: torch.randn(1, 9, 8, 8, dtype=torch.float64)}
    for stride, level in fpn(with_more).items():
        assert torch.equal(level, fpn(features)[stride])


def test_gradient_of_features_and_weights():
    channels = {8: 2, 16: 2}
    fpn = made(channels, 2)
    names, values = zip(*fpn.named_parameters(), strict=True)

    def levels(fine, coarse, *parameters):
        return tuple(functional_call(fpn, dict(zip(names, parameters, strict=True)), ({8: fine, 16: coarse},)).values())

    inputs = [*features_of(channels, 24, 32).values(), *(value.detach() for value in values)]
    assert gradcheck(levels, [x.requires_grad_() for x in inputs], fast_mode=True)


def test_a_fresh_pyramid_has_no_bias():
    fpn = FPN({8: 2, 16: 2}, 4, extra_levels=1)
    assert all((p == 0).all() for name, p in fpn.named_parameters() if name.endswith("bias"))
