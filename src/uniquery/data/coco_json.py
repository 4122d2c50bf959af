"""The tables of a COCO json: read, and searched for everything that is wrong with them."""

from __future__ import annotations

import json
import reprlib
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from uniquery.data.images import MOST_PIXELS, inside_root
from uniquery.errors import DataError
from uniquery.masks import rle

Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a data set.

    Attributes:
        kind: a short name to count by.
        text: one sentence.
        fatal: whether training must not start with it.
    """

    kind: str
    text: str
    fatal: bool = True


def read_json(path: Path) -> dict[str, Any]:
    """The raw content of a COCO instance json, with its tables in place.

    Raises:
        DataError: the file is missing, broken, or not COCO.
    """
    raw = _parse(path)
    if not isinstance(raw, dict):
        raise DataError(f"{path} is not a COCO json: it holds a {type(raw).__name__}, not tables.")
    for table in ("images", "categories", "annotations"):
        if not isinstance(raw.get(table, []), list):
            raise DataError(f"{path}: '{table}' must be a list.")
        if any(not isinstance(row, dict) for row in raw.get(table, [])):
            raise DataError(f"{path}: every entry of '{table}' must be a table of keys and values.")
    if not raw.get("images"):
        raise DataError(f"{path} lists no images.")
    if not raw.get("categories"):
        raise DataError(f"{path} has no 'categories': list them as [{{'id': 1, 'name': 'cell'}}, …].")
    return raw


def _parse(path: Path) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"Annotation file not found: {path}.") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder: name the annotation json inside it.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:  # also bytes that are not text, numbers and nesting without end
        raise DataError(f"{path} is not valid json: {error}.") from None


def find_problems(raw: Mapping[str, Any], image_root: Path, masks: dict[int, rle.Rle]) -> Iterator[Problem]:
    """Everything that is wrong with the tables themselves; files are not opened.

    Every mask has to be made to be checked: sound ones that own a pixel are left in `masks`, by annotation id.
    """
    annotations = raw.get("annotations", [])
    yield from _category_problems(raw["categories"])
    yield from _image_problems(raw["images"], image_root)
    yield from _duplicate_ids(annotations, "Annotation")
    sizes = {i["id"]: (i["height"], i["width"]) if has_size(i) else None for i in raw["images"] if is_id(i.get("id"))}
    categories = {c["id"] for c in raw["categories"] if is_id(c.get("id"))}
    for row in annotations:
        if not is_id(row.get("id")):
            yield Problem("annotation id", f"{_annotation(row)} needs a whole number of at most 64 bits as 'id'.")
            continue
        yield from _link_problems(row, sizes, categories)
        size = sizes.get(row["image_id"]) if is_id(row.get("image_id")) else None
        if size is not None:
            yield from _mask_problems(row, *size, masks)


def _duplicate_ids(rows: Sequence[Row], what: str) -> Iterator[Problem]:
    for number, count in Counter(row["id"] for row in rows if is_id(row.get("id"))).items():
        if count > 1:
            yield Problem("duplicate id", f"{what} id {number} appears {count} times.")


def _category_problems(rows: Sequence[Row]) -> Iterator[Problem]:
    yield from _duplicate_ids(rows, "Category")
    for row in rows:
        if not is_id(row.get("id")) or not is_text(row.get("name")):
            needs = "needs a whole number of at most 64 bits as 'id' and a text as 'name'"
            yield Problem("category", f"Category {shown(row.get('id'))} ({shown(row.get('name'))}) {needs}.")
    for name, count in Counter(row["name"] for row in rows if is_text(row.get("name"))).items():
        if count > 1:
            text = f"{count} categories are named '{shown(name)}': classes are told apart by name."
            yield Problem("duplicate name", text)


def _image_problems(rows: Sequence[Row], image_root: Path) -> Iterator[Problem]:
    yield from _duplicate_ids(rows, "Image")
    owners: dict[Path, list[int]] = {}
    for row in rows:
        where = f"Image {shown(row.get('id'))} ({shown(row.get('file_name'))})"
        if not is_id(row.get("id")) or not is_text(row.get("file_name")):
            needs = "needs a whole number of at most 64 bits as 'id' and a text as 'file_name'"
            yield Problem("image entry", f"{where} {needs}.")
            continue
        if not has_size(row):
            needs = f"needs 'width' and 'height', whole numbers above 0 and at most {MOST_PIXELS:,} pixels together"
            said = f"{shown(row.get('width'))} and {shown(row.get('height'))}"
            yield Problem("image entry", f"{where} {needs}, not {said}.")
        try:
            owners.setdefault(inside_root(image_root, row["file_name"]), []).append(row["id"])
        except DataError as error:
            yield Problem("file name", f"Image {row['id']}: {error}")
    for path, ids in owners.items():
        if len(set(ids)) > 1:
            text = f"Images {shown(ids)} are the same file, {shown(str(path.relative_to(image_root)))}."
            yield Problem("shared file", text, fatal=False)


def _link_problems(row: Row, images: Container[int], categories: Container[int]) -> Iterator[Problem]:
    """What an annotation says of its place in the other tables, and of itself."""
    if not is_id(row.get("category_id")) or row["category_id"] not in categories:
        text = f"{_annotation(row)} has category {shown(row.get('category_id'))}, which is not in 'categories'."
        yield Problem("unknown category", text)
    if not is_id(row.get("image_id")) or row["image_id"] not in images:
        yield Problem("unknown image", f"{_annotation(row)} belongs to an image that is not in 'images'.")
    if row.get("iscrowd") not in (0, 1, None):
        yield Problem("iscrowd", f"{_annotation(row)} has iscrowd {shown(row['iscrowd'])}, which must be 0 or 1.")
    if row.get("area") is not None and not _is_area(row["area"]):
        needs = "which must be a finite number of at least 0, or be left out"
        yield Problem("area", f"{_annotation(row)} has area {shown(row['area'])}, {needs}.")


def _mask_problems(row: Row, height: int, width: int, masks: dict[int, rle.Rle]) -> Iterator[Problem]:
    try:
        mask = rle.from_segmentation(row.get("segmentation"), height, width)
    except ValueError as error:
        yield Problem("segmentation", f"{_annotation(row)}: {error}.")
        return
    if rle.area(mask):
        masks[row["id"]] = mask
    else:
        yield Problem("empty mask", f"{_annotation(row)} has an empty mask; it is ignored.", fatal=False)
    if isinstance(row["segmentation"], list) and _leaves(row["segmentation"], height, width):
        text = f"{_annotation(row)} reaches outside its {width}×{height} image; it is cut."
        yield Problem("outside", text, fatal=False)


def _leaves(polygons: Sequence[Sequence[float]], height: int, width: int) -> bool:
    """Whether coordinates lie outside the image; a pixel of slack, since tools round differently."""
    points = np.concatenate([np.asarray(polygon, dtype=np.float64) for polygon in polygons])
    xs, ys = points[0::2], points[1::2]
    return bool(xs.min() < -1 or ys.min() < -1 or xs.max() > width + 1 or ys.max() > height + 1)


def _annotation(row: Row) -> str:
    return f"Annotation {shown(row.get('id'))} (image {shown(row.get('image_id'))})"


def is_id(value: object) -> TypeGuard[int]:
    """Whether it is a whole number that a tensor can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_text(value: object) -> TypeGuard[str]:
    r"""Whether it is a text that can be written again; json lets halves of characters through.

    >>> is_text("cell"), is_text("\ud83d")
    (True, False)
    """
    return isinstance(value, str) and value.encode("utf-8", "replace").decode() == value


def has_size(row: Mapping[str, Any]) -> bool:
    """Whether an entry of 'images' has a height and a width that an image can have."""
    height, width = row.get("height"), row.get("width")
    return is_id(height) and is_id(width) and min(height, width) > 0 and height * width <= MOST_PIXELS


def _is_area(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def shown(value: Any) -> str:
    """A value of the json as a part of a sentence: on one line, and short.

    >>> shown("cells/a.png"), shown([[1, 2]] * 9), shown("a" * 100 + "z")[-5:]
    ('cells/a.png', '[[1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2], ...]', 'aaaa…')
    """
    text = value if isinstance(value, str) and value.isprintable() else reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
