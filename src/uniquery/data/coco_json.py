"""The tables of a COCO json: read, and checked for everything that can be wrong with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uniquery.data import lvis
from uniquery.data.dataset import Row
from uniquery.data.images import MAX_PIXELS, inside_root, is_file
from uniquery.data.json_stream import JsonStream
from uniquery.data.json_values import has_size, is_finite_number, is_id, is_text, parse_json, read_mask, shorten
from uniquery.errors import DataError
from uniquery.masks import rle

LARGE_FILE = 2**26
"""Bytes from which on the annotations of a file are not read into memory at once."""
_KEPT_KEYS = ("id", "image_id", "category_id", "iscrowd", "area", "bbox")
_NAME_OF_2014 = re.compile(r"COCO_\w+2014_\d{12}\.jpg")
_NEEDS_ID = "needs a whole number of at most 64 bits as 'id'"


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


@dataclass
class TableCheck:
    """What a check of the tables gives.

    Attributes:
        problems: everything that is wrong.
        file_names: image id → name of its file, relative to the image folder, where it has one.
        annotations: all rows of 'annotations', without their segmentations, which take most of the memory.
        masks: annotation id → compressed run lengths of its mask, where the segmentation is valid; it may be empty.
        mask_areas: annotation id → number of pixels of that mask.
    """

    problems: list[Problem] = field(default_factory=list)
    file_names: dict[int, str] = field(default_factory=dict)
    annotations: list[Row] = field(default_factory=list)
    masks: dict[int, str] = field(default_factory=dict)
    mask_areas: dict[int, int] = field(default_factory=dict)


def read_json(path: Path) -> dict[str, Any]:
    """The raw content of a COCO instance json, whose tables are lists of rows.

    The annotations of a large file are an iterable that reads them from the file.

    Raises:
        DataError: the file is missing, broken, or not COCO.
    """
    raw = _read_large(path) or parse_json(path)
    if not isinstance(raw, dict):
        raise DataError(f"{path} is not a COCO json: it holds a {type(raw).__name__}, not tables.")
    for table in ("images", "categories", "annotations"):
        if isinstance(raw.get(table), JsonStream):
            continue
        if not isinstance(raw.get(table, []), list):
            raise DataError(f"{path}: '{table}' must be a list.")
        if any(not isinstance(row, dict) for row in raw.get(table, [])):
            raise DataError(f"{path}: every entry of '{table}' must be a table of keys and values.")
    if not raw.get("images"):
        raise DataError(f"{path} lists no images.")
    if not raw.get("categories"):
        raise DataError(f"{path} has no 'categories': list them as [{{'id': 1, 'name': 'cell'}}, …].")
    return raw


def _read_large(path: Path) -> dict[str, Any] | None:
    """The tables of a large json, whose annotations are read from the file when they are iterated over.

    None for a small file, and for one that is wrong or unusual.
    """
    try:
        if path.stat().st_size < LARGE_FILE:
            return None
        stream = JsonStream(path, "annotations", _check_is_row)
    except (OSError, ValueError, RecursionError):
        return None
    return stream.content | ({"annotations": stream} if stream.has_table else {})


def _check_is_row(row: Any) -> None:
    if not isinstance(row, dict):
        raise ValueError("a row is not a table")


def check_tables(raw: Mapping[str, Any], image_root: Path) -> TableCheck:
    """Checks the tables and decodes every mask; image files are not opened."""
    check = TableCheck()
    sizes = {i["id"]: (i["height"], i["width"]) if has_size(i) else None for i in raw["images"] if is_id(i.get("id"))}
    categories = {c["id"] for c in raw["categories"] if is_id(c.get("id"))}
    problems: list[Problem] = []
    polygons = normalized = 0
    for row in raw.get("annotations", []):
        check.annotations.append({key: row[key] for key in _KEPT_KEYS if key in row})
        if not is_id(row.get("id")):
            problems.append(Problem("annotation id", f"{_annotation(row)} {_NEEDS_ID}{_not_text(row)}."))
            continue
        problems += _reference_problems(row, sizes, categories)
        size = sizes.get(row["image_id"]) if is_id(row.get("image_id")) else None
        if size is not None:
            problems += _mask_problems(row, *size, check)
        if row["id"] in check.masks and row["segmentation"] and isinstance(row["segmentation"], list):
            polygons += 1
            normalized += all(0 <= value <= 1 for part in row["segmentation"] for value in part)
    check.problems += _category_problems(raw["categories"])
    check.problems += _image_problems(raw["images"], image_root, check.file_names)
    check.problems += _duplicate_ids(check.annotations, "Annotation")
    check.problems += problems
    check.problems += _common_problems(polygons, normalized, check)
    return check


def _common_problems(polygons: int, normalized: int, check: TableCheck) -> Iterator[Problem]:
    """What is wrong with the masks of all annotations alike, which hints at a mistake of the tool that wrote them."""
    if polygons and polygons == normalized:
        text = f"All {polygons} polygons lie in 0 to 1, as fractions of the image: multiply x by its width and y by"
        yield Problem("normalized polygons", f"{text} its height, as COCO has them in pixels.")
    elif check.mask_areas and not any(check.mask_areas.values()):
        yield Problem(
            "all masks empty", f"All {len(check.mask_areas)} masks are empty: there is nothing to learn from."
        )


def _duplicate_ids(rows: Sequence[Row], table: str) -> Iterator[Problem]:
    for number, count in Counter(row["id"] for row in rows if is_id(row.get("id"))).items():
        if count > 1:
            yield Problem("duplicate id", f"{table} id {number} appears {count} times.")


def _category_problems(rows: Sequence[Row]) -> Iterator[Problem]:
    yield from _duplicate_ids(rows, "Category")
    for row in rows:
        if not is_id(row.get("id")) or not is_text(row.get("name")):
            category = f"Category {shorten(row.get('id'))} ({shorten(row.get('name'))})"
            yield Problem("category", f"{category} {_NEEDS_ID} and a text as 'name'{_not_text(row)}.")
    yield from (Problem("frequency", text) for text in lvis.category_problems(rows))
    for name, count in Counter(row["name"] for row in rows if is_text(row.get("name"))).items():
        if count > 1:
            text = f"{count} categories are named '{shorten(name)}': each class needs a name that no other has."
            yield Problem("duplicate name", text)


def _image_problems(rows: Sequence[Row], image_root: Path, file_names: dict[int, str]) -> Iterator[Problem]:
    yield from _duplicate_ids(rows, "Image")
    owners: dict[Path, list[int]] = {}
    for row in rows:
        name = image_file_name(row, image_root)
        image = f"Image {shorten(row.get('id'))} ({shorten(name)})"
        if not is_id(row.get("id")) or not is_text(name):
            text = f"{image} {_NEEDS_ID} and a text as 'file_name', or as 'coco_url'{_not_text(row)}."
            yield Problem("image entry", text)
            continue
        file_names[row["id"]] = name
        if not has_size(row):
            needs = f"needs 'width' and 'height', whole numbers above 0 and at most {MAX_PIXELS:,} pixels together"
            given = f"{shorten(row.get('width'))} and {shorten(row.get('height'))}"
            yield Problem("image entry", f"{image} {needs}, not {given}.")
        yield from (Problem("class list", f"{image} {text}.") for text in lvis.image_problems(row))
        try:
            owners.setdefault(inside_root(image_root, name), []).append(row["id"])
        except DataError as error:
            yield Problem("file name", f"Image {row['id']}: {error}")
    for path, ids in owners.items():
        if len(set(ids)) > 1:
            text = f"Images {shorten(ids)} are the same file, {shorten(str(path.relative_to(image_root)))}."
            yield Problem("shared file", text, fatal=False)


def image_file_name(row: Row, image_root: Path) -> Any:
    """The 'file_name' of an image; without one, as in LVIS v1, the last two parts of its 'coco_url'.

    If there is no such file, but one that is named like the last part alone, it is that. LVIS v0.5 has names of COCO
    2014 for the images of COCO 2017: there too the address counts, unless the named file exists.

    >>> image_file_name({"coco_url": "http://images.cocodataset.org/train2017/000000391895.jpg"}, Path("images"))
    'train2017/000000391895.jpg'
    """
    name, url = row.get("file_name"), row.get("coco_url")
    if not is_text(url) or (name is not None and not (is_text(name) and _NAME_OF_2014.fullmatch(name))):
        return name
    parts = [part for part in url.rpartition("://")[2].split("/")[1:] if part][-2:]
    by_url, last = "/".join(parts), parts[-1] if parts else ""
    if name is not None and (name == last or _exists(image_root, name)):
        return name
    return last if not _exists(image_root, by_url) and _exists(image_root, last) else by_url


def _exists(image_root: Path, name: str) -> bool:
    try:
        return is_file(inside_root(image_root, name))
    except DataError:
        return False


def _reference_problems(row: Row, images: Container[int], categories: Container[int]) -> Iterator[Problem]:
    """What is wrong with an annotation's values and with its references to other tables."""
    if not is_id(row.get("category_id")) or row["category_id"] not in categories:
        text = f"{_annotation(row)} has category {shorten(row.get('category_id'))}, which is not in 'categories'."
        yield Problem("unknown category", text)
    if not is_id(row.get("image_id")) or row["image_id"] not in images:
        yield Problem("unknown image", f"{_annotation(row)} belongs to an image that is not in 'images'.")
    if row.get("iscrowd") not in (0, 1, None):
        yield Problem("iscrowd", f"{_annotation(row)} has iscrowd {shorten(row['iscrowd'])}, which must be 0 or 1.")
    area = row.get("area")
    if area is not None and not (is_finite_number(area) and area >= 0):
        needs = "which must be a finite number of at least 0, or be left out"
        yield Problem("area", f"{_annotation(row)} has area {shorten(area)}, {needs}.")


