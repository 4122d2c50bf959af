"""COCO instance annotations: read once, checked whole, held in flat shared arrays."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from uniquery.data.augment import Sample, image_only
from uniquery.data.coco_json import find_problems, read_json
from uniquery.data.images import check_image_root, inside_root, is_file, read_image
from uniquery.errors import DataError, did_you_mean
from uniquery.masks import rle


@dataclass(frozen=True)
class Category:
    """A class: its id in the annotations and its name."""

    id: int
    name: str


class CocoData:
    """A COCO instance data set, in flat tensors that worker processes share instead of copying.

    Args:
        annotations: the json.
        images: the folder its file names are relative to.
        classes: names of the classes to use, in the order of their labels; None takes all, by id.
        keep_empty: whether images without instances stay, as negatives.
        ignore_crowd: whether `load` marks crowd regions as not valid; otherwise they are background.

    Raises:
        DataError: anything that would make training go wrong, in one sentence.
    """

    def __init__(
        self,
        annotations: Path,
        images: Path,
        *,
        classes: Sequence[str] | None = None,
        keep_empty: bool = True,
        ignore_crowd: bool = True,
    ) -> None:
        self.annotations, self.image_root, self.ignore_crowd = Path(annotations), Path(images), ignore_crowd
        raw = read_json(self.annotations)
        if "annotations" not in raw:
            raise DataError(f"{annotations} has no 'annotations', which training and evaluation need.")
        masks = self._checked_masks(raw)
        self.categories = _chosen_categories(raw["categories"], classes, self.annotations)
        self._pack(raw, masks, keep_empty)
        if not len(self):
            raise DataError(
                f"{annotations} has no image left to use: set data.keep_empty to keep those without instances."
            )

    def _checked_masks(self, raw: dict[str, Any]) -> dict[int, rle.Rle]:
        check_image_root(self.image_root)
        masks: dict[int, rle.Rle] = {}
        problems = list(find_problems(raw, self.image_root, masks))
        fatal = [p for p in problems if p.fatal]
        if fatal:
            more = f" (and {len(fatal) - 1} more problems; see: uniquery data check)" if len(fatal) > 1 else ""
            raise DataError(f"{self.annotations}: {fatal[0].text.removesuffix('.')}{more}.")
        self.warnings = [p.text for p in problems]
        return masks

    def _pack(self, raw: dict[str, Any], masks: dict[int, rle.Rle], keep_empty: bool) -> None:
        label_of = {c.id: label for label, c in enumerate(self.categories)}
        by_image: dict[int, list[dict[str, Any]]] = {row["id"]: [] for row in raw["images"]}
        for row in raw["annotations"]:
            if row["category_id"] in label_of and row["id"] in masks:
                by_image[row["image_id"]].append(row)
        rows = [i for i in raw["images"] if keep_empty or any(not a.get("iscrowd") for a in by_image[i["id"]])]
        annotations = [a for i in rows for a in by_image[i["id"]]]
        counts = [len(by_image[i["id"]]) for i in rows]
        self.image_ids = _shared([i["id"] for i in rows])
        self.sizes = _shared([[i["height"], i["width"]] for i in rows]).view(-1, 2)
        self.starts = _shared(np.cumsum([0, *counts]))
        self.labels = _shared([label_of[a["category_id"]] for a in annotations])
        self.crowd = _shared([bool(a.get("iscrowd")) for a in annotations], np.bool_)
        self.annotation_ids = _shared([a["id"] for a in annotations])
        self._names = PackedStrings([i["file_name"] for i in rows])
        self._masks = PackedStrings([masks[a["id"]]["counts"] for a in annotations])

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def classes(self) -> list[str]:
        """Names by label."""
        return [c.name for c in self.categories]

    def path(self, index: int) -> Path:
        """Where an image lies."""
        return inside_root(self.image_root, self._names[index])

    def instances_per_image(self) -> Tensor:
        """(I,) how many non-crowd instances each image has."""
        image = torch.repeat_interleave(torch.arange(len(self)), self.starts.diff())
        return torch.bincount(image[~self.crowd], minlength=len(self))

    def checksum(self) -> int:
        """Of everything that the annotations say, wherever the files lie."""
        total = 0
        for column in (self.image_ids, self.sizes, self.starts, self.labels, self.crowd, self.annotation_ids):
            total = zlib.crc32(column.numpy().data, total)
        return self._masks.checksum(self._names.checksum(total))

    def instances(self, index: int) -> list[tuple[int, rle.Rle]]:
        """(label, run lengths) of the non-crowd instances of an image."""
        span = self._annotations_of(index)
        return [(int(self.labels[a]), self._mask(index, a)) for a in span if not self.crowd[a]]

    def load(self, index: int) -> Sample:
        """An image and its non-crowd instances.

        Raises:
            DataError: naming the file and its first annotation.
        """
        sample = image_only(self.read(index))
        instances = self.instances(index)
        masks = [torch.from_numpy(rle.decode(mask)) for _, mask in instances]
        stacked = torch.stack(masks) if masks else sample.masks
        labels = torch.tensor([label for label, _ in instances], dtype=torch.int64)
        return Sample(sample.image, stacked, labels, self._valid(index, stacked) if self.ignore_crowd else None)

    def _valid(self, index: int, masks: Tensor) -> Tensor | None:
        """(H, W) uint8, 0 in crowd regions; instances (K, H, W) inside them stay valid. None without crowd regions."""
        crowd = [self._mask(index, a) for a in self._annotations_of(index) if self.crowd[a]]
        if not crowd:
            return None
        valid = torch.ones(masks.shape[1:], dtype=torch.uint8)
        for mask in crowd:
            valid[torch.from_numpy(rle.decode(mask)).bool()] = 0
        valid[masks.any(0).bool()] = 1
        return valid

    def _annotations_of(self, index: int) -> range:
        return range(int(self.starts[index]), int(self.starts[index + 1]))

    def _mask(self, index: int, annotation: int) -> rle.Rle:
        return {"size": self.sizes[index].tolist(), "counts": self._masks[annotation]}

    def read(self, index: int) -> npt.NDArray[np.uint8]:
        """An image (H, W, 3), which has the size that the annotations say."""
        span = self.annotation_ids[self.starts[index] : self.starts[index + 1]].tolist()
        where = f" (image {int(self.image_ids[index])}, {f'annotation {span[0]}' if span else 'no annotations'})"
        try:
            image = read_image(self.path(index))
        except DataError as error:
            raise DataError(f"{str(error).rstrip('.')}{where}.") from None
        if list(image.shape[:2]) != self.sizes[index].tolist():
            height, width = self.sizes[index].tolist()
            raise DataError(
                f"{self.path(index)} is {image.shape[1]}×{image.shape[0]} upright, but the annotations say "
                f"{width}×{height}{where}: mend the json, or the image's EXIF orientation."
            )
        return image

    def check_files_exist(self) -> None:
        """Raises if an image file is missing, before hours of training find out."""
        missing = [i for i in range(len(self)) if not is_file(self.path(i))]
        if missing:
            span = self.annotation_ids[self.starts[missing[0]] : self.starts[missing[0] + 1]].tolist()
            raise DataError(
                f"{len(missing)} of {len(self)} image files are missing, the first is {self.path(missing[0])} "
                f"(image {int(self.image_ids[missing[0]])}, annotation {span[0] if span else 'none'})."
            )


class PackedStrings:
    """Strings in one shared byte tensor: no Python object per string, nothing for workers to copy.

    >>> PackedStrings(["a", "", "bc"])[2]
    'bc'
    """

    def __init__(self, strings: Sequence[str]) -> None:
        encoded = [s.encode() for s in strings]
        self._ends = _shared(np.cumsum([0, *map(len, encoded)]))
        self._bytes = torch.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=torch.uint8).share_memory_()

    def __getitem__(self, index: int) -> str:
        return bytes(self._bytes[self._ends[index] : self._ends[index + 1]].numpy()).decode()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def checksum(self, start: int = 0) -> int:
        """The CRC-32 of all strings, after that of what came before them."""
        return zlib.crc32(self._bytes.numpy().data, zlib.crc32(self._ends.numpy().data, start))


def _shared(values: Any, dtype: npt.DTypeLike = np.int64) -> Tensor:
    tensor: Tensor = torch.as_tensor(np.asarray(values, dtype=dtype)).share_memory_()
    return tensor


def _chosen_categories(rows: Sequence[dict[str, Any]], classes: Sequence[str] | None, path: Path) -> list[Category]:
    by_name = {row["name"]: Category(row["id"], row["name"]) for row in rows}
    if classes is None:
        return sorted(by_name.values(), key=lambda c: c.id)
    if not classes or len(set(classes)) < len(classes):
        raise DataError(f"The classes to use from {path} must be one or more different names, not {list(classes)}.")
    for name in classes:
        if name not in by_name:
            raise DataError(f"{path} has no class '{name}'.{did_you_mean(name, by_name)}")
    return [by_name[name] for name in classes]
