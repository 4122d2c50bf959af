"""COCO masks in and out: polygons, run lengths (compressed or not), bitmaps."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hotcoco import mask as coco_mask

Rle = dict[str, Any]
Bitmap = npt.NDArray[np.uint8]
_MAX_DIGITS = 7  # digits of a run length in base 32: enough for 32 bits, the most that a run may have


def encode(bitmap: npt.NDArray[Any]) -> Rle:
    """The compressed run lengths of one (H, W) bitmap; `counts` is a str, ready for json.

    >>> decode(encode(np.eye(3, dtype=np.uint8))).tolist()
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    encoded = coco_mask.encode(np.asfortranarray(bitmap, dtype=np.uint8))
    assert isinstance(encoded, dict)
    counts = encoded["counts"]
    return {"size": list(bitmap.shape), "counts": counts.decode() if isinstance(counts, bytes) else counts}


def decode(rle: Rle) -> Bitmap:
    """(H, W) uint8 of one compressed run-length mask."""
    return np.asarray(coco_mask.decode(rle), dtype=np.uint8)


def from_segmentation(segmentation: Any, height: int, width: int) -> Rle:
    """The compressed run lengths of any COCO segmentation.

    Raises:
        ValueError: its message completes a sentence that begins with the annotation.
    """
    if height * width >= 2**32:
        raise ValueError(f"its image of {width}×{height} pixels is too large for run lengths")
    if isinstance(segmentation, list):
        return from_polygons(segmentation, height, width)
    if isinstance(segmentation, dict):
        return _from_run_lengths(segmentation, height, width)
    raise ValueError(f"its segmentation is {_type_name(segmentation)}, neither polygons nor run lengths")


def from_polygons(polygons: Sequence[Any], height: int, width: int) -> Rle:
    """The union of several polygons."""
    if not polygons:
        raise ValueError("its segmentation has no polygon")
    for polygon in polygons:
        _check_polygon(polygon)
    rles = coco_mask.frPyObjects([list(map(float, polygon)) for polygon in polygons], height, width)
    return _with_text_counts(coco_mask.merge(rles))


def _check_polygon(polygon: Any) -> None:
    if not isinstance(polygon, list):
        raise ValueError(f"a polygon is {_type_name(polygon)}, not a list of numbers")
    if not _are_finite(polygon):
        raise ValueError("a polygon holds something that is not a finite number")
    if len(polygon) < 6:
        raise ValueError(f"a polygon has {len(polygon) / 2:g} points and needs at least 3")
    if len(polygon) % 2:
        raise ValueError(f"a polygon has an odd number of coordinates ({len(polygon)})")


def _are_finite(values: list[Any]) -> bool:
    """Whether all are finite numbers; a finite sum of ordinary numbers tells it at once."""
    try:
        if set(map(type, values)) <= {int, float} and math.isfinite(sum(values, start=0.0)):
            return True
    except OverflowError:  # a whole number that no float can hold
        pass
    return all(map(_is_finite, values))


def _is_finite(value: Any) -> bool:
    """Whether it is a number that fits into a float; integers in json may be larger."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _from_run_lengths(segmentation: Rle, height: int, width: int) -> Rle:
    counts, size = segmentation.get("counts"), segmentation.get("size")
    if size is None or counts is None:
        raise ValueError("its run lengths lack 'size' or 'counts'")
    if not isinstance(size, list | tuple) or list(size) != [height, width]:
        raise ValueError(
            f"its run lengths are for {reprlib.repr(size)} but the image is [{height}, {width}] (height, width)"
        )
    runs = _decompress_counts(counts) if isinstance(counts, str | bytes) else counts
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        raise ValueError("its run lengths are not a list of whole numbers, all 0 or more")
    if sum(runs) != height * width:
        raise ValueError(f"its run lengths add up to {sum(runs)} pixels but the image has {height * width}")
    return _with_text_counts(coco_mask.frPyObjects({"size": [height, width], "counts": runs}, height, width))


def _decompress_counts(text: str | bytes) -> list[int]:
    """The run lengths behind COCO's compressed text: base-32 digits, signed, each the change to two runs before."""
    codes = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    runs: list[int] = []
    position = 0
    while position < len(codes):
        value, shift, more = 0, 0, True
        while more:
            if position >= len(codes) or not 48 <= codes[position] < 112 or shift >= 5 * _MAX_DIGITS:
                raise ValueError("its compressed run lengths are cut off or not COCO's")
            digit = codes[position] - 48
            value |= (digit & 0x1F) << shift
            more = bool(digit & 0x20)
            shift += 5
            position += 1
        if digit & 0x10:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
    return runs


def _with_text_counts(rle: Any) -> Rle:
    counts = rle["counts"]
    return {"size": list(rle["size"]), "counts": counts.decode() if isinstance(counts, bytes) else counts}


def area(rle: Rle) -> int:
    """How many pixels are set."""
    return int(coco_mask.area(rle))


def bounding_box(rle: Rle) -> tuple[float, float, float, float]:
    """x, y, width, height."""
    x, y, width, height = np.asarray(coco_mask.toBbox(rle)).tolist()
    return x, y, width, height


def _type_name(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
