import pytest
import torch
from torch.autograd import gradcheck

from uniquery.layers.normalize import Normalize
from uniquery.structures import Images

MEAN, STD = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)
SIZES = ((5, 7), (4, 8), (8, 3))


def pixels_of(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, 3, 8, 8), generator=generator).to(dtype)


def naive(pixels, order):
    """Pixel by pixel; mean and deviation are in the order of the weights."""
    result = torch.zeros(pixels.shape, dtype=torch.float64)
    for i, (height, width) in enumerate(SIZES):
        for channel in range(3):
            source = 2 - channel if order == "BGR" else channel
            for y in range(height):
                for x in range(width):
                    result[i, channel, y, x] = (pixels[i, source, y, x].item() - MEAN[channel]) / STD[channel]
    return result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_equals_loops(order, dtype):
    pixels = pixels_of(dtype)
    before = pixels.clone()
    result = Normalize(MEAN, STD, order)(Images(pixels, SIZES))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), naive(pixels, order), rtol=1e-5, atol=1e-6)
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_padding_is_exactly_zero(order):
    result = Normalize(MEAN, STD, order)(Images(torch.full((3, 3, 8, 8), 255, dtype=torch.uint8), SIZES))
    inside = torch.zeros(3, 1, 8, 8, dtype=torch.bool)
    for i, (height, width) in enumerate(SIZES):
        inside[i, :, :height, :width] = True
    assert (result.masked_select(~inside) == 0).all()
    assert (result.masked_select(inside) != 0).all()


def test_nothing_in_the_padding_survives():
    pixels = pixels_of(torch.float32)
    pixels[0, :, 5:] = torch.nan
    assert Normalize(MEAN, STD, "RGB")(Images(pixels, SIZES)).isfinite().all()


def test_follows_the_precision_of_the_model():
    assert Normalize(MEAN, STD, "RGB").double()(Images(pixels_of(torch.uint8), SIZES)).dtype == torch.float64


def test_is_no_part_of_a_checkpoint():
    assert Normalize(MEAN, STD, "RGB").state_dict() == {}


def test_a_size_for_each_image():
    with pytest.raises(ValueError, match="shorter"):
        Normalize(MEAN, STD, "RGB")(Images(pixels_of(torch.uint8), SIZES[:2]))


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_gradient(order):
    normalize = Normalize(MEAN, STD, order).double()
    pixels = pixels_of(torch.float64).requires_grad_()
    assert gradcheck(lambda x: normalize(Images(x, SIZES)), pixels)
