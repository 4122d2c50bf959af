"""Images of any size, read window by window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from uniquery.data.images import SIXTEEN_BIT, opened, rgb_array

_LIMIT = 2**32 - 1  # pixels of a mask in COCO's run lengths


class WindowedImage:
    """An image that gives windows of it as RGB arrays; it is never held as a whole array.

    Args:
        image: an open PIL image; it is turned upright.
        bit_depth: as for `read_image`.
    """

    def __init__(self, image: Image.Image, bit_depth: int | None = None) -> None:
        ImageOps.exif_transpose(image, in_place=True)  # without a copy of an image that is upright
        self._image = image
        self._bit_depth = bit_depth
        is_deep = self._image.mode in SIXTEEN_BIT
        self._extrema: Any = self._image.getextrema() if is_deep else None  # so that all windows are scaled alike

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self._image.height, self._image.width

    def read(self, x: int, y: int, side: int) -> npt.NDArray[np.uint8]:
        """(side, side, 3) RGB of the window whose corner is at x, y; black beyond the image."""
        height, width = self.size
        part = self._image.crop((x, y, min(x + side, width), min(y + side, height)))
        inside = rgb_array(part, self._bit_depth, self._extrema)
        window = np.zeros((side, side, 3), dtype=np.uint8)
        window[: inside.shape[0], : inside.shape[1]] = inside
        return window


@contextmanager
def open_windows(path: Path, bit_depth: int | None = None) -> Iterator[WindowedImage]:
    """An image file without the limit of pixels that protects from decompression bombs.

    Raises:
        DataError: the file cannot be read, or has 2³² pixels or more.
    """
    with opened(path, max_pixels=_LIMIT) as image:
        yield WindowedImage(image, bit_depth)
