"""COCO ground truth and results from anywhere: read, checked, and brought to the one form that the metrics take."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from hotcoco import mask as coco_mask

from uniquery.errors import DataError
from uniquery.masks import rle

Entry = dict[str, Any]
IouType = Literal["segm", "bbox"]

_MALFORMED = (ValueError, TypeError, OverflowError)  # what unpacking an arbitrary json value can raise


@dataclass(frozen=True)
class Truth:
    """Ground truth with its images and categories by id.

    Attributes:
        images: the json's images by id.
        categories: the json's categories by id, in the order of the ids.
        annotations: the json's annotations.
        source: how an error names the ground truth.
    """

    images: dict[int, Entry]
    categories: dict[int, Entry]
    annotations: Sequence[Entry]
    source: str


def read_truth(truth: Mapping[str, Any] | Path | str) -> Truth:
    """Ground truth from a COCO dictionary or its file.

    Raises:
        DataError: it cannot be read, lacks a part, or uses an id twice.
    """
    source = "the ground truth" if isinstance(truth, Mapping) else str(truth)
    content = truth if isinstance(truth, Mapping) else _read_json(Path(truth))
    names = ("images", "categories", "annotations")
    if not isinstance(content, Mapping) or any(not isinstance(content.get(name), list) for name in names):
        raise DataError(f"{source} is not COCO ground truth: it needs the lists images, categories and annotations.")
    images = _by_id(content["images"], "image", source)
    categories = _by_id(content["categories"], "category", source)
    return Truth(images, dict(sorted(categories.items())), content["annotations"], source)


def load_results(path: Path | str, truth: Mapping[str, Any] | Path | str, *, iou_type: IouType = "segm") -> list[Entry]:
    """The detections of a COCO results file, each checked against the ground truth.

    What the metric measures is brought to one form: a segmentation becomes compressed run lengths, a box four floats,
    taken from the mask where the entry has none. All other fields stay as they are.

    Raises:
        DataError: naming the file, the first bad entry and what is wrong with it.
    """
    known, entries = read_truth(truth), read_results(path)
    checked = check_results(entries, known, iou_type, source=str(path))
    return [{**entry, **core} for entry, core in zip(entries, checked, strict=True)]


def read_results(path: Path | str) -> list[Entry]:
    """The list in a COCO results file, its entries unchecked."""
    entries = _read_json(Path(path))
    if not isinstance(entries, list):
        raise DataError(f"{path} holds {_kind(entries)}, but COCO results are a list of detections.")
    return entries


def check_results(entries: Sequence[Any], truth: Truth, iou_type: IouType, source: str) -> Iterator[Entry]:
    """For each entry its image, category, score, and compressed mask or box.

    Raises:
        DataError: naming the source, the entry's index and what is wrong with it.
    """
    for index, entry in enumerate(entries):
        try:
            yield _detection(entry, truth, iou_type)
        except _MALFORMED as error:
            raise DataError(f"{source}, entry {index}{_of_image(entry)}: {error}.") from error


def check_annotations(truth: Truth, iou_type: IouType, image_ids: Collection[int]) -> Iterator[Entry]:
    """For each annotation of these images its image, category, iscrowd, area, and compressed mask or box.

    Raises:
        DataError: naming the source, the annotation's id and what is wrong with it.
    """
    for index, annotation in enumerate(truth.annotations):
        try:
            image = _owner(annotation, "image", truth.images)
            if image["id"] in image_ids:
                yield _object(annotation, image, truth, iou_type)
        except _MALFORMED as error:
            name = annotation.get("id", f"number {index}") if isinstance(annotation, dict) else f"number {index}"
            raise DataError(f"{truth.source}, annotation {name}{_of_image(annotation)}: {error}.") from error


def _detection(entry: Any, truth: Truth, iou_type: IouType) -> Entry:
    image, category = _owner(entry, "image", truth.images), _owner(entry, "category", truth.categories)
    if "score" not in entry:
        raise ValueError("it has no 'score'")
    score = _number(entry["score"], "its score")
    return {"image_id": image["id"], "category_id": category["id"], "score": score, **_shape(entry, image, iou_type)}


def _object(annotation: Entry, image: Entry, truth: Truth, iou_type: IouType) -> Entry:
    category = _owner(annotation, "category", truth.categories)
    shape = _shape(annotation, image, iou_type)
    if annotation.get("area") is not None:
        area = _number(annotation["area"], "its area")
    elif iou_type == "bbox" and annotation.get("segmentation"):
        area = area_of(_shape(annotation, image, "segm"))  # COCO's area is the mask's for both metrics
    else:
        area = area_of(shape)
    crowd = int(bool(annotation.get("iscrowd", 0)))
    return {"image_id": image["id"], "category_id": category["id"], "iscrowd": crowd, "area": area, **shape}


def area_of(shape: Entry) -> float:
    """The area of the mask, else of the box.

    >>> area_of({"bbox": [3.0, 1.0, 4.0, 2.5]})
    10.0
    """
    if "segmentation" in shape:
        return float(rle.area(shape["segmentation"]))
    return float(shape["bbox"][2] * shape["bbox"][3])


def _shape(entry: Entry, image: Entry, iou_type: IouType) -> Entry:
    """The entry's mask or its box, whichever is measured."""
    box, segmentation = entry.get("bbox"), entry.get("segmentation")
    if iou_type == "bbox" and box not in (None, []):
        return {"bbox": _box(box)}
    if segmentation is None:
        needed = "no 'segmentation', which mask AP needs" if iou_type == "segm" else "neither 'bbox' nor 'segmentation'"
        raise ValueError(f"it has {needed}")
    mask = _mask(segmentation, image)
    return {"segmentation": mask} if iou_type == "segm" else {"bbox": list(rle.bounding_box(mask))}


