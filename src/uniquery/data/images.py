"""Reads images of any source: any mode, any EXIF orientation, one sentence when something is wrong."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from uniquery.errors import DataError, UserError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"})
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM", "GIF")  # for some other formats pillow starts programs
MAX_PIXELS = 178_956_970  # pillow refuses larger files as decompression bombs
MIN_BIT_DEPTH = 9  # of 16-bit images whose values do not fit 8 bits
MAX_FOLDERS = 50  # how many subfolders are searched for an image
SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_ROTATED = (5, 6, 7, 8)  # the EXIF orientations that swap height and width


def read_image(path: Path, bit_depth: int | None = None) -> npt.NDArray[np.uint8]:
    """(H, W, 3) RGB, turned upright by its EXIF orientation.

    Grayscale, palette and transparent images become RGB; 16-bit images are scaled to 8 bits.

    Args:
        path: the file.
        bit_depth: how many bits the values of 16-bit images use: with 12, 4095 becomes 255, and so does what is above.
            None: all 16, or 8 if all values of the image fit them.

    Raises:
        DataError: the file is missing, not an image, truncated, needs more than 16 bits, or is too large.
    """
    with opened(path) as image:
        return rgb_array(image, bit_depth)


def image_size(path: Path) -> tuple[int, int]:
    """(height, width) after EXIF orientation, from the header alone.

    Raises:
        DataError: the file is missing, not an image, or too large.
    """
    with opened(path) as image:
        width, height = image.size
        if isinstance(image, TiffImageFile):  # some versions of pillow rotate its size on opening, but not its tags
            width, height = image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
        exif = Image.Image.getexif(image)  # the method of PNG files would decode the whole file to find EXIF data
        is_rotated = exif.get(ExifTags.Base.Orientation) in _ROTATED
        return (width, height) if is_rotated else (height, width)


def sixteen_bit_maximum(path: Path) -> int | None:
    """The largest value of an image with 16 bits a pixel; None for other images, which are not decoded.

    Raises:
        DataError: the file cannot be read.
    """
    with opened(path) as image:
        return int(np.asarray(image).max(initial=0)) if image.mode in SIXTEEN_BIT else None


def unused_bits(maxima: Sequence[int], bit_depth: int | None = None) -> str:
    """A sentence about 16-bit images whose values reach less than half of the range, or more; else an empty text.

    >>> unused_bits([4095, 3000]).partition(":")[0]
    'the values of 16-bit images reach only 4095 of 65535, and the images become nearly black'
    >>> unused_bits([200]), unused_bits([60000, 4000]), unused_bits([])
    ('', '', '')
    >>> unused_bits([4095], 12), unused_bits([5000], 12)
    ('', 'the values of 16-bit images reach 5000, and data.bit_depth 12 makes all above 4095 white: raise it.')
    """
    largest = max(maxima, default=0)
    if bit_depth is not None and largest >= 2**bit_depth:
        return (
            f"the values of 16-bit images reach {largest}, and data.bit_depth {bit_depth} makes all above "
            f"{2**bit_depth - 1} white: raise it."
        )
    if bit_depth is not None or not 255 < largest < 2**15:  # up to 255 they are taken as they are
        return ""
    return (
        f"the values of 16-bit images reach only {largest} of 65535, and the images become nearly black: train with "
        f"data.bit_depth={max(largest.bit_length(), MIN_BIT_DEPTH)}, or convert them to 8 bits."
    )


def check_image_root(root: Path) -> None:
    """Raises unless the image folder exists."""
    if not os.path.isdir(root):  # noqa: PTH112 (Path.is_dir raises for names that the system does not allow)
        raise DataError(f"Image folder not found: {root}.")


def is_file(path: Path) -> bool:
    """Whether a file exists; false for names that the system does not allow."""
    return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises for such names)


def inside_root(root: Path, name: str) -> Path:
    """The path of a file named in annotations.

    An absolute name may lead into the root. Where there is no such file, back-slashes, as Windows writes them, separate
    folders.

    Raises:
        DataError: the name is empty, leads outside the root on any system, or has control characters.
    """
    given = name
    if "\\" in name and not PureWindowsPath(name).anchor and not is_file(root / name):
        name = name.replace("\\", "/")
    relative = Path(os.path.normpath(name))
    if relative.is_absolute() and relative.is_relative_to(root.absolute()):
        relative = relative.relative_to(root.absolute())
    is_anchored = PureWindowsPath(str(relative)).anchor  # a leading slash, or a drive of Windows
    if not name or min(name) < " " or is_anchored or relative.parts[:1] in ((), (os.pardir,)):
        raise DataError(
            f"{given[:80]!r} does not name a file inside the image folder {root}: use a name relative to it."
        )
    return root / relative


def find_image_root(root: Path, name: str) -> Path | None:
    """The folder near an image folder, above it or up to two below it, in which a file does exist."""
    below = sorted(root.glob("*/"))[:MAX_FOLDERS]
    deeper = [folder for parent in below for folder in sorted(parent.glob("*/"))[:MAX_FOLDERS]]
    for folder in (root.absolute().parent, *below, *deeper):
        try:
            if is_file(inside_root(folder, name)):
                return folder
        except DataError:
            continue
    return None


@contextmanager
def opened(path: Path, *, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """An image file, of which the header is read; pillow's warnings about large or unusual files are not shown.

    Raises:
        DataError: the file cannot be read, here or inside the block, or has too many pixels.
    """
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            _pixel_limit(max_pixels),
            Image.open(path, formats=FORMATS) as image,
        ):
            yield image
    except UserError:
        raise
    except FileNotFoundError:
        raise DataError(f"Image file not found: {path}.") from None
    except UnidentifiedImageError:
        raise DataError(f"{path} is not a readable image: it is damaged, or none of {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError:
        raise DataError(f"{path} claims to have more than {max_pixels:,} pixels: refused.") from None
    except Exception as error:  # pillow's decoders raise errors of many kinds on broken files
        raise DataError(f"{path} is not a readable image: {_one_line(error)}.") from None


@contextmanager
def _pixel_limit(max_pixels: int) -> Iterator[None]:
    """Pillow refuses images of more than twice its limit, which is a global of the process."""
    before = Image.MAX_IMAGE_PIXELS
    try:
        if max_pixels != MAX_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels // 2
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def rgb_array(
    image: Image.Image, bit_depth: int | None = None, extrema: tuple[float, float] | None = None
) -> npt.NDArray[np.uint8]:
    """(H, W, 3) RGB of an open image of any mode, turned upright by its EXIF orientation; see `read_image`.

    Args:
        image: the image.
        bit_depth: as for `read_image`.
        extrema: the smallest and the largest value of the 16-bit image that it is a part of; None: its own.

    Raises:
        ValueError: its values do not fit 16 bits, as a part of a sentence. A broken file raises what pillow raises.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BIT:
        values = np.asarray(image).astype(np.float64)
        scale = _sixteen_bit_scale(extrema or (values.min(initial=0), values.max(initial=0)), bit_depth)
        gray = np.clip(np.rint(values / scale), 0, 255).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers, so convert it to 8 or 16 bits")
    return np.asarray(image.convert("RGB"))


def _sixteen_bit_scale(extrema: tuple[float, float], bit_depth: int | None) -> float:
    """What the values of an image with 16 bits a pixel are divided by: 1 if 8 bits hold them.

    Raises:
        ValueError: its values do not fit 16 bits, as a part of a sentence.
    """
    low, high = extrema
    if low < 0 or high > 65535:
        raise ValueError("it has values outside 0 to 65535, so convert it to 8 or 16 bits")
    if bit_depth is not None:
        return float((2**bit_depth - 1) / 255)
    return 257 if high > 255 else 1


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
