"""Drawn scenes in the form of LVIS: rare, common and frequent classes, and images labeled for some classes only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from uniquery.data.dataset import Row
from uniquery.data.lvis import NEGATIVE, NOT_EXHAUSTIVE

LONG_TAIL = 2.2
"""How many times as rare a class is as the one before it."""
RARE, COMMON = 10, 100
"""The most training images of a rare and of a common class, as in LVIS."""
_URL = "http://uniquery.invalid/images/{split}/{name}"
_NEGATIVE_SHARE = 0.5  # of the classes that an image has none of
_NOT_EXHAUSTIVE_SHARE = 0.2  # of the classes that an image has several instances of


def long_tailed(uniform: float, classes: int) -> int:
    """A class from a uniform number in 0..1.

    >>> [long_tailed(uniform, 3) for uniform in (0.0, 0.6, 0.7, 0.9, 0.999)]
    [0, 0, 1, 2, 2]
    """
    shares = [LONG_TAIL**-label for label in range(classes)]
    limits = accumulate(share / sum(shares) for share in shares)
    return next((label for label, limit in enumerate(limits) if uniform < limit), 0)


def count_frequencies(content: Mapping[str, Any]) -> dict[int, str]:
    """Category → r, c or f, by how many images have it."""
    pairs = {(row["image_id"], row["category_id"]) for row in content["annotations"]}
    counts = Counter(category for _, category in pairs)
    return {
        row["id"]: "r" if counts[row["id"]] <= RARE else "c" if counts[row["id"]] <= COMMON else "f"
        for row in content["categories"]
    }


def lvis_form(content: Mapping[str, Any], split: str, seed: int, train: Path) -> dict[str, Any]:
    """COCO tables as LVIS v1 has them: `coco_url` instead of `file_name`, no `iscrowd`, frequencies, two class lists.

    The frequencies are those in the training split's json; if it is not there yet, they are counted.

    Of some classes with several instances in an image, the last annotation is left out: the image is then not
    exhaustively labeled for that class.
    """
    frequencies = _read_frequencies(train) if train.exists() else count_frequencies(content)
    by_image: dict[int, list[Row]] = {row["id"]: [] for row in content["images"]}
    for row in content["annotations"]:
        by_image[row["image_id"]].append({key: value for key, value in row.items() if key != "iscrowd"})
    images = [_image(row, split, by_image[row["id"]], sorted(frequencies), seed) for row in content["images"]]
    return {
        **content,
        "images": images,
        "annotations": [row for image in images for row in by_image[image["id"]]],
        "categories": [{**row, "frequency": frequencies[row["id"]]} for row in content["categories"]],
    }


def _read_frequencies(path: Path) -> dict[int, str]:
    return {row["id"]: row["frequency"] for row in json.loads(path.read_text(encoding="utf-8"))["categories"]}


def _image(row: Row, split: str, annotations: list[Row], categories: list[int], seed: int) -> Row:
    """The row of an image; annotations that are left out are removed from the list."""
    chance = np.random.Generator(np.random.PCG64([seed, row["id"], len(split)])).random(len(categories)).tolist()
    counts = Counter(annotation["category_id"] for annotation in annotations)
    draws = dict(zip(categories, chance, strict=True))
    partial = [c for c in categories if counts[c] > 1 and draws[c] < _NOT_EXHAUSTIVE_SHARE]
    for category in partial:
        annotations.remove([a for a in annotations if a["category_id"] == category][-1])
    url = _URL.format(split=split, name=row["file_name"])
    lists = {
        NEGATIVE: [c for c in categories if not counts[c] and draws[c] < _NEGATIVE_SHARE],
        NOT_EXHAUSTIVE: partial,
    }
    return {**{key: value for key, value in row.items() if key != "file_name"}, "coco_url": url, **lists}


def image_name(row: Row) -> str:
    """The name of a drawn image inside the folder of its split.

    >>> image_name({"coco_url": "http://uniquery.invalid/images/train/000001.png"})
    '000001.png'
    """
    name: str = row["file_name"] if "file_name" in row else row["coco_url"].rpartition("/")[2]
    return name
