"""COCO instance annotations: read once, checked whole, held in flat shared arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from uniquery import rle
from uniquery.data.images import inside_root, read_image
from uniquery.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a data set.

    Attributes:
        kind: a short name to count by.
        text: one sentence.
        fatal: whether training must not start with it.
    """

    kind: str
    text: str
    fatal: bool = True


@dataclass(frozen=True)
class Category:
    """A class: its id in the annotations and its name."""

    id: int
    name: str


def read_json(path: Path) -> dict[str, Any]:
    """The raw content of a COCO instance json, with its tables in place.

    Raises:
        DataError: the file is missing, broken, or not COCO.
    """
    try:
        raw = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"Annotation file not found: {path}.") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder: name the annotation json inside it.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is not valid json: {error}.") from None
    if not isinstance(raw, dict):
        raise DataError(f"{path} is not a COCO json: it holds a {type(raw).__name__}, not tables.")
    for table in ("images", "categories", "annotations"):
        if not isinstance(raw.get(table, []), list):
            raise DataError(f"{path}: '{table}' must be a list.")
        if any(not isinstance(row, dict) for row in raw.get(table, [])):
            raise DataError(f"{path}: every entry of '{table}' must be a table of keys and values.")
    if not raw.get("images"):
        raise DataError(f"{path} lists no images.")
    if not raw.get("categories"):
        raise DataError(f"{path} has no 'categories': list them as [{{'id': 1, 'name': 'cell'}}, …].")
    return raw


def find_problems(raw: dict[str, Any], image_root: Path, masks: dict[int, rle.Rle]) -> Iterator[Problem]:
    """Everything that is wrong with the tables themselves; files are not opened.

    Every mask has to be made to be checked: sound ones are left in `masks`, by annotation id.
    """
    yield from _category_problems(raw["categories"])
    yield from _image_problems(raw["images"], image_root)
    sizes = {i.get("id"): (i.get("height"), i.get("width")) for i in raw["images"]}
    categories = {c.get("id") for c in raw["categories"]}
    for row in raw.get("annotations", []):
        yield from _annotation_problems(row, sizes, categories, masks)


