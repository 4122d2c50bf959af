"""COCO instance annotations: read once, checked completely, kept in flat shared tensors.

Letters: I images, A annotations, K instances of one image, H × W pixels.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from uniquery.data.augment import Sample, image_only
from uniquery.data.coco_json import Problem, TableCheck, check_tables, read_json
from uniquery.data.dataset import Category, ClassLists, GroundTruth, Row
from uniquery.data.images import check_image_root, find_image_root, inside_root, is_file, read_image
from uniquery.data.json_values import read_box
from uniquery.data.lvis import class_lists, read_class_lists
from uniquery.errors import DataError, did_you_mean
from uniquery.masks import rle

IMAGE_EXTRAS = ("coco_url",)
"""Keys of 'images' that are kept where they are given, besides LVIS's lists of classes."""


class CocoData:
    """A COCO instance data set, in flat tensors that worker processes share instead of copying.

    Args:
        annotations: the json.
        images: the folder its file names are relative to.
        classes: names of the classes to use, in the order of their labels; None takes all, by id.
        allow_missing: whether `classes` may name some that the data does not have; they get no label.
        keep_empty: whether images without instances stay, as negatives.
        ignore_crowd: whether `load` marks crowd regions as not valid; otherwise they are background.
        tables: the content of the json, if it was read before.

    Attributes:
        bit_depth: how many bits the values of 16-bit images use; None: as `read_image` finds them.

    Raises:
        DataError: anything that would make training go wrong, in one sentence.
    """

    bit_depth: int | None = None

    def __init__(
        self,
        annotations: Path,
        images: Path,
        *,
        classes: Sequence[str] | None = None,
        allow_missing: bool = False,
        keep_empty: bool = True,
        ignore_crowd: bool = True,
        tables: Row | None = None,
    ) -> None:
        self.annotations, self.image_root, self.ignore_crowd = Path(annotations), Path(images), ignore_crowd
        raw = read_json(self.annotations) if tables is None else tables
        if "annotations" not in raw:
            raise DataError(f"{annotations} has no 'annotations', which training and evaluation need.")
        check_image_root(self.image_root)
        check = check_tables(raw, self.image_root)
        raise_fatal(check.problems, self.annotations)
        self.warnings = [problem.text for problem in check.problems]
        self._category_rows = _select_categories(raw["categories"], classes, self.annotations, allow_missing)
        self.categories = [Category(row["id"], row["name"]) for row in self._category_rows]
        self.unused = count_unused(raw["categories"], check.annotations, self.categories)
        self._pack(raw, check, keep_empty)
        if not len(self):
            raise DataError(
                f"{annotations} has no image left to use: set data.keep_empty to keep those without instances."
            )

    def _pack(self, raw: Row, check: TableCheck, keep_empty: bool) -> None:
        self._label_of = labels = {c.id: label for label, c in enumerate(self.categories)}
        by_image: dict[int, list[Row]] = {row["id"]: [] for row in raw["images"]}
        for row in check.annotations:
            if row["category_id"] in labels:
                by_image[row["image_id"]].append(row)

        def has_instance(image: Row) -> bool:
            return any(check.mask_areas[a["id"]] and not a.get("iscrowd") for a in by_image[image["id"]])

        images = [row for row in raw["images"] if keep_empty or has_instance(row)]
        annotations = [a for i in images for a in by_image[i["id"]]]
        self.image_ids = _shared([i["id"] for i in images])
        self.sizes = _shared([[i["height"], i["width"]] for i in images]).view(-1, 2)
        self.starts = _shared(np.cumsum([0, *(len(by_image[i["id"]]) for i in images)]))
        self.labels = _shared([labels[a["category_id"]] for a in annotations])
        self.crowd = _shared([bool(a.get("iscrowd")) for a in annotations], np.bool_)
        self.annotation_ids = _shared([a["id"] for a in annotations])
        self.mask_areas = _shared([check.mask_areas[a["id"]] for a in annotations])
        self.areas = _shared([_given(a.get("area"), check.mask_areas[a["id"]]) for a in annotations], np.float64)
        self._pack_boxes(annotations)
        self._names = PackedStrings([check.file_names[i["id"]] for i in images])
        self._masks = PackedStrings([check.masks[a["id"]] for a in annotations])
        extras = [{key: i[key] for key in IMAGE_EXTRAS if key in i} for i in images]
        self._extras = PackedStrings([json.dumps(one) if one else "" for one in extras])
        lists = [class_lists(i) for i in images]
        self._class_lists = PackedStrings([json.dumps(one) if one else "" for one in lists]) if any(lists) else None

    def _pack_boxes(self, annotations: Sequence[Row]) -> None:
        """The boxes of the json, NaN where there is none; training does not read them, so invalid ones are kept too."""
        boxes = np.full((len(annotations), 4), np.nan)
        self._invalid_boxes: dict[int, Any] = {}
        for number, row in enumerate(annotations):
            box = row.get("bbox")
            if box is None or box == []:
                continue
            try:
                boxes[number] = read_box(box)
            except ValueError:
                self._invalid_boxes[number] = box
        self.boxes = _shared(boxes, np.float64)

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def classes(self) -> list[str]:
        """Names by label."""
        return [c.name for c in self.categories]

    @property
    def frequencies(self) -> list[str | None]:
        """How rare each class is, by label: r, c or f as in LVIS, None where the annotations do not say it."""
        return [row.get("frequency") for row in self._category_rows]

    def path(self, index: int) -> Path:
        """The file of an image."""
        return inside_root(self.image_root, self._names[index])

    def instances_per_image(self) -> Tensor:
        """(I,) how many instances each image has, crowd regions and empty masks excluded."""
        return torch.bincount(self._instance_pairs()[0], minlength=len(self))

    def image_classes(self) -> tuple[Tensor, Tensor]:
        """(P,) index of an image and (P,) label, for each class that an image has instances of."""
        index, label = self._instance_pairs()
        pairs = (index * len(self.categories) + label).unique()
        return pairs // len(self.categories), pairs % len(self.categories)

    def _instance_pairs(self) -> tuple[Tensor, Tensor]:
        """(K,) index of the image and (K,) label of all instances, crowd regions and empty masks excluded."""
        image = torch.repeat_interleave(torch.arange(len(self)), self.starts.diff())
        counted = ~self.crowd & (self.mask_areas > 0)
        return image[counted], self.labels[counted]

    def checksum(self) -> int:
        """CRC-32 of everything that training reads from the annotations, independent of the folders."""
        total = 0
        for column in (self.image_ids, self.sizes, self.starts, self.labels, self.crowd, self.annotation_ids):
            total = zlib.crc32(column.numpy().data, total)
        total = self._masks.checksum(self._names.checksum(total))
        return self._class_lists.checksum(total) if self._class_lists else total

    def instances(self, index: int) -> list[tuple[int, rle.Rle]]:
        """(label, run-length mask) of the instances of an image, crowd regions and empty masks excluded."""
        numbers = self._annotation_numbers(index, crowd=False)
        labels = self.labels[numbers].tolist()
        return [(label, self._mask(index, number)) for label, number in zip(labels, numbers, strict=True)]

    def class_lists(self, index: int) -> ClassLists:
        """What an image is labeled for besides its instances; empty lists if the annotations do not say it."""
        return read_class_lists(self._read_class_lists(index), self._label_of)

    def _read_class_lists(self, index: int) -> Row:
        """LVIS's lists of an image, as the annotations have them."""
        text = self._class_lists[index] if self._class_lists else ""
        lists: Row = json.loads(text or "{}")
        return lists

    def load(self, index: int) -> Sample:
        """An image and its instances.

        Raises:
            DataError: names the file and its first annotation.
        """
        sample = image_only(self.read(index))
        instances = self.instances(index)
        masks = [torch.from_numpy(rle.decode(mask)) for _, mask in instances]
        stacked = torch.stack(masks) if masks else sample.masks
        labels = torch.tensor([label for label, _ in instances], dtype=torch.int64)
        return Sample(sample.image, stacked, labels, self._valid(index, stacked) if self.ignore_crowd else None)

    def _valid(self, index: int, masks: Tensor) -> Tensor | None:
        """(H, W) uint8, 0 in crowd regions; instances (K, H, W) inside them stay valid. None without crowd regions."""
        crowd = self._annotation_numbers(index, crowd=True)
        if not crowd:
            return None
        valid = torch.ones(masks.shape[1:], dtype=torch.uint8)
        for number in crowd:
            valid[torch.from_numpy(rle.decode(self._mask(index, number))).bool()] = 0
        valid[masks.any(0).bool()] = 1
        return valid

    def _annotation_numbers(self, index: int, *, crowd: bool) -> list[int]:
        """Positions in the columns of an image's annotations with a mask that is not empty."""
        start, end = self.starts[index : index + 2].tolist()
        selected = (self.crowd[start:end] == crowd) & (self.mask_areas[start:end] > 0)
        return [start + offset for offset in selected.nonzero().flatten().tolist()]

    def _mask(self, index: int, number: int) -> rle.Rle:
        return {"size": self.sizes[index].tolist(), "counts": self._masks[number]}

    def read(self, index: int) -> npt.NDArray[np.uint8]:
        """An image (H, W, 3), which has the size that the annotations give."""
        try:
            image = read_image(self.path(index), self.bit_depth)
        except DataError as error:
            raise DataError(f"{str(error).rstrip('.')} ({self._image_name(index)}).") from None
        height, width = self.sizes[index].tolist()
        if image.shape[:2] != (height, width):
            raise DataError(
                f"{self.path(index)} is {image.shape[1]}×{image.shape[0]} after EXIF rotation, but the annotations say "
                f"{width}×{height} ({self._image_name(index)}): fix the json, or the image's EXIF orientation."
            )
        return image

    def check_files_exist(self) -> None:
        """Raises if an image file is missing, before training starts."""
        missing = [index for index in range(len(self)) if not is_file(self.path(index))]
        if missing:
            near, first = find_image_root(self.image_root, self._names[missing[0]]), self.path(missing[0])
            raise DataError(
                f"{len(missing)} of {len(self)} image files are missing, the first is {first} "
                f"({self._image_name(missing[0])}).{f' It is in {near}: give that folder.' if near else ''}"
            )

    def _image_name(self, index: int) -> str:
        """An image and its first annotation, for error messages."""
        ids = self.annotation_ids[self.starts[index] : self.starts[index + 1]].tolist()
        return f"image {int(self.image_ids[index])}, {f'annotation {ids[0]}' if ids else 'no annotations'}"

    # `Dataset` has the argument; here all annotations are in the json, which was read.
    def ground_truth(self, on_unreadable: Callable[[str], object] | None = None) -> GroundTruth:  # noqa: ARG002
        """The annotations of these images and classes as COCO tables; metrics are the same as with the json."""
        ids, sizes = self.image_ids.tolist(), self.sizes.tolist()
        images = {
            image_id: {"id": image_id, "height": height, "width": width, **json.loads(extras or "{}")}
            for image_id, (height, width), extras in zip(ids, sizes, self._extras.tolist(), strict=True)
        }
        for image, row in enumerate(images.values()):
            row.update(self._read_class_lists(image))
        index = torch.repeat_interleave(torch.arange(len(self)), self.starts.diff()).tolist()
        boxes = [None if box[0] != box[0] else box for box in self.boxes.tolist()]
        for number, box in self._invalid_boxes.items():
            boxes[number] = box
        columns = (self.annotation_ids, self.labels, self.crowd, self.areas)
        annotations = [
            {
                "id": number,
                "image_id": ids[i],
                "category_id": self.categories[label].id,
                "iscrowd": int(crowd),
                "area": area,
                "bbox": box,
                "segmentation": {"size": sizes[i], "counts": counts},
            }
            for i, number, label, crowd, area, box, counts in zip(
                index, *(column.tolist() for column in columns), boxes, self._masks.tolist(), strict=True
            )
        ]
        categories = {row["id"]: row for row in sorted(self._category_rows, key=lambda row: row["id"])}
        return GroundTruth(images, categories, annotations, str(self.annotations))


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

    def tolist(self) -> list[str]:
        """All strings.

        >>> PackedStrings(["a", "", "größe"]).tolist()
        ['a', '', 'größe']
        """
        joined, ends = self._bytes.numpy().tobytes(), self._ends.tolist()
        return [joined[start:end].decode() for start, end in pairwise(ends)]

    def checksum(self, start: int = 0) -> int:
        """The CRC-32 of all strings, continued from the CRC-32 `start`."""
        return zlib.crc32(self._bytes.numpy().data, zlib.crc32(self._ends.numpy().data, start))


