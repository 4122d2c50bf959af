"""Panoptic ground truth and results in COCO's format, a json and a folder of PNG files: read, checked and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from uniquery.data.dataset import GroundTruth, Row
from uniquery.data.images import inside_root
from uniquery.data.json_values import has_size, is_id, parse_json, shorten
from uniquery.data.panoptic_json import check_segments, encode_ids, png_folder, read_ids, segment_masks
from uniquery.errors import DataError
from uniquery.files import make_folder, write_atomically
from uniquery.masks import rle


def decode_panoptic_truth(truth: GroundTruth, annotations: Path, pngs: Path | None = None) -> GroundTruth:
    """Panoptic ground truth with one annotation for each segment, whose mask comes from the PNG files.

    Args:
        truth: the tables of the json.
        annotations: the json.
        pngs: the folder of the PNG files; None: the path of the json without its ending.

    Raises:
        DataError: something is wrong with the tables or with a PNG file.
    """
    entries = _checked_entries(truth.annotations, truth, annotations, folder := png_folder(annotations, pngs))
    rows = [row for entry in entries for row in _segments(entry, truth, folder, may_be_empty=True)]
    return GroundTruth(truth.images, truth.categories, rows, truth.source)


def read_panoptic_results(results: Path, truth: GroundTruth, pngs: Path | None = None) -> list[Row]:
    """Panoptic results, a row with run lengths for each segment.

    Args:
        results: a json whose 'annotations' have a PNG file and 'segments_info' for each image.
        truth: the ground truth, of which the images and categories are read.
        pngs: the folder of the PNG files; None: the path of the json without its ending.

    Raises:
        DataError: something is wrong with the json or with a PNG file.
    """
    content = parse_json(results)
    entries = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise DataError(f"{results} does not hold panoptic results: it needs the list 'annotations'.")
    for entry in entries:
        image = entry.get("image_id") if isinstance(entry, dict) else None
        if not is_id(image) or image not in truth.images:
            raise DataError(
                f"{results} has results for image {shorten(image)}, which is not in {truth.source}: perhaps the two "
                "belong to different data sets."
            )
    folder = png_folder(results, pngs)
    checked = _checked_entries(entries, truth, results, folder)
    return [row for entry in checked for row in _segments(entry, truth, folder, may_be_empty=False)]


def _checked_entries(entries: Sequence[Any], truth: GroundTruth, source: Path, pngs: Path) -> list[Row]:
    """The entries of all images; raises if one is missing or wrong."""
    if any(not isinstance(entry, dict) for entry in entries):
        raise DataError(f"{source}: every entry of 'annotations' must be a table of keys and values.")
    for image in truth.images.values():
        if not has_size(image):
            raise DataError(f"{truth.source}: image {image['id']} needs 'width' and 'height'.")
    tables = {"images": list(truth.images.values()), "categories": list(truth.categories.values())}
    check = check_segments({**tables, "annotations": entries}, pngs)
    if check.problems:
        raise DataError(f"{source}: {check.problems[0].text}")
    return list(check.entries.values())


def _segments(entry: Row, truth: GroundTruth, pngs: Path, *, may_be_empty: bool) -> Iterator[Row]:
    image, path = truth.images[entry["image_id"]], inside_root(pngs, entry["file_name"])
    numbers = [segment["id"] for segment in entry["segments_info"]]
    ids = read_ids(path, (image["height"], image["width"]), set(numbers), image["id"])
    for segment, mask in zip(entry["segments_info"], segment_masks(ids, numbers), strict=True):
        if rle.area(mask):
            common = {"image_id": image["id"], "category_id": segment["category_id"], "segmentation": mask}
            yield {**common, "iscrowd": int(bool(segment.get("iscrowd")))}
        elif not may_be_empty:
            raise DataError(f"{path} has no pixel of segment {segment['id']}, which 'segments_info' names.")


def write_panoptic_results(results: Path, rows: Sequence[Row], truth: GroundTruth) -> None:
    """Writes segments as COCO's panoptic results: a json, and PNG files in the folder of its path without its ending.

    Args:
        results: the json.
        rows: segments with run lengths, as `predict_panoptic_dataset` gives.
        truth: the ground truth of the images, each of which gets an entry.
    """
    by_image: dict[int, list[Row]] = {number: [] for number in truth.images}
    for row in rows:
        by_image[row["image_id"]].append(row)
    entries = []
    for number, image in truth.images.items():
        ids = np.zeros((image["height"], image["width"]), np.int32)
        for k, row in enumerate(by_image[number], start=1):
            ids[rle.decode(row["segmentation"]).astype(bool)] = k
        segments = [segment_info(k, row) for k, row in enumerate(by_image[number], start=1)]
        entries.append(write_entry(results.with_suffix(""), f"{number:012d}.png", number, ids, segments))
    write_atomically(results, json.dumps({"annotations": entries}))


def segment_info(number: int, row: Mapping[str, Any]) -> Row:
    """An entry of 'segments_info' for a segment with run lengths."""
    mask = row["segmentation"]
    return {
        "id": number,
        "category_id": row["category_id"],
        "iscrowd": 0,
        "area": rle.area(mask),
        "bbox": list(rle.bounding_box(mask)),
        "score": row["score"],
    }


def write_entry(pngs: Path, name: str, image: int, ids: npt.NDArray[Any], segments: Sequence[Row]) -> Row:
    """Writes the PNG file of an image and returns its entry of 'annotations'."""
    make_folder(pngs)
    write_atomically(pngs / name, encode_ids(ids))
    return {"image_id": image, "file_name": name, "segments_info": list(segments)}
