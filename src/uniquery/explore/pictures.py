"""The images of a data set as small files for the browser."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from uniquery.data.dataset import Dataset
from uniquery.explore.byte_cache import ByteCache

Size = Literal["thumbnail", "picture"]
LONGEST: dict[Size, int] = {"thumbnail": 256, "picture": 1600}
"""The longest side in pixels; larger images are scaled down."""
CACHE_BYTES = 64 * 2**20


class Pictures:
    """Images of a data set, encoded for the browser; those used last are kept.

    Args:
        data: the data set.
    """

    def __init__(self, data: Dataset) -> None:
        self._data, self._cache = data, ByteCache[bytes](CACHE_BYTES)

    def get(self, index: int, size: Size) -> bytes:
        """A JPEG file.

        Raises:
            DataError: the image cannot be read.
        """
        found = self._cache.get((index, size))
        if found is None:
            found = jpeg_bytes(self._data.read(index), LONGEST[size])
            self._cache.put((index, size), found, len(found))
        return found


def jpeg_bytes(image: npt.NDArray[np.uint8], longest: int) -> bytes:
    """A JPEG file of an (H, W, 3) image whose sides are at most `longest`."""
    picture = Image.fromarray(image)
    picture.thumbnail((longest, longest))
    buffer = io.BytesIO()
    picture.save(buffer, "jpeg", quality=88)
    return buffer.getvalue()