def _shared(values: Any, dtype: npt.DTypeLike = np.int64) -> Tensor:
    tensor: Tensor = torch.as_tensor(np.asarray(values, dtype=dtype)).share_memory_()
    return tensor


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def raise_fatal(problems: Sequence[Problem], path: Path) -> None:
    """Raises a DataError if training must not start with one of the problems."""
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        more = f" (and {len(fatal) - 1} more problems; see: uniquery data check)" if len(fatal) > 1 else ""
        raise DataError(f"{path}: {fatal[0].text.removesuffix('.')}{more}.")


def count_unused(categories: Sequence[Row], annotations: Iterable[Row], used: Sequence[Category]) -> dict[str, int]:
    """Name → number of annotations of each class that is not used."""
    names = {row["id"]: row["name"] for row in categories}
    counts = Counter(row["category_id"] for row in annotations)
    return {names[number]: count for number, count in counts.items() if number not in {c.id for c in used}}


def _select_categories(rows: list[Row], classes: Sequence[str] | None, path: Path, allow_missing: bool) -> list[Row]:
    by_name = {row["name"]: row for row in rows}
    if classes is None:
        return sorted(by_name.values(), key=lambda row: row["id"])
    if not classes or len(set(classes)) < len(classes):
        raise DataError(f"The classes to use from {path} must be one or more different names, not {list(classes)}.")
    for name in classes:
        if name not in by_name and not (allow_missing and by_name.keys() & classes):
            raise DataError(f"{path} has no class '{name}'.{did_you_mean(name, by_name)}")
    return [by_name[name] for name in classes if name in by_name]
