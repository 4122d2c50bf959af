"""What LVIS adds to COCO: which classes were looked for in an image, and how rare a class is.

LVIS is a federated data set: an image is labeled for some of the classes only. Of a class in `neg_category_ids` it has
no instance. Of a class in `not_exhaustive_category_ids` some instances are labeled and others are not. Of a class that
is neither in these lists nor among the image's annotations, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from uniquery.data.dataset import Row
from uniquery.data.json_values import is_id, shorten

FREQUENCIES = {"r": "rare", "c": "common", "f": "frequent"}
"""`frequency` of a category → its meaning: in 1 to 10, 11 to 100, or more training images."""
NEGATIVE, NOT_EXHAUSTIVE = "neg_category_ids", "not_exhaustive_category_ids"
_SPELLINGS = {NEGATIVE: (NEGATIVE,), NOT_EXHAUSTIVE: (NOT_EXHAUSTIVE, "non_exhaustive_category_ids")}


def class_lists(image: Row) -> dict[str, Any]:
    """The two lists of classes of an image by their LVIS v1 names, where it has them.

    >>> class_lists({"id": 1, "neg_category_ids": [3], "non_exhaustive_category_ids": []})
    {'neg_category_ids': [3], 'not_exhaustive_category_ids': []}
    """
    return {
        name: image[spelling] for name, spellings in _SPELLINGS.items() for spelling in spellings if spelling in image
    }


def image_problems(image: Row) -> Iterator[str]:
    """What is wrong with the lists of classes of an image, as the end of a sentence."""
    for name, ids in class_lists(image).items():
        if not isinstance(ids, list) or not all(is_id(i) for i in ids):
            yield f"has {shorten(ids)} as '{name}', which must be a list of category ids"


def category_problems(categories: Iterable[Row]) -> Iterator[str]:
    """What is wrong with the frequencies of the categories that have one, a sentence each."""
    for row in categories:
        frequency = row.get("frequency")
        if frequency is not None and (not isinstance(frequency, str) or frequency not in FREQUENCIES):
            name = f"Category {shorten(row.get('id'))} ({shorten(row.get('name'))})"
            yield f"{name} has the frequency {shorten(frequency)}, which must be one of {', '.join(FREQUENCIES)}."


def has_frequencies(categories: Iterable[Row]) -> bool:
    """Whether every category has a frequency, as in LVIS."""
    return all(isinstance(row.get("frequency"), str) and row["frequency"] in FREQUENCIES for row in categories)


def class_labels(image: Row, labels: Mapping[int, int]) -> dict[str, list[int]]:
    """The two lists of an image as labels instead of category ids, without those of classes that are not used."""
    return {name: sorted({labels[i] for i in ids if i in labels}) for name, ids in class_lists(image).items()}
