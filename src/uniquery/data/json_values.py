"""Values of a COCO json: read and checked one by one."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

from hotcoco import mask as coco_mask

from uniquery.data.images import MAX_PIXELS
from uniquery.errors import DataError
from uniquery.masks import rle


def parse_json(path: Path) -> Any:
    """The content of a json file.

    Raises:
        DataError: the file is missing or not json.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} cannot be read: file not found.") from None
    except IsADirectoryError:
        raise DataError(f"{path} cannot be read: it is a folder; give the json file inside it.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:  # also bytes that are not text, too long numbers, too deep nesting
        raise DataError(f"{path} is not valid json: {error}.") from None


def read_mask(segmentation: Any, height: int, width: int) -> rle.Rle:
    """The compressed run lengths of any COCO segmentation.

    Intersected with the full mask, valid run lengths stay as they are. That test takes a few microseconds, and saves
    most masks `rle.from_segmentation`, which takes a hundred.

    Raises:
        ValueError: what is wrong with it, as a part of a sentence.
    """
    if isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        full = {"size": [height, width], "counts": [0, height * width]}
        try:
            counts = coco_mask.merge([segmentation, full], intersect=True)["counts"].decode()
        except (ValueError, TypeError, OverflowError):
            counts = None
        if counts is not None and counts == segmentation["counts"]:
            return {"size": [height, width], "counts": counts}
    return rle.from_segmentation(segmentation, height, width)


def read_box(box: Any) -> list[float]:
    """A COCO box as four floats: x, y, width, height.

    Raises:
        ValueError: what is wrong with it, as a part of a sentence.
    """
    if not isinstance(box, list | tuple) or len(box) != 4:
        raise ValueError("its bbox is not [x, y, width, height]")
    x, y, width, height = (read_number(value, "a number of its bbox") for value in box)
    if min(width, height) < 0:
        raise ValueError(f"its bbox has a negative width or height ({width:g} × {height:g})")
    return [x, y, width, height]


def read_number(value: Any, name: str) -> float:
    """A finite number as a float.

    Raises:
        ValueError: what it is instead, as a part of a sentence.
    """
    if not is_finite_number(value):
        raise ValueError(f"{name} is {reprlib.repr(value)} instead of a finite number")
    return float(value)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold; whole numbers in json may be larger.

    >>> is_finite_number(3), is_finite_number(True), is_finite_number(float("nan")), is_finite_number(10**400)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):  # Real alone is slow
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_id(value: object) -> TypeGuard[int]:
    """Whether it is a whole number that a tensor can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_text(value: object) -> TypeGuard[str]:
    r"""Whether it is a text that can be encoded; json may contain half of a character.

    >>> is_text("cell"), is_text("\ud83d")
    (True, False)
    """
    return isinstance(value, str) and value.encode("utf-8", "replace").decode() == value


def has_size(row: Mapping[str, Any]) -> bool:
    """Whether an entry of 'images' has a height and a width that an image can have."""
    height, width = row.get("height"), row.get("width")
    return is_id(height) and is_id(width) and min(height, width) > 0 and height * width <= MAX_PIXELS


def shorten(value: Any) -> str:
    """A value of the json for use in a sentence: on one line, and short.

    >>> shorten("cells/a.png"), shorten([[1, 2]] * 9), shorten("a" * 100 + "z")[-5:]
    ('cells/a.png', '[[1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2], ...]', 'aaaa…')
    """
    text = value if isinstance(value, str) and value.isprintable() else reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
