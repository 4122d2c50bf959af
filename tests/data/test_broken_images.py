"""Image files that are broken or hostile, and names that lead elsewhere."""

import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.coco_files import assert_one_sentence
from uniquery.data.images import (
    MAX_PIXELS,
    check_image_root,
    image_size,
    inside_root,
    is_file,
    read_image,
)
from uniquery.errors import DataError


def noise(height: int = 12, width: int = 20, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def png(width: int, height: int, data: bytes = b"\0" * 10) -> bytes:
    """A PNG file that claims a size, whatever data it holds."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


class TestBrokenFiles:
    def both(self, path: Path) -> list[str]:
        messages = []
        for function in (read_image, image_size):
            with pytest.raises(DataError) as caught:
                function(path)
            assert_one_sentence(caught.value)
            assert str(path) in str(caught.value)
            messages.append(str(caught.value))
        return messages

    def test_missing(self, tmp_path):
        assert all("not found" in message for message in self.both(tmp_path / "a.png"))

    @pytest.mark.parametrize(
        "content", [b"", b"\0", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM"]
    )
    def test_not_an_image(self, tmp_path, content):
        (tmp_path / "a.png").write_bytes(content)
        assert all("not a readable image" in message for message in self.both(tmp_path / "a.png"))

    @pytest.mark.parametrize("kind", ["EPS", "PDF", "TGA", "ICO"])
    def test_formats_that_are_not_for_data(self, tmp_path, kind):
        Image.fromarray(noise()).save(tmp_path / "a.png", format=kind)
        assert all("none of PNG, JPEG" in message for message in self.both(tmp_path / "a.png"))

    def test_a_folder(self, tmp_path):
        (tmp_path / "a.png").mkdir()
        self.both(tmp_path / "a.png")

    def test_below_a_file(self, tmp_path):
        (tmp_path / "file").write_text("")
        self.both(tmp_path / "file" / "a.png")

    def test_no_permission(self, tmp_path, monkeypatch):
        def refuse(*_args, **_more):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Image, "open", refuse)
        assert all("Permission denied" in message for message in self.both(tmp_path / "a.png"))

    @pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "webp"])
    def test_cut_off(self, tmp_path, suffix):
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(noise(64, 64)).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(DataError, match="not a readable image") as caught:
            read_image(path)
        assert_one_sentence(caught.value)

    def test_the_size_comes_from_the_header_alone(self, tmp_path):
        for suffix in ("jpg", "png"):
            path = tmp_path / f"a.{suffix}"
            Image.fromarray(noise(64, 80)).save(path)
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
            assert image_size(path) == (64, 80)

    @pytest.mark.parametrize(
        ("width", "height"), [(10**5, 10**5), (2**31 - 1, 1), (MAX_PIXELS + 1, 1), (2**31 - 1, 2**31 - 1)]
    )
    def test_absurd_sizes_are_refused(self, tmp_path, width, height):
        (tmp_path / "a.png").write_bytes(png(width, height))
        assert all(
            "claims to have more than 178,956,970 pixels" in message for message in self.both(tmp_path / "a.png")
        )

    def test_no_size_at_all(self, tmp_path):
        for width, height in ((0, 5), (5, 0)):
            (tmp_path / "a.png").write_bytes(png(width, height))
            self.both(tmp_path / "a.png")

    def test_large_images_do_not_warn(self, tmp_path):
        (tmp_path / "a.png").write_bytes(png(10**4, 10**4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert image_size(tmp_path / "a.png") == (10**4, 10**4)

    @pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "webp", "gif"])
    def test_random_damage_gives_an_image_or_one_sentence(self, tmp_path, suffix):
        path = tmp_path / f"a.{suffix}"
        Image.fromarray(noise()).save(path)
        whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
        for _ in range(40):
            damaged = bytearray(whole[: int(rng.integers(len(whole) // 4, len(whole) + 1))])
            for _ in range(int(rng.integers(1, 6))):
                damaged[int(rng.integers(len(damaged)))] = int(rng.integers(256))
            path.write_bytes(damaged)
            try:
                assert read_image(path).shape[2] == 3
                assert len(image_size(path)) == 2
            except DataError as error:
                refused += 1
                assert_one_sentence(error)
        assert refused > 5


class TestNames:
    @pytest.mark.parametrize(
        ("name", "relative"),
        [
            ("a.png", "a.png"),
            ("sub/a.png", "sub/a.png"),
            ("./a.png", "a.png"),
            ("sub/../a.png", "a.png"),
            ("sub//a.png", "sub/a.png"),
            ("..a.png", "..a.png"),
            (".../a.png", ".../a.png"),
            ("Größe 1.png", "Größe 1.png"),
        ],
    )
    def test_inside(self, name, relative):
        assert inside_root(Path("/data"), name) == Path("/data") / relative

    def test_absolute_names_inside_the_folder(self, tmp_path, monkeypatch):
        name = str(tmp_path / "images" / "sub" / "a.png")
        assert inside_root(tmp_path / "images", name) == tmp_path / "images" / "sub" / "a.png"
        monkeypatch.chdir(tmp_path)
        assert inside_root(Path("images"), name) == Path("images/sub/a.png")
        for outside in (tmp_path / "images", tmp_path / "images" / ".." / "b.png", tmp_path / "images2" / "a.png"):
            with pytest.raises(DataError, match="does not name a file inside"):
                inside_root(tmp_path / "images", str(outside))

    def test_back_slashes_of_windows(self, tmp_path):
        assert inside_root(tmp_path, "sub\\deep\\a.png") == tmp_path / "sub" / "deep" / "a.png"
        for outside in ("..\\a.png", "sub\\..\\..\\a.png", "..\\..\\etc\\passwd"):
            with pytest.raises(DataError, match="does not name a file inside"):
                inside_root(tmp_path, outside)
        (tmp_path / "odd\\name.png").write_text("")  # allowed on Linux, and taken as it is
        assert inside_root(tmp_path, "odd\\name.png") == tmp_path / "odd\\name.png"

    @pytest.mark.parametrize(
        "name",
        [
            "",
            ".",
            "./",
            "..",
            "../a.png",
            "sub/../../a.png",
            "sub/..",
            "/etc/passwd",
            "//a.png",
            "C:a.png",
            "./C:a.png",
            "C:/a.png",
            "C:\\a.png",
            "\\a.png",
            "\\\\server\\share\\a.png",
            "a\0.png",
            "\0",
            "a\n.png",
            "\x1b[31m",
        ],
    )
    def test_not_inside(self, name):
        with pytest.raises(DataError, match="does not name a file inside the image folder /data") as caught:
            inside_root(Path("/data"), name)
        assert_one_sentence(caught.value)

    def test_names_that_the_system_refuses_are_no_files(self, tmp_path):
        (tmp_path / "a").write_text("")
        assert is_file(tmp_path / "a")
        assert not is_file(tmp_path)
        assert not is_file(tmp_path / ("a" * 300))
        assert not is_file(tmp_path / "a" / "b")

    def test_image_root(self, tmp_path):
        check_image_root(tmp_path)
        (tmp_path / "file").write_text("")
        for root in (tmp_path / "nowhere", tmp_path / "file", tmp_path / ("a" * 300)):
            with pytest.raises(DataError, match="Image folder not found"):
                check_image_root(root)
