"""Folding a frozen normalization into its convolution changes nothing but the order of rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from uniquery.layers.norm import ConvNorm, FrozenBatchNorm2d, freeze

SHAPES = [
    pytest.param({"kernel_size": 1}, id="1x1"),
    pytest.param({"kernel_size": 3, "stride": 2}, id="3x3 stride 2"),
    pytest.param({"kernel_size": 3, "groups": 4}, id="depthwise"),
]


def made(**shape) -> ConvNorm:
    torch.manual_seed(1)
    layer = ConvNorm(4, 4, norm="frozen", **shape).double()
    layer.norm.weight.uniform_(-1.5, 1.5)
    layer.norm.bias.normal_()
    layer.norm.running_mean.normal_()
    layer.norm.running_var.uniform_(0.01, 3)
    return layer


def naive(layer: ConvNorm, images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convolution, then normalization by the definition."""
    norm = layer.norm
    x = F.conv2d(images, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    mean, variance, gain, offset = (
        value[:, None, None] for value in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    return (x - mean) / torch.sqrt(variance + norm.eps) * gain + offset


@pytest.mark.parametrize("shape", SHAPES)
def test_folded_equals_convolution_then_normalization(shape):
    layer, images = made(**shape), torch.randn(2, 4, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(images), naive(layer, images, layer.weight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_those_of_the_naive_form(shape):
    layer = made(**shape)
    images = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(layer(images))
    inputs = (images, layer.weight)
    folded = torch.autograd.grad(layer(images), inputs, direction)
    expected = torch.autograd.grad(naive(layer, images, layer.weight), inputs, direction)
    for ours, theirs in zip(folded, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradcheck(shape):
    layer = made(**shape)
    images = torch.randn(1, 4, 4, 3, dtype=torch.float64, requires_grad=True)

    def forward(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (images,))

    assert torch.autograd.gradcheck(forward, (images, layer.weight))


def test_the_normalization_alone_equals_batch_norm_in_evaluation():
    norm = made(kernel_size=1).norm
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    expected = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    torch.testing.assert_close(norm(x), expected)


def test_freezing_keeps_the_statistics_and_stops_them():
    layer = ConvNorm(3, 5, 3, norm="batch", eps=1e-3)
    layer(torch.randn(4, 3, 8, 8))  # moves the statistics
    images = torch.randn(2, 3, 8, 8)
    expected = layer.eval()(images)
    freeze(layer)
    layer.train()
    torch.testing.assert_close(layer(images), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(images), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(layer.norm, FrozenBatchNorm2d)
    assert not layer.weight.requires_grad


def test_a_frozen_normalization_has_no_parameters_and_four_buffers():
    norm = FrozenBatchNorm2d(3)
    assert list(norm.parameters()) == []
    assert set(norm.state_dict()) == {"weight", "bias", "running_mean", "running_var"}


def test_a_frozen_normalization_takes_a_learning_ones_state_strictly():
    learning = nn.BatchNorm2d(3)
    state = learning.state_dict()
    FrozenBatchNorm2d(3).load_state_dict(state)
    assert "num_batches_tracked" in state
    with pytest.raises(RuntimeError, match="running_var"):
        FrozenBatchNorm2d(3).load_state_dict({key: value for key, value in state.items() if key != "running_var"})
