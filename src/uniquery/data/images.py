"""Reads images of any source: any mode, any EXIF orientation, one sentence when something is wrong."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from uniquery.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM", "GIF")  # for some other formats pillow starts programs
MAX_PIXELS = 178_956_970  # pillow refuses larger files as decompression bombs
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_ROTATED = (5, 6, 7, 8)  # the EXIF orientations that swap height and width


def read_image(path: Path) -> npt.NDArray[np.uint8]:
    """(H, W, 3) RGB, turned upright by its EXIF orientation.

    Grayscale, palette and transparent images become RGB; 16-bit images are scaled to 8 bits, unless all their values
    fit 8 bits as they are.

    Raises:
        DataError: the file is missing, not an image, truncated, needs more than 16 bits, or is too large.
    """
    with _opened(path) as image:
        return rgb_array(image)


def image_size(path: Path) -> tuple[int, int]:
    """(height, width) after EXIF orientation, from the header alone.

    Raises:
        DataError: the file is missing, not an image, or too large.
    """
    with _opened(path) as image:
        width, height = image.size
        if isinstance(image, TiffImageFile):  # some versions of pillow rotate its size on opening, but not its tags
            width, height = image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
        exif = Image.Image.getexif(image)  # the method of PNG files would decode the whole file to find EXIF data
        is_rotated = exif.get(ExifTags.Base.Orientation) in _ROTATED
        return (width, height) if is_rotated else (height, width)


def check_image_root(root: Path) -> None:
    """Raises unless the image folder exists."""
    if not os.path.isdir(root):  # noqa: PTH112 (Path.is_dir raises for names that the system does not allow)
        raise DataError(f"Image folder not found: {root}.")


def is_file(path: Path) -> bool:
    """Whether a file exists; false for names that the system does not allow."""
    return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises for such names)


def inside_root(root: Path, name: str) -> Path:
    """The path of a file named in annotations.

    Raises:
        DataError: the name is empty or absolute on any system, leads outside the root, or has control characters.
    """
    relative = Path(os.path.normpath(name))
    is_anchored = PureWindowsPath(str(relative)).anchor  # a leading slash, or a drive of Windows
    if not name or min(name) < " " or is_anchored or relative.parts[:1] in ((), (os.pardir,)):
        raise DataError(
            f"{name[:80]!r} does not name a file inside the image folder {root}: use a name relative to it."
        )
    return root / relative


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image file, of which the header is read; pillow's warnings about large or unusual files are not shown."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=FORMATS) as image:
            yield image
    except FileNotFoundError:
        raise DataError(f"Image file not found: {path}.") from None
    except UnidentifiedImageError:
        raise DataError(f"{path} is not a readable image: it is damaged, or none of {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError:
        raise DataError(f"{path} claims to have more than {MAX_PIXELS:,} pixels: refused.") from None
    except Exception as error:  # pillow's decoders raise errors of many kinds on broken files
        raise DataError(f"{path} is not a readable image: {_one_line(error)}.") from None


def rgb_array(image: Image.Image) -> npt.NDArray[np.uint8]:
    """(H, W, 3) RGB of an open image of any mode, turned upright by its EXIF orientation.

    Raises:
        ValueError: its values do not fit 16 bits, as a part of a sentence. A broken file raises what pillow raises.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode in _SIXTEEN_BIT:
        values = np.asarray(image).astype(np.float64)
        if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise ValueError("it has values outside 0 to 65535, so convert it to 8 or 16 bits")
        scale = 257 if values.max(initial=0) > 255 else 1
        gray = np.clip(np.rint(values / scale), 0, 255).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers, so convert it to 8 or 16 bits")
    return np.asarray(image.convert("RGB"))


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
