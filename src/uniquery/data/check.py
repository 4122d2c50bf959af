"""Everything that is wrong with a data set, found before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uniquery.data.coco_json import Problem, TableCheck, check_tables, image_file_name, read_json
from uniquery.data.dataset import Row
from uniquery.data.images import (
    check_image_root,
    find_image_root,
    image_size,
    inside_root,
    is_file,
    read_image,
    sixteen_bit_maximum,
    unused_bits,
)
from uniquery.data.json_values import has_size, is_id, is_text, shorten
from uniquery.data.panoptic_check import SegmentCounter
from uniquery.data.panoptic_json import check_segments, has_segments, png_folder
from uniquery.errors import DataError

AREA_LIMITS = {"tiny (< 8²)": 8**2, "small (< 32²)": 32**2, "medium (< 96²)": 96**2, "large": float("inf")}
COUNT_LIMITS = {"0": 0, "1–10": 10, "11–50": 50, "51–100": 100, "101–300": 300, "more": float("inf")}

READ_LATER = frozenset({"unreadable file", "size mismatch", "unreadable PNG file"})
"""Kinds of problems that training meets only when it reads the image."""


@dataclass(frozen=True)
class DataReport:
    """What a data set holds and what is wrong with it.

    Attributes:
        images: how many.
        instances: how many, crowd regions excluded.
        crowd: how many crowd regions.
        problems: everything found, fatal or not.
        classes: class → instances.
        areas: size range → instances whose masks are valid and not empty.
        counts: number of instances → images.
        max_instances: the largest number of instances of an image.
        stuff: how many of the instances are segments of stuff; None if the data is not panoptic.
    """

    images: int
    instances: int
    crowd: int
    problems: tuple[Problem, ...]
    classes: dict[str, int]
    areas: dict[str, int]
    counts: dict[str, int]
    max_instances: int
    stuff: int | None = None

    @property
    def is_valid(self) -> bool:
        """Whether training may start, and would read every image."""
        return not any(p.fatal for p in self.problems)

    @property
    def verdict(self) -> str:
        """One sentence: what training would do with this data."""
        kinds = {p.kind for p in self.problems if p.fatal}
        if not kinds:
            return "The data is valid."
        if kinds <= READ_LATER:
            return (
                "Training would start, save a checkpoint and stop at the first such image: repair the files, or leave "
                "them out with data.on_unreadable=skip."
            )
        return "Training would not start with this data."


def check_data(
    annotations: Path,
    images: Path,
    *,
    pngs: Path | None = None,
    read_pixels: bool = True,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> DataReport:
    """Checks tables, masks and files of a COCO data set, of instances or panoptic.

    Args:
        annotations: the json.
        images: the folder its file names are relative to.
        pngs: the folder of panoptic PNG files; None: the path of the json without its ending.
        read_pixels: decode every image, which finds truncated files; otherwise only headers are read.
        progress: called with how many images are done, and how many there are.

    Raises:
        DataError: the json cannot be read at all, or the folder is missing.
    """
    raw = read_json(annotations)
    check_image_root(images)
    if has_segments(raw.get("annotations", [])):
        return _check_panoptic(raw, images, png_folder(annotations, pngs), read_pixels, progress)
    if pngs is not None:
        raise DataError(f"{annotations} is not panoptic, it has no 'segments_info': leave out the folder {pngs}.")
    check = check_tables(raw, images)
    if "annotations" not in raw:
        check.problems.append(Problem("no annotations", f"{annotations} has no 'annotations'."))
    for done, row in enumerate(raw["images"], start=1):
        check.problems += _file_problems(row, images, read_pixels)
        progress(done, len(raw["images"]))
    check.problems += _folder_problems(check, images, read_pixels)
    return _summary(raw, check)


def _check_panoptic(
    raw: Row, images: Path, pngs: Path, read_pixels: bool, progress: Callable[[int, int], None]
) -> DataReport:
    check, segments = check_tables({**raw, "annotations": []}, images), check_segments(raw, pngs)
    check.problems += segments.problems
    counter = SegmentCounter(segments.entries, pngs, read_pixels=read_pixels)
    for done, row in enumerate(raw["images"], start=1):
        check.problems += _file_problems(row, images, read_pixels)
        check.problems += counter.check(row)
        progress(done, len(raw["images"]))
    check.problems += _folder_problems(check, images, read_pixels)
    check.annotations, check.mask_areas = counter.rows, counter.areas
    stuff = {row["id"] for row in raw["categories"] if is_id(row.get("id")) and row.get("isthing") == 0}
    count = sum(row["category_id"] in stuff and not row["iscrowd"] for row in counter.rows)
    return replace(_summary(raw, check), stuff=count)


def _folder_problems(check: TableCheck, root: Path, read_pixels: bool) -> Iterator[Problem]:
    """What concerns the images as a whole."""
    yield from _near_folder(check, root)
    if read_pixels:
        yield from _unused_bits(check, root)


def _near_folder(check: TableCheck, root: Path) -> Iterator[Problem]:
    """A hint if the images are in another folder nearby."""
    if not any(problem.kind == "missing file" for problem in check.problems):
        return
    for name in check.file_names.values():
        near = find_image_root(root, name)
        if near is not None and not _exists(root, name):
            yield Problem("image folder", f"{name} is not in {root}, but in {near}: give that folder.", fatal=False)
            return


def _unused_bits(check: TableCheck, root: Path) -> Iterator[Problem]:
    maxima = []
    for name in check.file_names.values():
        try:
            maxima.append(sixteen_bit_maximum(inside_root(root, name)))
        except DataError:
            continue  # reported with its file
    sentence = unused_bits([largest for largest in maxima if largest is not None])
    if sentence:
        yield Problem("bits", f"{sentence[0].upper()}{sentence[1:]}", fatal=False)


def _exists(root: Path, name: str) -> bool:
    try:
        return is_file(inside_root(root, name))
    except DataError:
        return False


def _file_problems(row: Row, root: Path, read_pixels: bool) -> Iterator[Problem]:
    image, name = f"Image {shorten(row.get('id'))}", image_file_name(row, root)
    try:
        path = inside_root(root, name if is_text(name) else "")
    except DataError:
        return  # `check_tables` reports it
    if not is_file(path):
        yield Problem("missing file", f"{image}: {path} is missing.")
        return
    try:
        height, width = read_image(path).shape[:2] if read_pixels else image_size(path)
    except DataError as error:
        yield Problem("unreadable file", f"{image}: {error}")
        return
    if has_size(row) and (row["height"], row["width"]) != (height, width):
        hint = (
            ": width and height are swapped (EXIF orientation?)"
            if (row["width"], row["height"]) == (height, width)
            else ""
        )
        given = f"the json says {row['width']}×{row['height']}"
        yield Problem("size mismatch", f"{image}: {path} is {width}×{height} after EXIF rotation, {given}{hint}.")


def _summary(raw: Mapping[str, Any], check: TableCheck) -> DataReport:
    names = {c["id"]: shorten(c.get("name")) for c in raw["categories"] if is_id(c.get("id"))}
    classes: Counter[str] = Counter(dict.fromkeys(names.values(), 0))
    areas: Counter[str] = Counter()
    per_image: Counter[int] = Counter({i["id"]: 0 for i in raw["images"] if is_id(i.get("id"))})
    crowd = 0
    for row in check.annotations:
        if row.get("iscrowd"):
            crowd += 1
            continue
        annotation, image, category = row.get("id"), row.get("image_id"), row.get("category_id")
        classes[names.get(category, "unknown") if is_id(category) else "unknown"] += 1
        if is_id(image) and image in per_image:
            per_image[image] += 1
        if is_id(annotation) and check.mask_areas.get(annotation):
            areas[_bucket(check.mask_areas[annotation], AREA_LIMITS, below=True)] += 1
    counts = Counter(_bucket(n, COUNT_LIMITS, below=False) for n in per_image.values())
    return DataReport(
        images=len(raw["images"]),
        instances=sum(classes.values()),
        crowd=crowd,
        problems=tuple(check.problems),
        classes=dict(classes),
        areas={name: areas[name] for name in AREA_LIMITS},
        counts={name: counts[name] for name in COUNT_LIMITS},
        max_instances=max(per_image.values(), default=0),
    )


def _bucket(value: int, limits: Mapping[str, float], *, below: bool) -> str:
    return next(name for name, limit in limits.items() if (value < limit if below else value <= limit))
