"""What a reader takes from the annotations of another tool, before it is written as COCO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from uniquery.data.images import image_size
from uniquery.data.json_values import read_mask
from uniquery.errors import DataError
from uniquery.masks import rle

Segmentation = list[list[float]] | rle.Rle
NO_SPLIT = ""
"""The name of the only split of data that is not split."""


@dataclass(frozen=True)
class ImportedObject:
    """An annotated instance.

    Attributes:
        class_name: the name of its class.
        segmentation: polygons or run lengths, as in COCO.
        mask: its compressed run lengths, which are not empty.
    """

    class_name: str
    segmentation: Segmentation
    mask: rle.Rle


@dataclass(frozen=True)
class ImportedImage:
    """An image that can be read.

    Attributes:
        file: where it is.
        height: in pixels, after EXIF rotation.
        width: in pixels.
        objects: its instances.
    """

    file: Path
    height: int
    width: int
    objects: list[ImportedObject] = field(default_factory=list)


@dataclass(frozen=True)
class Imported:
    """A data set of another tool.

    Attributes:
        classes: the names of its classes.
        splits: the images of each split, by name; `NO_SPLIT` if there is only one without a name.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, list[ImportedImage]]


class ImportLog:
    """Notes what a reader drops and why, and opens what it keeps.

    Args:
        progress: called with how many images are done, and how many there are.
    """

    def __init__(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        self.progress = progress
        self.dropped: dict[str, list[str]] = {}
        self.notes: dict[str, list[str]] = {}

    def drop(self, reason: str, where: object) -> None:
        """Notes something that is not imported."""
        self.dropped.setdefault(reason, []).append(str(where))

    def note(self, sentence: str, where: object) -> None:
        """Notes something that is imported and may be wrong."""
        self.notes.setdefault(sentence, []).append(str(where))

    def open_image(self, file: Path, given: tuple[int, int] | None = None) -> ImportedImage | None:
        """An image without instances; None if it cannot be read, or has not the (height, width) that is given."""
        try:
            height, width = image_size(file)
        except DataError as error:
            self.drop("image that cannot be read", str(error).rstrip("."))
            return None
        if given is not None and given != (height, width):
            where = f"{file} is {width}×{height}, its annotations are for {given[1]}×{given[0]}"
            self.drop("image of another size than its annotations", where)
            return None
        return ImportedImage(file, height, width)

    def add_object(self, image: ImportedImage, class_name: str, segmentation: Segmentation, where: object) -> None:
        """Adds an instance to an image, unless it is not valid or has no pixel."""
        try:
            mask = read_mask(segmentation, image.height, image.width)
        except ValueError as error:
            self.drop(f"instance that is not valid: {error}", where)
            return
        if not rle.area(mask):
            self.drop("instance without a pixel inside its image", where)
            return
        image.objects.append(ImportedObject(class_name, segmentation, mask))


def check_classes(names: Iterable[object], source: Path) -> tuple[str, ...]:
    """The names of classes, each once and not empty.

    Raises:
        DataError: there is none, or one of them is not a name.
    """
    classes = tuple(names)
    for name in classes:
        if not isinstance(name, str) or not name.strip() or classes.count(name) > 1:
            raise DataError(f"{source}: each class needs a name of its own, not {name!r:.80}.")
    if not classes:
        raise DataError(f"{source} names no class.")
    return tuple(str(name) for name in classes)