def _mask(segmentation: Any, image: Entry) -> rle.Rle:
    height, width = image.get("height"), image.get("width")
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        raise ValueError("the ground truth does not say its image's height and width")
    if _is_sound(segmentation, height, width):
        return segmentation  # type: ignore[no-any-return]
    return rle.from_segmentation(segmentation, height, width)


def _is_sound(segmentation: Any, height: int, width: int) -> bool:
    """Whether these are compressed run lengths, as text, that fill the image.

    Crossed with the full mask, such run lengths come back as they were. That takes a few microseconds, and spares all
    but odd masks `rle.from_segmentation`, which takes a hundred.
    """
    if not isinstance(segmentation, dict) or segmentation.get("size") != [height, width]:
        return False
    full = {"size": [height, width], "counts": [0, height * width]}
    try:
        crossed = coco_mask.merge([segmentation, full], intersect=True)
    except _MALFORMED:
        return False
    return bool(crossed["counts"].decode() == segmentation["counts"])


def _box(box: Any) -> list[float]:
    if not isinstance(box, list | tuple) or len(box) != 4:
        raise ValueError("its bbox is not [x, y, width, height]")
    x, y, width, height = (_number(value, "a number of its bbox") for value in box)
    if min(width, height) < 0:
        raise ValueError(f"its bbox has a negative width or height ({width:g} × {height:g})")
    return [x, y, width, height]


def _owner(entry: Any, kind: Literal["image", "category"], known: Mapping[Any, Entry]) -> Entry:
    """The image or the category that an entry names."""
    if not isinstance(entry, dict):
        raise ValueError(f"it is {_kind(entry)} instead of an object")
    if f"{kind}_id" not in entry:
        raise ValueError(f"it has no '{kind}_id'")
    identity = entry[f"{kind}_id"]
    if isinstance(identity, Real) and identity in known:
        return known[identity]
    raise ValueError(f"its {kind} id {identity!r} is not in the ground truth{_hint(identity, kind, known)}")


def _hint(identity: Any, kind: str, known: Mapping[Any, Entry]) -> str:
    if not isinstance(identity, Real):
        return " (an id is a whole number)"
    if kind == "image":
        return " (perhaps the two belong to different data sets)"
    span = f"has the ids {min(known)} to {max(known)}" if known else "has no category"
    return f", which {span} (perhaps a class index was written instead of the id)"


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r} instead of a finite number")
    return float(value)


def _by_id(items: Sequence[Any], kind: str, source: str) -> dict[int, Entry]:
    found: dict[int, Entry] = {}
    for index, item in enumerate(items):
        identity = item.get("id") if isinstance(item, dict) else None
        if isinstance(identity, bool) or not isinstance(identity, int):
            raise DataError(f"{source}: {kind} number {index} has no 'id' that is a whole number.")
        if identity in found:
            raise DataError(f"{source}: the {kind} id {identity} is there twice; give each its own.")
        found[identity] = item
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid json: {error}.") from error


def _of_image(entry: Any) -> str:
    return f" (image {entry['image_id']!r})" if isinstance(entry, dict) and "image_id" in entry else ""


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(type(value), "a single value")