def _mask_problems(row: Row, height: int, width: int, check: TableCheck) -> Iterator[Problem]:
    try:
        mask = read_mask(row.get("segmentation"), height, width)
    except ValueError as error:
        yield Problem("segmentation", f"{_annotation(row)}: {error}.")
        return
    check.masks[row["id"]], check.mask_areas[row["id"]] = mask["counts"], rle.area(mask)
    if not check.mask_areas[row["id"]]:
        yield Problem("empty mask", f"{_annotation(row)} has an empty mask; training ignores it.", fatal=False)
    if isinstance(row["segmentation"], list) and _is_outside(row["segmentation"], height, width):
        text = f"{_annotation(row)} reaches outside its {width}×{height} image; it is cut."
        yield Problem("outside", text, fatal=False)


def _is_outside(polygons: Sequence[Sequence[float]], height: int, width: int) -> bool:
    """Whether coordinates are outside the image by more than a pixel: tools round differently."""
    return any(
        min(polygon) < -1 or max(polygon[::2]) > width + 1 or max(polygon[1::2]) > height + 1 for polygon in polygons
    )


def _not_text(row: Row) -> str:
    """A hint for ids that are texts."""
    number = row.get("id")
    if not isinstance(number, str):
        return ""
    what_to_do = "write numbers without quotes" if number.strip().isdecimal() else "number them, here and wherever used"
    return f"; {shorten(repr(number))} is a text: {what_to_do}"


def _annotation(row: Row) -> str:
    return f"Annotation {shorten(row.get('id'))} (image {shorten(row.get('image_id'))})"
