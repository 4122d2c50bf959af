"""Label Studio's run lengths of brush strokes, the bit format of @thi.ng/rle-pack.

A stream of bits, most significant first: 32 bits with the number of values, 5 bits with the bits per value less one,
four times 4 bits with a number of bits less one, then blocks. A block is one bit, whether one value is repeated; two
bits, which of the four numbers of bits its length has; its length less one; then the repeated value, or as many values
as its length.
The values are the bytes of an RGBA picture, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from uniquery.masks.rle import Bitmap

CHANNELS = 4  # red, green, blue, alpha


def decode_brush(codes: Sequence[Any], height: int, width: int) -> Bitmap:
    """(H, W) uint8, 1 where the picture is not transparent, as in Label Studio's own export to COCO.

    Raises:
        ValueError: the codes are no such stream, or of a picture of another size; as a part of a sentence.
    """
    if not all(type(code) is int and 0 <= code < 256 for code in codes):
        raise ValueError("its rle is not a list of bytes")
    bits = _Bits(bytes(codes))
    total = bits.read(32)
    if total != height * width * CHANNELS:
        raise ValueError(f"its rle is of {total} values, but {width}×{height} pixels have {height * width * CHANNELS}")
    word_size = bits.read(5) + 1
    if word_size != 8:
        raise ValueError(f"its rle has values of {word_size} bits instead of 8")
    sizes = [bits.read(4) + 1 for _ in range(4)]
    values = np.empty(total, np.uint8)
    start = 0
    while start < total:
        is_repeated = bits.read(1)
        end = start + 1 + bits.read(sizes[bits.read(2)])
        if end > total:
            raise ValueError("its rle has more values than it says")
        values[start:end] = bits.read(8) if is_repeated else bits.read_bytes(end - start)
        start = end
    return (values.reshape(height, width, CHANNELS)[:, :, 3] > 0).astype(np.uint8)


class _Bits:
    """Reads numbers of a few bits, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def read(self, size: int) -> int:
        """The next number, of at most 32 bits."""
        first, offset = divmod(self._take(size), 8)
        window = int.from_bytes(self._data[first : first + 5].ljust(5, b"\0"), "big")
        return (window >> (40 - offset - size)) & ((1 << size) - 1)

    def read_bytes(self, count: int) -> npt.NDArray[np.uint8]:
        """The next numbers of 8 bits each."""
        first, offset = divmod(self._take(8 * count), 8)
        whole = np.frombuffer(self._data[first : first + count + 1].ljust(count + 1, b"\0"), np.uint8).astype(np.uint16)
        return ((whole[:-1] << offset | whole[1:] >> (8 - offset)) & 255).astype(np.uint8)

    def _take(self, size: int) -> int:
        position = self._position
        self._position += size
        if self._position > 8 * len(self._data):
            raise ValueError("its rle is cut off")
        return position
