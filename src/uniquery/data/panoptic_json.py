"""COCO panoptic annotations: the tables of the json checked, and its PNG files read.

Each image has one entry in 'annotations', with a PNG file whose colors are segment ids, and a table of its segments.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from uniquery.data.coco_json import Problem
from uniquery.data.dataset import Row
from uniquery.data.images import image_size, inside_root, is_file, read_image
from uniquery.data.json_values import is_finite_number, is_id, is_text, shorten
from uniquery.errors import DataError
from uniquery.masks import rle
from uniquery.masks.panoptic import ids_to_rgb, rgb_to_ids

Ids = npt.NDArray[np.int32]
MAX_ID = 256**3 - 1


@dataclass
class SegmentCheck:
    """What a check of the tables gives.

    Attributes:
        problems: everything that is wrong.
        entries: image id → its entry of 'annotations', where that has no fatal problem.
    """

    problems: list[Problem] = field(default_factory=list)
    entries: dict[int, Row] = field(default_factory=dict)


def has_segments(annotations: Iterable[Any]) -> bool:
    """Whether the rows of 'annotations' are panoptic; the first one that has masks decides, as there may be many.

    >>> has_segments([{"id": 1}]), has_segments([{"image_id": 1, "segments_info": []}])
    (False, True)
    """
    tables = (row for row in annotations if isinstance(row, Mapping))
    return next(("segments_info" in row for row in tables if row.keys() & {"segments_info", "segmentation"}), False)


def png_folder(annotations: Path, given: Path | None = None) -> Path:
    """The folder of the PNG files: by default the path of the json without its ending, as in COCO.

    Raises:
        DataError: there is no such folder.
    """
    folder = annotations.with_suffix("") if given is None else given
    if not folder.is_dir():
        raise DataError(
            f"The folder of panoptic PNG files is missing: {folder}. By default it has the path of the json without "
            "its ending; data.train.panoptic_pngs and data.val.panoptic_pngs name another one."
        )
    return folder


def check_segments(raw: Mapping[str, Any], pngs: Path) -> SegmentCheck:
    """Checks everything that a panoptic json has besides 'images' and names of categories; opens no PNG file."""
    check = SegmentCheck(list(_thing_problems(raw["categories"])))
    categories = {row["id"] for row in raw["categories"] if is_id(row.get("id"))}
    images = {row["id"] for row in raw["images"] if is_id(row.get("id"))}
    named = set[int]()
    for row in raw["annotations"]:
        named.update([row["image_id"]] if is_id(row.get("image_id")) else [])
        problems = list(_entry_problems(row, images, pngs)) or list(_segment_problems(row, categories))
        if not problems and row["image_id"] in check.entries:
            text = f"Image {row['image_id']} has several entries in 'annotations', and needs one."
            problems.append(Problem("duplicate entry", text))
        if not problems:
            check.entries[row["image_id"]] = row
        check.problems += problems
    for image in sorted(images - named):
        check.problems.append(Problem("no entry", f"Image {image} has no entry in 'annotations', and needs one."))
    return check


def _thing_problems(categories: Sequence[Row]) -> Iterator[Problem]:
    for row in categories:
        if row.get("isthing") not in (0, 1):
            name = f"Category {shorten(row.get('id'))} ({shorten(row.get('name'))})"
            yield Problem("isthing", f"{name} needs 'isthing': 1 for a thing, 0 for stuff.")


def _entry_problems(row: Row, images: Collection[int], pngs: Path) -> Iterator[Problem]:
    """What is wrong with an entry of 'annotations', apart from its segments."""
    image, name, segments = row.get("image_id"), row.get("file_name"), row.get("segments_info")
    if not is_id(image) or image not in images:
        yield Problem("unknown image", f"{_entry(row)} belongs to an image that is not in 'images'.")
    if not is_text(name):
        yield Problem("file name", f"{_entry(row)} needs a text as 'file_name'.")
    else:
        try:
            inside_root(pngs, name)
        except DataError as error:
            yield Problem("file name", f"{_entry(row)}: {error}")
    if not isinstance(segments, list) or any(not isinstance(segment, dict) for segment in segments):
        yield Problem("segments_info", f"{_entry(row)} needs a list of tables as 'segments_info'.")


def _segment_problems(row: Row, categories: Collection[int]) -> Iterator[Problem]:
    for segment in row["segments_info"]:
        number, category, area = segment.get("id"), segment.get("category_id"), segment.get("area")
        name = f"Segment {shorten(number)} of image {row['image_id']}"
        if not is_id(number) or not 0 < number <= MAX_ID:
            yield Problem("segment id", f"{name} needs a whole number from 1 to {MAX_ID:,} as 'id'; 0 is void.")
        if not is_id(category) or category not in categories:
            text = f"{name} has category {shorten(category)}, which is not in 'categories'."
            yield Problem("unknown category", text)
        if segment.get("iscrowd") not in (0, 1, None):
            yield Problem("iscrowd", f"{name} has iscrowd {shorten(segment['iscrowd'])}, which must be 0 or 1.")
        if area is not None and not (is_finite_number(area) and area >= 0):
            yield Problem("area", f"{name} has area {shorten(area)}, which must be a number of at least 0.")
    for number, count in Counter(shorten(segment.get("id")) for segment in row["segments_info"]).items():
        if count > 1:
            yield Problem("duplicate id", f"Segment id {number} appears {count} times in image {row['image_id']}.")


def _entry(row: Row) -> str:
    return f"The panoptic entry of image {shorten(row.get('image_id'))}"


def read_ids(path: Path, size: tuple[int, int], known: Collection[int], image: int) -> Ids:
    """(H, W) segment ids of a PNG file.

    Args:
        path: the file.
        size: (height, width) of its image.
        known: the segment ids that the json names.
        image: id of the image, for error messages.

    Raises:
        DataError: the file is missing or broken, or has another size or an id that the json does not name.
    """
    check_png_size(path, size, image)
    ids = rgb_to_ids(read_image(path))
    unknown = [number for number in distinct_ids(ids) if number not in known]
    if unknown:
        y, x = (int(index[0]) for index in np.nonzero(ids == unknown[0]))
        raise DataError(
            f"{path} has the segment id {unknown[0]} (at x {x}, y {y}), which the 'segments_info' of image {image} "
            "does not name: add it to the json, or make these pixels void (0)."
        )
    return ids


def encode_ids(ids: npt.NDArray[Any]) -> bytes:
    """The content of a PNG file with (H, W) segment ids."""
    buffer = io.BytesIO()
    Image.fromarray(ids_to_rgb(ids)).save(buffer, "png")
    return buffer.getvalue()


def check_png_size(path: Path, size: tuple[int, int], image: int) -> None:
    """Raises a DataError if a PNG file is missing, broken or of another size than its image."""
    if not is_file(path):
        raise DataError(f"The panoptic PNG file of image {image} is missing: {path}.")
    height, width = image_size(path)
    if (height, width) != size:
        raise DataError(
            f"{path} is {width}×{height}, but image {image} is {size[1]}×{size[0]}: a panoptic PNG file must have the "
            "size of its image."
        )


def distinct_ids(ids: Ids) -> list[int]:
    """The ids that occur, without 0; only the first pixel of each run is sorted, as there are few runs.

    >>> distinct_ids(np.array([[0, 7, 7], [7, 3, 3]], np.int32))
    [3, 7]
    """
    flat = ids.ravel()
    starts = np.flatnonzero(np.diff(flat, prepend=-1))
    return [number for number in np.unique(flat[starts]).tolist() if number]


def segment_masks(ids: Ids, numbers: Sequence[int]) -> list[rle.Rle]:
    """The run-length mask of each segment; it may be empty."""
    columns = np.asfortranarray(ids)  # run lengths go down the columns
    return [rle.encode(columns == number) for number in numbers]
