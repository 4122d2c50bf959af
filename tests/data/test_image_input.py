"""Every form of an image gives the same pixels; everything else is one sentence."""

import numpy as np
import pytest
import torch
from PIL import Image

from uniquery.data.image_input import as_rgb_array
from uniquery.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def saved(folder, image, **options):
    image.save(folder / "image.png", **options)
    return folder / "image.png"


class TestForms:
    def test_all_forms_of_one_image_are_equal(self, tmp_path):
        path = saved(tmp_path, Image.fromarray(PIXELS))
        tensor = torch.from_numpy(PIXELS).permute(2, 0, 1)
        for image in (path, str(path), Image.fromarray(PIXELS), Image.open(path), PIXELS, tensor, tensor.contiguous()):
            array = as_rgb_array(image)
            assert array.dtype == np.uint8
            assert np.array_equal(array, PIXELS)

    def test_gray_arrays_become_three_equal_channels(self):
        array = as_rgb_array(PIXELS[..., 0])
        assert np.array_equal(array, PIXELS[..., :1].repeat(3, axis=2))

    def test_reversed_and_read_only_arrays_can_be_predicted(self):
        frozen = PIXELS[..., ::-1]
        frozen.flags.writeable = False
        array = as_rgb_array(frozen)
        assert np.array_equal(torch.tensor(array).numpy(), PIXELS[..., ::-1])

    def test_exif_orientation_of_a_pil_image_is_respected_like_that_of_a_file(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 6
        path = saved(tmp_path, Image.fromarray(PIXELS), exif=exif)
        assert as_rgb_array(Image.open(path)).shape == (7, 5, 3)
        assert np.array_equal(as_rgb_array(Image.open(path)), as_rgb_array(path))

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I"])
    def test_any_mode(self, mode):
        image = Image.fromarray(PIXELS).convert("L" if mode in ("I;16", "I") else "RGB").convert(mode)
        assert as_rgb_array(image).shape == (5, 7, 3)


class TestWrongInputs:
    @pytest.mark.parametrize(
        ("image", "words"),
        [
            (PIXELS / 255.0, r"uint8 in 0..255, not float64: convert it, \(image \* 255\)"),
            (PIXELS > 3, "not bool"),
            (np.zeros((5, 7, 4), np.uint8), r"not \(5, 7, 4\): .*\[\.\.\., :3\]"),
            (np.zeros((5, 7, 1), np.uint8), r"not \(5, 7, 1\)"),
            (np.zeros((3, 5, 7), np.uint8), r"image.transpose\(1, 2, 0\)"),
            (np.zeros((2, 5, 7, 3), np.uint8), "as a list"),
            (np.zeros((0, 7, 3), np.uint8), "empty"),
            (np.zeros((0, 7), np.uint8), "empty"),
            (torch.rand(3, 5, 7), r"not float32: convert it, \(image \* 255\)"),
            (torch.zeros(5, 7, 3, dtype=torch.uint8), r"image.permute\(2, 0, 1\)"),
            (torch.zeros(4, 5, 7, dtype=torch.uint8), r"\(3, H, W\), not \(4, 5, 7\)"),
            (torch.zeros(5, 7, dtype=torch.uint8), r"\(3, H, W\), not \(5, 7\)"),
            (torch.zeros(2, 3, 5, 7, dtype=torch.uint8), "as a list"),
            (torch.zeros(3, 0, 7, dtype=torch.uint8), "empty"),
            (None, "not NoneType"),
            ([PIXELS], "not list"),
            (Image.fromarray(PIXELS[..., 0].astype(np.float32)), "floating-point"),
        ],
    )
    def test_one_sentence(self, image, words):
        with pytest.raises(DataError, match=words) as caught:
            as_rgb_array(image)
        assert str(caught.value).endswith(".")
        assert "\n" not in str(caught.value)

    def test_missing_and_truncated_files(self, tmp_path):
        with pytest.raises(DataError, match="not found"):
            as_rgb_array(str(tmp_path / "none.png"))
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        path = saved(tmp_path, Image.fromarray(noise))
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(DataError, match="PIL image cannot be read"):
            as_rgb_array(Image.open(path))
