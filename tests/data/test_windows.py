"""Images read window by window are the image read as a whole."""

import numpy as np
import pytest
from PIL import Image

from uniquery.data import images, windows
from uniquery.data.images import read_image
from uniquery.data.windows import open_windows
from uniquery.errors import DataError


def save(folder, name, array, **options):
    path = folder / name
    Image.fromarray(array).save(path, **options)
    return path


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.bmp"])
def test_windows_are_parts_of_the_image(tmp_path, pixels, name):
    path = save(tmp_path, name, pixels)
    with open_windows(path) as image:
        assert image.size == (50, 70)
        assert (image.read(10, 5, 32) == pixels[5:37, 10:42]).all()
        beyond = image.read(60, 40, 32)
    assert beyond.shape == (32, 32, 3)
    assert (beyond[:10, :10] == pixels[40:, 60:]).all()
    assert not beyond[10:].any()
    assert not beyond[:, 10:].any()


def test_exif_orientation_turns_the_windows(tmp_path, pixels):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path, "a.png", pixels, exif=exif)
    whole = read_image(path)
    with open_windows(path) as image:
        assert image.size == whole.shape[:2] == (70, 50)
        assert (image.read(3, 20, 40) == whole[20:60, 3:43]).all()


def test_sixteen_bits_are_scaled_by_the_whole_image(tmp_path):
    values = np.full((64, 64), 100, dtype=np.uint16)
    values[40:, 40:] = 60000
    path = save(tmp_path, "a.png", values)
    with open_windows(path) as image:
        assert (image.read(0, 0, 32) == read_image(path)[:32, :32]).all()
        assert not image.read(0, 0, 32).any()  # on its own, this window would be taken for 8 bits


def test_the_limit_of_pixels_is_lifted_for_windows_only(tmp_path, pixels, monkeypatch):
    path = save(tmp_path, "a.png", pixels)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # refuses more than twice as many
    with pytest.raises(DataError, match="refused"):
        read_image(path)
    with open_windows(path) as image:
        assert image.read(0, 0, 32).any()
    assert Image.MAX_IMAGE_PIXELS == 1000
    monkeypatch.setattr(windows, "_LIMIT", 2000)
    with pytest.raises(DataError, match="more than 2,000 pixels"), open_windows(path):
        pass


def test_a_broken_file_is_one_sentence(tmp_path, pixels):
    path = save(tmp_path, "a.png", pixels)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"a\.png is not a readable image"), open_windows(path) as image:
        image.read(0, 0, 32)
    with pytest.raises(DataError, match="not found"), open_windows(tmp_path / "none.png"):
        pass
    assert images.MAX_PIXELS > 10**8