def _category_problems(rows: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    ids: set[Any] = set()
    names: set[Any] = set()
    for row in rows:
        if not _is_whole(row.get("id")) or not isinstance(row.get("name"), str):
            yield Problem("category", f"Category {row} needs a whole-number 'id' and a 'name'.")
            continue
        if row["id"] in ids:
            yield Problem("duplicate id", f"Category id {row['id']} appears twice.")
        if row["name"] in names:
            yield Problem(
                "duplicate name", f"Two categories are named '{row['name']}': classes are told apart by name."
            )
        ids.add(row["id"])
        names.add(row["name"])


def _image_problems(rows: Sequence[dict[str, Any]], image_root: Path) -> Iterator[Problem]:
    ids: set[Any] = set()
    for row in rows:
        where = f"Image {row.get('id')} ({row.get('file_name')})"
        if not _is_whole(row.get("id")) or not isinstance(row.get("file_name"), str):
            yield Problem("image entry", f"{where} needs a whole-number 'id' and a 'file_name'.")
            continue
        if row["id"] in ids:
            yield Problem("duplicate id", f"Image id {row['id']} appears twice.")
        ids.add(row["id"])
        if not all(_is_whole(row.get(side)) and row[side] > 0 for side in ("height", "width")):
            yield Problem("image entry", f"{where} needs 'width' and 'height', whole numbers above 0.")
        try:
            inside_root(image_root, row["file_name"])
        except DataError as error:
            yield Problem("file name", f"Image {row['id']}: {error}")


def _annotation_problems(
    row: dict[str, Any], sizes: dict[Any, tuple[Any, Any]], categories: set[Any], masks: dict[int, rle.Rle]
) -> Iterator[Problem]:
    where = f"Annotation {row.get('id')} (image {row.get('image_id')})"
    if not _is_whole(row.get("id")):
        yield Problem("annotation id", f"{where} needs a whole-number 'id'.")
        return
    if row["id"] in masks:
        yield Problem("duplicate id", f"Annotation id {row['id']} appears twice.")
    if not _is_whole(row.get("category_id")) or row["category_id"] not in categories:
        yield Problem(
            "unknown category", f"{where} has category {row.get('category_id')}, which is not in 'categories'."
        )
    if not _is_whole(row.get("image_id")) or row["image_id"] not in sizes:
        yield Problem("unknown image", f"{where} belongs to an image that is not in 'images'.")
        return
    height, width = sizes[row["image_id"]]
    if not (_is_whole(height) and _is_whole(width) and height > 0 and width > 0):
        return  # the image's own problem
    try:
        mask = rle.from_segmentation(row.get("segmentation"), height, width)
    except ValueError as error:
        yield Problem("segmentation", f"{where}: {error}.")
        return
    masks[row["id"]] = mask
    if rle.area(mask) == 0:
        yield Problem("empty mask", f"{where} has an empty mask; it is ignored.", fatal=False)
    yield from _extent_problems(row, height, width, where)


def _extent_problems(row: dict[str, Any], height: int, width: int, where: str) -> Iterator[Problem]:
    """Coordinates that lie outside the image; a pixel of slack, since tools round differently."""
    if isinstance(row["segmentation"], list):
        points = np.concatenate([np.asarray(polygon, dtype=np.float64) for polygon in row["segmentation"]])
        xs, ys = points[0::2], points[1::2]
        if xs.min() < -1 or ys.min() < -1 or xs.max() > width + 1 or ys.max() > height + 1:
            yield Problem("outside", f"{where} reaches outside its {width}×{height} image; it is cut.", fatal=False)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CocoData:
    """A COCO instance data set, in flat tensors that worker processes share instead of copying.

    Args:
        annotations: the json.
        images: the folder its file names are relative to.
        classes: names of the classes to use, in the order of their labels; None takes all, by id.
        keep_empty: whether images without instances stay, as negatives.

    Raises:
        DataError: anything that would make training go wrong, in one sentence.
    """

    def __init__(
        self, annotations: Path, images: Path, *, classes: Sequence[str] | None = None, keep_empty: bool = True
    ) -> None:
        self.annotations, self.image_root = Path(annotations), Path(images)
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
        if not self.image_root.is_dir():
            raise DataError(f"Image folder not found: {self.image_root}.")
        masks: dict[int, rle.Rle] = {}
        problems = list(find_problems(raw, self.image_root, masks))
        fatal = [p for p in problems if p.fatal]
        if fatal:
            more = f" ({len(fatal) - 1} more like it: uniquery data check)" if len(fatal) > 1 else ""
            raise DataError(f"{self.annotations}: {fatal[0].text}{more}")
        self.warnings = [p.text for p in problems]
        return masks

    def _pack(self, raw: dict[str, Any], masks: dict[int, rle.Rle], keep_empty: bool) -> None:
        label_of = {c.id: label for label, c in enumerate(self.categories)}
        by_image: dict[int, list[dict[str, Any]]] = {row["id"]: [] for row in raw["images"]}
        for row in raw["annotations"]:
            if row["category_id"] in label_of:
                by_image[row["image_id"]].append(row)
        rows = [i for i in raw["images"] if keep_empty or any(not a.get("iscrowd") for a in by_image[i["id"]])]
        annotations = [a for i in rows for a in by_image[i["id"]]]
        counts = [len(by_image[i["id"]]) for i in rows]
        self.image_ids = _shared([i["id"] for i in rows])
        self.sizes = _shared([[i["height"], i["width"]] for i in rows]).view(-1, 2)
        self.starts = _shared(np.cumsum([0, *counts]))
        self.labels = _shared([label_of[a["category_id"]] for a in annotations])
        self.crowd = _shared([bool(a.get("iscrowd")) for a in annotations]).bool()
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

    def rles(self, index: int) -> list[tuple[int, rle.Rle]]:
        """(label, run lengths) of the non-crowd instances of an image."""
        size = self.sizes[index].tolist()
        span = range(int(self.starts[index]), int(self.starts[index + 1]))
        return [(int(self.labels[a]), {"size": size, "counts": self._masks[a]}) for a in span if not self.crowd[a]]

    def load(self, index: int) -> tuple[npt.NDArray[np.uint8], Tensor, Tensor]:
        """An image (H, W, 3), its instances' masks (K, H, W) uint8 and labels (K,); crowd and empty ones left out.

        Raises:
            DataError: naming the file and its first annotation.
        """
        image = self.read(index)
        pairs = self.rles(index)
        masks = [torch.from_numpy(rle.decode(mask)) for _, mask in pairs]
        kept = [i for i, mask in enumerate(masks) if bool(mask.any())]
        height, width = image.shape[:2]
        stacked = torch.stack([masks[i] for i in kept]) if kept else torch.zeros(0, height, width, dtype=torch.uint8)
        return image, stacked, torch.tensor([pairs[i][0] for i in kept], dtype=torch.int64)

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
        missing = [i for i in range(len(self)) if not self.path(i).is_file()]
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


def _shared(values: Any) -> Tensor:
    tensor: Tensor = torch.as_tensor(np.asarray(values, dtype=np.int64)).share_memory_()
    return tensor


def _chosen_categories(rows: Sequence[dict[str, Any]], classes: Sequence[str] | None, path: Path) -> list[Category]:
    by_name = {row["name"]: Category(row["id"], row["name"]) for row in rows}
    if classes is None:
        return sorted(by_name.values(), key=lambda c: c.id)
    for name in classes:
        if name not in by_name:
            raise DataError(f"{path} has no class '{name}'.{did_you_mean(name, by_name)}")
    return [by_name[name] for name in classes]
