"""Divides a COCO json into training and validation data."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from uniquery.data.coco_json import read_json
from uniquery.data.dataset import Row
from uniquery.data.json_values import is_id, is_text, shorten
from uniquery.data.panoptic_json import has_segments
from uniquery.errors import DataError
from uniquery.files import make_folder, write_atomically

PARTS = ("train", "val")


@dataclass(frozen=True)
class SplitPart:
    """One of the files.

    Attributes:
        file: the json.
        images: how many.
        groups: how many groups of images that are kept together.
        instances: how many, crowd regions excluded.
        classes: class → instances.
    """

    file: Path
    images: int
    groups: int
    instances: int
    classes: dict[str, int]


def split_annotations(
    annotations: Path,
    *,
    share: float = 0.2,
    seed: int = 0,
    group: str | None = None,
    output: Path | None = None,
) -> tuple[SplitPart, SplitPart]:
    """Writes train.json and val.json, each with some of the images; classes have about the same share in both.

    The split depends on the ids and file names of the images, on the seed, and on nothing else.

    Args:
        annotations: a COCO json of instances.
        share: of the images that go to val.json.
        seed: of the random choice.
        group: a regular expression; images whose file names agree in what it finds stay together.
        output: the folder to write into, by default that of the annotations.

    Raises:
        UserError: the json or the regular expression is wrong, there are too few images, or a file exists.
    """
    if not 0 < share < 1:
        raise DataError(f"The share of the validation data is more than 0 and less than 1, not {share:g}.")
    folder = annotations.parent if output is None else output
    files = [folder / f"{part}.json" for part in PARTS]
    for file in files:
        if file.exists():
            raise DataError(f"{file} exists, and a split replaces no file: choose another --output.")
    raw = read_json(annotations)
    tables = {**raw, "annotations": list(raw.get("annotations", []))}
    if has_segments(tables["annotations"]):
        raise DataError(f"{annotations} is panoptic: only annotations of instances can be split.")
    _check_ids(tables, annotations)
    units = _units(tables["images"], group)
    is_val = _stratify(units, tables["annotations"], share, seed)
    if len(set(is_val)) < 2:
        raise DataError(
            f"{annotations} has {len(tables['images'])} images{f' in {len(units)} groups' if group else ''}: too few "
            f"for a share of {share:g}."
        )
    make_folder(folder)
    parts = []
    for file, chosen in zip(files, (False, True), strict=True):
        kept = [unit for unit, val in zip(units, is_val, strict=True) if val == chosen]
        parts.append(_write(file, tables, kept))
    return parts[0], parts[1]


def _check_ids(tables: Mapping[str, Sequence[Row]], source: Path) -> None:
    ids = [row.get("id") for row in tables["images"]]
    known = set(filter(is_id, ids))
    if len(known) < len(ids) or any(not is_text(row.get("file_name")) for row in tables["images"]):
        raise DataError(f"{source}: each image needs its own id and a file_name; see 'uniquery data check'.")
    for row in tables["annotations"]:
        image = row.get("image_id")
        if not is_id(image) or image not in known or not is_id(row.get("category_id")):
            name = shorten(row.get("id"))
            raise DataError(f"{source}: annotation {name} names no image or category; see 'uniquery data check'.")


def _units(images: Sequence[Row], group: str | None) -> list[list[int]]:
    """The ids of images that stay together, in the order of the ids."""
    try:
        pattern = re.compile(group) if group is not None else None
    except re.error as error:
        raise DataError(f"--group '{group}' is not a regular expression: {error}.") from None
    units: dict[object, list[int]] = {}
    for row in sorted(images, key=lambda row: row["id"]):
        key: object = row["id"]
        if pattern is not None:
            match = pattern.search(row["file_name"])
            if match is None:
                raise DataError(f"--group '{group}' finds nothing in the file name {shorten(row['file_name'])}.")
            key = match.group(1) if pattern.groups else match.group()
        units.setdefault(key, []).append(row["id"])
    return list(units.values())


def _stratify(units: Sequence[Sequence[int]], annotations: Sequence[Row], share: float, seed: int) -> list[bool]:
    """Whether each unit is validation data, by iterative stratification (Sechidis et al. 2011).

    The rarest class that is left goes first; each of its units goes to the part that lacks most images of the class,
    then most images at all. A unit counts as its number of images, of each class as the images that have it.
    """
    owner = {image: number for number, unit in enumerate(units) for image in unit}
    weights = [Counter[int]() for _ in units]
    for image, label in {(row["image_id"], row["category_id"]) for row in annotations}:
        weights[owner[image]][label] += 1
    order = np.random.default_rng(seed).permutation(len(units)).tolist()
    units_with: dict[int, list[int]] = {}
    for number in order:
        for label in weights[number]:
            units_with.setdefault(label, []).append(number)
    left = {label: len(numbers) for label, numbers in units_with.items()}
    parts = [_Part(share_of, weights, len(owner)) for share_of in (1 - share, share)]
    is_val: dict[int, bool] = {}
    while len(is_val) < len(units):
        rarest = min((label for label in left if left[label]), key=lambda label: (left[label], label), default=None)
        for number in order if rarest is None else units_with[rarest]:
            if number not in is_val:
                is_val[number] = parts[1].lacks(rarest) > parts[0].lacks(rarest)
                parts[is_val[number]].take(weights[number], len(units[number]))
                for label in weights[number]:
                    left[label] -= 1
    return [is_val[number] for number in range(len(units))]


class _Part:
    """How many images a part lacks, of each class and at all.

    Args:
        share: its share of all images.
        weights: of each unit, how many of its images have a class.
        images: how many there are at all.
    """

    def __init__(self, share: float, weights: Sequence[Counter[int]], images: int) -> None:
        self.images, self.classes = share * images, dict[int, float]()
        for unit in weights:
            for label, count in unit.items():
                self.classes[label] = self.classes.get(label, 0) + share * count

    def lacks(self, label: int | None) -> tuple[float, float]:
        """Of a class, then at all."""
        return (0 if label is None else round(self.classes[label], 6)), self.images

    def take(self, weights: Counter[int], images: int) -> None:
        self.images -= images
        for label, count in weights.items():
            self.classes[label] -= count


def _write(file: Path, tables: Mapping[str, Sequence[Row]], units: Sequence[Sequence[int]]) -> SplitPart:
    ids = {image for unit in units for image in unit}
    images = [row for row in tables["images"] if row["id"] in ids]
    annotations = [row for row in tables["annotations"] if row["image_id"] in ids]
    write_atomically(file, json.dumps({**tables, "images": images, "annotations": annotations}))
    counts = Counter(row["category_id"] for row in annotations if not row.get("iscrowd"))
    classes = {str(row.get("name")): counts[row.get("id")] for row in tables["categories"]}
    return SplitPart(file, len(images), len(units), counts.total(), classes)
