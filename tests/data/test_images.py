"""Images from strangers: every mode and orientation."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from helpers.coco_files import assert_one_sentence
from uniquery.data.images import (
    SUFFIXES,
    image_size,
    read_image,
)
from uniquery.errors import DataError

LOSSLESS = ("png", "tif", "bmp", "ppm", "gif")


def noise(height: int = 12, width: int = 20, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def blocks() -> np.ndarray:
    """(48, 64, 3): four corners of different brightness, in blocks that survive JPEG."""
    corners = np.array([[0, 80], [160, 240]], np.uint8)
    return np.repeat(np.repeat(corners, 24, 0), 32, 1)[..., None].repeat(3, 2)


def stored(upright: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels as a camera stores them: by EXIF's own words for where row 0 and column 0 belong."""
    return {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: upright[:, ::-1].swapaxes(0, 1),  # row 0 is the right side, column 0 the top
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: upright[::-1].swapaxes(0, 1),
    }[orientation]


def save_turned(path: Path, upright: np.ndarray, orientation: int) -> None:
    image = Image.fromarray(np.ascontiguousarray(stored(upright, orientation)))
    if path.suffix == ".tif":
        tags = ImageFileDirectory_v2()
        tags[ExifTags.Base.Orientation] = orientation
        image.save(path, tiffinfo=tags)
    else:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        image.save(path, exif=exif, **({"lossless": True} if path.suffix == ".webp" else {}))


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
    def test_is_applied_to_pixels_and_size(self, tmp_path, suffix, orientation):
        path = tmp_path / f"a.{suffix}"
        save_turned(path, blocks(), orientation)
        image = read_image(path)
        assert image.shape == (48, 64, 3)
        assert np.abs(image.astype(int) - blocks()).mean() < (3 if suffix == "jpg" else 0.01)
        assert image_size(path) == (48, 64)

    @pytest.mark.parametrize("orientation", [0, 9, 77])
    def test_an_unknown_one_is_ignored(self, tmp_path, orientation):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(noise()).save(tmp_path / "a.png", exif=exif)
        assert np.array_equal(read_image(tmp_path / "a.png"), noise())
        assert image_size(tmp_path / "a.png") == (12, 20)

    @pytest.mark.parametrize("exif", [b"garbage", b"II*\0\xff\xff\xff\x7f", b"MM\0*\0\0\0\x08\0\x05\x01\x12", b""])
    def test_broken_exif_does_not_make_an_image_unreadable(self, tmp_path, exif):
        Image.fromarray(blocks()).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + exif)
        assert read_image(tmp_path / "a.jpg").shape == (48, 64, 3)
        assert image_size(tmp_path / "a.jpg") == (48, 64)

    @pytest.mark.parametrize("depth", ["gray", "16 bit", "palette"])
    def test_also_of_other_modes(self, tmp_path, depth):
        upright = noise()[..., 0].astype(np.uint16) * 257 if depth == "16 bit" else noise()[..., 0]
        image = Image.fromarray(np.ascontiguousarray(stored(upright, 6)))
        if depth == "palette":
            image.putpalette([value for i in range(256) for value in (i, i, i)])
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        image.save(tmp_path / "a.png", exif=exif)
        assert np.array_equal(read_image(tmp_path / "a.png"), noise()[..., :1].repeat(3, 2))


