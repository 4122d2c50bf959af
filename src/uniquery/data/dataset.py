"""What training, evaluation and reports need from a data set, independent of its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from uniquery.data.augment import Sample
from uniquery.masks.rle import Rle

Row = dict[str, Any]


@dataclass(frozen=True)
class Category:
    """A class.

    Attributes:
        id: its id in the annotations.
        name: its name.
        is_thing: in panoptic data whether it is a thing, not stuff; None in data of instances.
    """

    id: int
    name: str
    is_thing: bool | None = None


def is_panoptic(categories: Sequence[Category]) -> bool:
    """Whether classes are divided into things and stuff.

    >>> is_panoptic([Category(1, "cell")]), is_panoptic([Category(1, "sky", is_thing=False)])
    (False, True)
    """
    return any(category.is_thing is not None for category in categories)


@dataclass(frozen=True)
class ClassLists:
    """What an image is labeled for besides its instances, as in LVIS; labels, in ascending order.

    Attributes:
        negative: classes that were looked for and that the image has no instance of.
        not_exhaustive: classes of which some instances are not labeled.
    """

    negative: tuple[int, ...] = ()
    not_exhaustive: tuple[int, ...] = ()

    def with_labels(self, labels: Sequence[int]) -> ClassLists:
        """The same lists with other labels.

        >>> ClassLists((0, 1), (2,)).with_labels([2, 1, 0])
        ClassLists(negative=(1, 2), not_exhaustive=(0,))
        """
        changed = (tuple(sorted(labels[old] for old in classes)) for classes in (self.negative, self.not_exhaustive))
        return ClassLists(*changed)


@dataclass(frozen=True)
class GroundTruth:
    """COCO tables in memory, as the metrics read them.

    Attributes:
        images: rows of 'images' by id.
        categories: rows of 'categories' by id, in the order of the ids.
        annotations: rows of 'annotations'.
        source: the file they came from, or another name for error messages.
    """

    images: Mapping[int, Row]
    categories: Mapping[int, Row]
    annotations: Sequence[Row]
    source: str


class Dataset(Protocol):
    """Images with annotated instances. An image is addressed by its index, 0 to len − 1.

    Not to be confused with `torch.utils.data.Dataset`: see `TrainingSamples` and `EvaluationSamples` for those.
    """

    @property
    def annotations(self) -> Path:
        """The file of the annotations."""

    @property
    def categories(self) -> Sequence[Category]:
        """The categories, by label."""

    @property
    def classes(self) -> list[str]:
        """Names of the categories, by label."""

    @property
    def frequencies(self) -> Sequence[str | None]:
        """How rare each class is, by label: r, c or f as in LVIS, None where the annotations do not say it."""

    @property
    def image_ids(self) -> Tensor:
        """(I,) int64, as in the annotations."""

    @property
    def sizes(self) -> Tensor:
        """(I, 2) int64, height and width of each image."""

    @property
    def warnings(self) -> Sequence[str]:
        """What is wrong with the data but does not stop training, one sentence each."""

    def __len__(self) -> int:
        """How many images there are."""

    def path(self, index: int) -> Path:
        """The file of an image."""

    def read(self, index: int) -> npt.NDArray[np.uint8]:
        """(H, W, 3) RGB."""

    def load(self, index: int) -> Sample:
        """An image and its instances."""

    def instances(self, index: int) -> list[tuple[int, Rle]]:
        """(label, run-length mask) of the instances of an image, crowd regions excluded."""

    def instances_per_image(self) -> Tensor:
        """(I,) how many instances each image has, crowd regions excluded."""

    def image_classes(self) -> tuple[Tensor, Tensor]:
        """(P,) index of an image and (P,) label, for each class that an image has instances of."""

    def class_lists(self, index: int) -> ClassLists:
        """What an image is labeled for besides its instances; empty lists if the annotations do not say it."""

    def checksum(self) -> int:
        """CRC-32 of everything that training reads from the annotations, independent of the folders."""

    def check_files_exist(self) -> None:
        """Raises a DataError if an image file is missing."""

    def ground_truth(self, on_unreadable: Callable[[str], object] | None = None) -> GroundTruth:
        """What metrics compare results with.

        Args:
            on_unreadable: called with a sentence for each image whose annotations are in a file that cannot be read,
                and which is then void, so that nothing in it counts; None raises a DataError instead.
        """
