import pytest
import torch
import torch.nn.functional as F

from uniquery.layers.winograd import LargeTileWinograd, SharedConv3x3, SharedSequential, Winograd, shared_conv3x3

SIZES = [(4, 6), (5, 3), (1, 1), (2, 7)]
both_tiles = pytest.mark.parametrize("function", [Winograd, LargeTileWinograd])


def random_maps(channels, dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, channels, *size, dtype=dtype, generator=generator) for size in SIZES]


@both_tiles
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fewer_products_are_the_convolution(layout, function):
    maps = [x.contiguous(memory_format=layout) for x in random_maps(5)]
    kernel = torch.randn(3, 5, 3, 3, dtype=torch.float64)
    for ours, x in zip(function.apply(kernel, *maps), maps, strict=True):
        torch.testing.assert_close(ours, F.conv2d(x, kernel, padding=1))


@both_tiles
def test_gradcheck(function):
    kernel = torch.randn(2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function.apply, (kernel, *(x.requires_grad_() for x in random_maps(3))))


@both_tiles
@pytest.mark.parametrize("of_kernel", [False, True])
def test_only_gradients_that_are_asked_for(of_kernel, function):
    kernel = torch.randn(2, 3, 3, 3, dtype=torch.float64, requires_grad=of_kernel)
    maps = [x.requires_grad_(not of_kernel) for x in random_maps(3)]
    wanted = [kernel] if of_kernel else maps
    expected = torch.autograd.grad(sum(F.conv2d(x, kernel, padding=1).square().sum() for x in maps), wanted)
    ours = torch.autograd.grad(sum(y.square().sum() for y in function.apply(kernel, *maps)), wanted)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "is_fewer"), [(256, 256, True), (258, 256, True), (256, 80, False)])
def test_layer_is_conv2d_whichever_way_it_computes(inputs, outputs, is_fewer, bias, monkeypatch):
    calls = []
    monkeypatch.setattr(Winograd, "apply", lambda *a, apply=Winograd.apply: (calls.append(1), apply(*a))[1])
    layer = SharedConv3x3(inputs, outputs, bias=bias)
    maps = random_maps(inputs, torch.float32)
    outputs = layer(maps)
    assert bool(calls) is is_fewer
    for ours, x in zip(outputs, maps, strict=True):
        expected = F.conv2d(x, layer.weight, layer.bias, padding=1)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        assert ours.shape == expected.shape


def test_no_image():
    layer = SharedConv3x3(256, 256)
    (y,) = layer([torch.zeros(0, 256, 4, 6)])
    assert y.shape == (0, 256, 4, 6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [256, 8])
def test_large_tiles_are_the_convolution(channels, bias, monkeypatch):
    calls, apply = [], LargeTileWinograd.apply
    monkeypatch.setattr(LargeTileWinograd, "apply", lambda *a: calls.append(1) or apply(*a))
    conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
    maps = random_maps(channels, torch.float32)
    for ours, x in zip(shared_conv3x3(maps, conv.weight, conv.bias, large_tiles=True), maps, strict=True):
        torch.testing.assert_close(ours, conv(x), rtol=1e-4, atol=1e-4)
    assert bool(calls) is (channels == 256)


def test_large_tiles_lose_little_precision():
    x, kernel = torch.randn(1, 256, 16, 16), torch.randn(256, 256, 3, 3)
    exact = F.conv2d(x.double(), kernel.double(), padding=1)
    (ours,) = LargeTileWinograd.apply(kernel, x)
    assert (ours - exact).norm() < 3e-6 * exact.norm()
    assert (ours - exact).abs().max() < 2e-5 * exact.abs().max()


def test_float32_is_as_precise_as_float32_can_be():
    x, kernel = torch.randn(1, 256, 8, 8), torch.randn(256, 256, 3, 3)
    exact = F.conv2d(x.double(), kernel.double(), padding=1)
    (ours,) = Winograd.apply(kernel, x)
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def test_autocast_stays_in_low_precision():
    layer = SharedConv3x3(256, 256)
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = layer([torch.randn(1, 256, 4, 4)])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad is not None


def test_a_sequence_applies_every_layer_to_every_map():
    first, second = SharedConv3x3(4, 4), SharedConv3x3(4, 4)
    layers = SharedSequential(first, torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), second)
    maps = [torch.randn(2, 4, 6, 6), torch.randn(2, 4, 3, 5)]
    for ours, x in zip(layers(maps), maps, strict=True):
        expected = F.conv2d(x, first.weight, first.bias, padding=1)
        expected = F.conv2d(layers[1](expected).relu(), second.weight, second.bias, padding=1)
        torch.testing.assert_close(ours, expected)
