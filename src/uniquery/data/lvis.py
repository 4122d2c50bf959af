"""What LVIS adds to COCO: which classes were looked for in an image, and how rare a class is.

LVIS is a federated data set: an image is labeled for some of the classes only. Of a class in `neg_category_ids` it has
no instance. Of a class in `not_exhaustive_category_ids` some instances are labeled and others are not. Of a class that
is neither in these lists nor among the image's annotations, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field

from uniquery.data.dataset import ClassLists, Dataset, Row
from uniquery.data.json_values import is_id, shorten
from uniquery.settings import Settings

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


def read_class_lists(image: Row, labels: Mapping[int, int]) -> ClassLists:
    """The two lists of an image as labels instead of category ids, without classes that are not used."""
    lists = class_lists(image)
    negative, not_exhaustive = (
        tuple(sorted({labels[i] for i in lists.get(name, ()) if i in labels})) for name in (NEGATIVE, NOT_EXHAUSTIVE)
    )
    return ClassLists(negative, not_exhaustive)


class FederatedSettings(Settings):
    """The federated class loss: each image teaches only some of the classes that it has no instance of."""

    classes: int = Field(
        50,
        gt=0,
        description="classes in the loss of an image: its own, those known to be absent, others by √frequency",
    )


class FederatedClasses:
    """Draws the classes that an image teaches, as in detectron2's federated loss, but for each image.

    An image teaches the classes of its instances and those that it is known to have none of. Others are added until
    there are `settings.classes`, drawn without replacement with a chance that grows with the square root of the number
    of images that have them: a frequent class is rarely present without being labeled, and has many instances to learn
    from.

    Args:
        data: the training data.
        settings: how many classes.
    """

    def __init__(self, data: Dataset, settings: FederatedSettings) -> None:
        self.data, self.count = data, settings.classes
        _, labels = data.image_classes()
        self._weights = torch.bincount(labels, minlength=len(data.categories)).double().sqrt().numpy()

    def draw(
        self, index: int, labels: Sequence[int], rng: np.random.Generator, pasted: Sequence[int] = ()
    ) -> ClassLists:
        """The classes whose absence an image with these labels teaches, and those not exhaustively labeled.

        Its own labels are among the first: away from its instances, or where they are cut off, their classes are
        absent. Of the class of an instance that was pasted into it, the image may have more that are not labeled.
        """
        lists = self.data.class_lists(index)
        not_exhaustive = {*lists.not_exhaustive, *({*pasted} - {*labels, *lists.negative})}
        known = sorted({*labels, *lists.negative, *not_exhaustive})
        weights = self._weights.copy()
        weights[known] = 0
        missing = min(max(0, self.count - len(known)), int(np.count_nonzero(weights)))
        drawn = rng.choice(len(weights), missing, replace=False, p=weights / weights.sum()) if missing else ()
        return ClassLists(tuple(sorted({*labels, *lists.negative, *map(int, drawn)})), tuple(sorted(not_exhaustive)))