class TestModes:
    @pytest.mark.parametrize("suffix", LOSSLESS[:4])
    def test_rgb(self, tmp_path, suffix):
        Image.fromarray(noise()).save(tmp_path / f"a.{suffix}")
        image = read_image(tmp_path / f"a.{suffix}")
        assert image.dtype == np.uint8
        assert np.array_equal(image, noise())

    @pytest.mark.parametrize("suffix", [*LOSSLESS, "pgm"])
    def test_gray(self, tmp_path, suffix):
        gray = noise()[..., 0]
        Image.fromarray(gray).save(tmp_path / f"a.{suffix}")
        assert np.array_equal(read_image(tmp_path / f"a.{suffix}"), gray[..., None].repeat(3, 2))

    @pytest.mark.parametrize("suffix", ["png", "tif", "bmp"])
    def test_one_bit(self, tmp_path, suffix):
        bits = noise()[..., 0] > 127
        Image.fromarray(bits).convert("1").save(tmp_path / f"a.{suffix}")
        assert np.array_equal(read_image(tmp_path / f"a.{suffix}"), (bits * np.uint8(255))[..., None].repeat(3, 2))

    def palette(self) -> tuple[Image.Image, np.ndarray]:
        indices, colors = noise()[..., 0] % 4, noise(4, 3)[..., 0]
        image = Image.frombytes("P", indices.shape[::-1], indices.tobytes())
        image.putpalette(colors.ravel().tolist())
        return image, colors[indices]

    @pytest.mark.parametrize("suffix", ["png", "tif", "gif", "bmp"])
    def test_palette(self, tmp_path, suffix):
        image, colors = self.palette()
        image.save(tmp_path / f"a.{suffix}")
        assert np.array_equal(read_image(tmp_path / f"a.{suffix}"), colors)

    @pytest.mark.parametrize("transparency", [1, bytes([0, 128, 255, 7])])
    def test_palette_with_transparency_keeps_its_colors(self, tmp_path, transparency):
        image, colors = self.palette()
        image.save(tmp_path / "a.png", transparency=transparency)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(read_image(tmp_path / "a.png"), colors)

    @pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
    def test_rgba_drops_alpha(self, tmp_path, suffix):
        rgba = noise(channels=4)
        more = {"lossless": True, "exact": True} if suffix == "webp" else {}
        Image.fromarray(rgba).save(tmp_path / f"a.{suffix}", **more)
        assert np.array_equal(read_image(tmp_path / f"a.{suffix}"), rgba[..., :3])

    def test_gray_with_alpha_drops_alpha(self, tmp_path):
        both = noise(channels=2)
        Image.fromarray(both).save(tmp_path / "a.png")
        assert Image.open(tmp_path / "a.png").mode == "LA"
        assert np.array_equal(read_image(tmp_path / "a.png"), both[..., :1].repeat(3, 2))

    @pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
    def test_sixteen_bits_are_scaled(self, tmp_path, suffix):
        gray = noise()[..., 0]
        Image.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / f"a.{suffix}")
        assert np.array_equal(read_image(tmp_path / f"a.{suffix}"), gray[..., None].repeat(3, 2))

    def test_sixteen_bits_are_rounded_at_both_ends(self, tmp_path):
        values = np.array([[0, 128, 129, 65534, 65535]], np.uint16)
        Image.fromarray(values).save(tmp_path / "a.png")
        assert read_image(tmp_path / "a.png")[0, :, 0].tolist() == [0, 0, 1, 255, 255]

    def test_eight_bits_in_a_larger_container_stay(self, tmp_path):
        gray = noise()[..., 0]
        for kind in (np.uint16, np.int32):
            Image.fromarray(gray.astype(kind)).save(tmp_path / "a.tif")
            assert np.array_equal(read_image(tmp_path / "a.tif"), gray[..., None].repeat(3, 2))

    @pytest.mark.parametrize(
        "values", [[-1, 0], [0, 65536], [0, 2**31 - 1], [0.0, 1.0], [0.0, 255.0]], ids=lambda v: str(v[1])
    )
    def test_values_that_do_not_fit_sixteen_bits_are_refused(self, tmp_path, values):
        kind = np.int32 if isinstance(values[0], int) else np.float32
        Image.fromarray(np.array([values], kind)).save(tmp_path / "a.tif")
        with pytest.raises(DataError, match=r"a\.tif .* convert it to 8 or 16 bits\.$") as caught:
            read_image(tmp_path / "a.tif")
        assert_one_sentence(caught.value)

    def test_sixteen_bits_in_a_larger_container_are_scaled(self, tmp_path):
        Image.fromarray(np.array([[0, 257, 65535]], np.int32)).save(tmp_path / "a.tif")
        assert read_image(tmp_path / "a.tif")[0, :, 0].tolist() == [0, 1, 255]

    def test_cmyk(self, tmp_path):
        cmyk = np.zeros((2, 5, 4), np.uint8)
        for column, channel in enumerate(range(4), start=1):
            cmyk[:, column, channel] = 255
        Image.frombytes("CMYK", (5, 2), cmyk.tobytes()).save(tmp_path / "a.tif")
        colors = read_image(tmp_path / "a.tif")[0].tolist()
        assert colors == [[255] * 3, [0, 255, 255], [255, 0, 255], [255, 255, 0], [0, 0, 0]]
        Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(tmp_path / "a.jpg")
        assert np.abs(read_image(tmp_path / "a.jpg").astype(int) - [0, 255, 255]).max() < 4

    def test_animations_give_their_first_picture(self, tmp_path):
        first, second = (Image.new("L", (8, 6), value) for value in (10, 200))
        first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
        assert (read_image(tmp_path / "a.gif") == 10).all()

    def test_several_pictures_of_a_camera_give_the_first(self, tmp_path):
        first, second = (Image.new("L", (8, 6), value) for value in (10, 200))
        first.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[second])
        assert np.abs(read_image(tmp_path / "a.jpg").astype(int) - 10).max() < 4

    def test_one_pixel(self, tmp_path):
        Image.new("RGB", (1, 1), (1, 2, 3)).save(tmp_path / "a.png")
        assert read_image(tmp_path / "a.png").tolist() == [[[1, 2, 3]]]

    def test_every_known_suffix_can_be_read(self, tmp_path):
        for suffix in SUFFIXES:
            path = tmp_path / f"a{suffix}"
            Image.fromarray(noise()[..., 0]).save(path)
            assert read_image(path).shape == (12, 20, 3)
            assert image_size(path) == (12, 20)
