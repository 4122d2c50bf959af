"""Reading images from strangers: any mode, any orientation, one sentence when something is wrong."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from uniquery.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"})
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")


def read_image(path: Path) -> npt.NDArray[np.uint8]:
    """(H, W, 3) RGB, turned upright by its EXIF orientation.

    Grayscale, palette and transparent images become RGB; 16-bit images are scaled to 8 bits.

    Raises:
        DataError: the file is missing, not an image, cut off, or claims an absurd size.
    """
    try:
        with _quiet(), Image.open(path) as image:
            return _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise DataError(f"Image file not found: {path}.") from None
    except Image.DecompressionBombError:
        raise DataError(
            f"{path} claims to be larger than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels: refused."
        ) from None
    except Exception as error:  # pillow's decoders raise whatever they meet in a broken file
        raise DataError(f"{path} is not a readable image: {_one_line(error)}.") from None


def image_size(path: Path) -> tuple[int, int]:
    """(height, width) after EXIF orientation, from the header alone."""
    try:
        with _quiet(), Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            return (width, height) if turned else (height, width)
    except FileNotFoundError:
        raise DataError(f"Image file not found: {path}.") from None
    except Exception as error:
        raise DataError(f"{path} is not a readable image: {_one_line(error)}.") from None


def inside_root(root: Path, name: str) -> Path:
    """The path of a file named in annotations.

    Raises:
        DataError: the name is absolute or climbs out of the root.
    """
    relative = os.path.normpath(name)
    if not name or "\0" in name or Path(relative).is_absolute() or Path(relative).parts[0] == os.pardir:
        raise DataError(f"File name {name!r} leaves the image folder {root}: use a name relative to it.")
    return root / relative


def _to_rgb(image: Image.Image) -> npt.NDArray[np.uint8]:
    if image.mode in _SIXTEEN_BIT:
        values = np.asarray(image).astype(np.float64)
        scale = 257 if values.max(initial=0) > 255 else 1
        gray = np.clip(np.rint(values / scale), 0, 255).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.asarray(image.convert("RGB"))


def _quiet() -> warnings.catch_warnings[None]:
    """Inside, pillow's warnings about large but acceptable or slightly odd files stay silent."""
    return warnings.catch_warnings(action="ignore")


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
