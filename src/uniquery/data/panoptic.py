"""COCO panoptic annotations as a data set: every segment of a thing or of stuff is an instance.

Letters: I images, S segments, K instances of one image, H × W pixels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from uniquery.data.augment import Sample, image_only
from uniquery.data.coco import CocoData, PackedStrings, count_unused, raise_fatal
from uniquery.data.coco_json import read_json
from uniquery.data.dataset import GroundTruth, Row
from uniquery.data.images import inside_root, is_file
from uniquery.data.json_values import is_id
from uniquery.data.panoptic_json import Ids, check_segments, png_folder, read_ids, segment_masks
from uniquery.errors import DataError
from uniquery.masks import rle

OTHER_CLASS = -1


class PanopticData(CocoData):
    """A COCO panoptic data set. Masks are read from the PNG files when they are needed.

    Crowd segments, void, and segments of classes that are not used are not valid. `ignore_crowd=False` takes all of
    them for background instead.

    Args:
        annotations: the json.
        images: the folder of the images.
        pngs: the folder of the PNG files; None: the path of the json without its ending.
        classes: names of the classes to use, in the order of their labels; None takes all, by id.
        allow_missing: whether `classes` may name some that the data does not have; they get no label.
        keep_empty: whether images without segments stay.
        ignore_crowd: whether `load` marks crowd segments and void as not valid.
        tables: the content of the json, if it was read before.

    Raises:
        DataError: anything that would make training go wrong, in one sentence.
    """

    def __init__(
        self,
        annotations: Path,
        images: Path,
        *,
        pngs: Path | None = None,
        classes: Sequence[str] | None = None,
        allow_missing: bool = False,
        keep_empty: bool = True,
        ignore_crowd: bool = True,
        tables: Row | None = None,
    ) -> None:
        raw = read_json(Path(annotations)) if tables is None else tables
        self.png_root = png_folder(Path(annotations), pngs)
        check = check_segments(raw, self.png_root)
        raise_fatal(check.problems, Path(annotations))
        kept = raw["images"] if keep_empty else _images_with_segments(raw, check.entries, classes)
        selected = {**raw, "images": kept, "annotations": []}
        super().__init__(
            annotations,
            images,
            classes=classes,
            allow_missing=allow_missing,
            ignore_crowd=ignore_crowd,
            tables=selected,
        )
        segments = (segment for entry in check.entries.values() for segment in entry["segments_info"])
        self.unused = count_unused(raw["categories"], segments, self.categories)
        rows = zip(self.categories, self._category_rows, strict=True)
        self.categories = [replace(category, is_thing=bool(row["isthing"])) for category, row in rows]
        self._pack_segments([check.entries[image] for image in self.image_ids.tolist()])
        self._truth: GroundTruth | None = None
        self._unreadable: list[str] = []  # about PNG files of `_truth`

    def _pack_segments(self, entries: Sequence[Row]) -> None:
        """The columns of annotations hold segments; segments of other classes too, as the PNG files have their ids."""
        labels = {category.id: label for label, category in enumerate(self.categories)}
        segments = [segment for entry in entries for segment in entry["segments_info"]]
        counts = [0, *(len(entry["segments_info"]) for entry in entries)]
        self.starts = torch.tensor(counts).cumsum(0).share_memory_()
        self.labels = torch.tensor(
            [labels.get(segment["category_id"], OTHER_CLASS) for segment in segments], dtype=torch.int64
        ).share_memory_()
        self.crowd = torch.tensor([bool(s.get("iscrowd")) for s in segments], dtype=torch.bool).share_memory_()
        self.mask_areas = (self.labels != OTHER_CLASS).long().share_memory_()  # real areas are known to the PNG files
        self.annotation_ids = torch.tensor([s["id"] for s in segments], dtype=torch.int64).share_memory_()
        self._png_names = PackedStrings([entry["file_name"] for entry in entries])

    def checksum(self) -> int:
        """As in the base; of the PNG files only the names, as reading all of them would take long."""
        is_thing = bytes(bool(category.is_thing) for category in self.categories)
        return self._png_names.checksum(zlib.crc32(is_thing, super().checksum()))

    def png_path(self, index: int) -> Path:
        """The PNG file of an image."""
        return inside_root(self.png_root, self._png_names[index])

    def check_files_exist(self) -> None:
        """Raises if an image file or a PNG file is missing, before training starts."""
        super().check_files_exist()
        missing = [index for index in range(len(self)) if not is_file(self.png_path(index))]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(self)} panoptic PNG files are missing, the first is "
                f"{self.png_path(missing[0])} (image {int(self.image_ids[missing[0]])})."
            )

    def _segments(self, index: int) -> slice:
        """Positions in the columns of an image's segments."""
        start, end = self.starts[index : index + 2].tolist()
        return slice(start, end)

    def _read_ids(self, index: int) -> Ids:
        """(H, W) segment ids, all of which the json names."""
        height, width = self.sizes[index].tolist()
        known = set(self.annotation_ids[self._segments(index)].tolist())
        return read_ids(self.png_path(index), (height, width), known, int(self.image_ids[index]))

    def _used_segments(self, index: int) -> tuple[list[int], list[int]]:
        """Ids and labels of the segments of an image that are instances."""
        numbers = self._annotation_numbers(index, crowd=False)
        return self.annotation_ids[numbers].tolist(), self.labels[numbers].tolist()

    def instances(self, index: int) -> list[tuple[int, rle.Rle]]:
        """(label, run-length mask) of the segments of an image, crowd segments and empty ones excluded."""
        numbers, labels = self._used_segments(index)
        masks = segment_masks(self._read_ids(index), numbers)
        return [(label, mask) for label, mask in zip(labels, masks, strict=True) if rle.area(mask)]

    def load(self, index: int) -> Sample:
        """An image and its segments.

        Raises:
            DataError: names the file and what is wrong with it.
        """
        image = image_only(self.read(index)).image
        numbers, labels = (torch.tensor(values, dtype=torch.int64) for values in self._used_segments(index))
        masks = torch.from_numpy(self._read_ids(index)) == numbers.int()[:, None, None]
        valid = masks.any(0)
        is_thing = torch.tensor([bool(category.is_thing) for category in self.categories])
        return Sample(
            image,
            masks.to(torch.uint8),
            labels,
            valid=None if not self.ignore_crowd or valid.all() else valid.to(torch.uint8),
            things=is_thing[labels],
        ).without_empty()

    def ground_truth(self, on_unreadable: Callable[[str], object] | None = None) -> GroundTruth:
        """The segments as COCO annotations with run lengths, read once; void is what no segment covers."""
        if self._truth is None:
            rows = zip(self.image_ids.tolist(), self.sizes.tolist(), strict=True)
            images = {number: {"id": number, "height": height, "width": width} for number, (height, width) in rows}
            categories = {row["id"]: row for row in sorted(self._category_rows, key=lambda row: row["id"])}
            annotations, unreadable = list[Row](), list[str]()
            for index in range(len(self)):
                try:
                    annotations += self._annotations(index)
                except DataError as error:
                    if on_unreadable is None:
                        raise
                    unreadable.append(str(error))
            self._unreadable = unreadable
            self._truth = GroundTruth(images, categories, annotations, str(self.annotations))
        for sentence in self._unreadable:
            if on_unreadable is None:
                raise DataError(sentence)
            on_unreadable(sentence)
        return self._truth

    def _annotations(self, index: int) -> list[Row]:
        segments = self._segments(index)
        numbers, labels, crowd = (
            column[segments].tolist() for column in (self.annotation_ids, self.labels, self.crowd)
        )
        masks = segment_masks(self._read_ids(index), numbers)
        return [
            {
                "image_id": int(self.image_ids[index]),
                "category_id": self.categories[label].id,
                "iscrowd": int(is_crowd),
                "segmentation": mask,
            }
            for label, is_crowd, mask in zip(labels, crowd, masks, strict=True)
            if label != OTHER_CLASS and rle.area(mask)
        ]


def _images_with_segments(raw: Row, entries: Mapping[int, Row], classes: Sequence[str] | None) -> list[Row]:
    """The images that have a segment of a used class that is no crowd; malformed ones stay, to be reported."""
    used = {row.get("id") for row in raw["categories"] if classes is None or row.get("name") in classes}

    def has_segment(entry: Row) -> bool:
        return any(s["category_id"] in used and not s.get("iscrowd") for s in entry["segments_info"])

    ids = [row.get("id") for row in raw["images"]]
    found = [entries.get(number) if is_id(number) else None for number in ids]
    return [row for row, entry in zip(raw["images"], found, strict=True) if entry is None or has_segment(entry)]
