"""COCO ground truth and results from anywhere: read, checked, and converted to the one form that the metrics take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from uniquery.data.dataset import GroundTruth, Row
from uniquery.data.json_values import is_id, parse_json, read_box, read_mask, read_number
from uniquery.errors import DataError
from uniquery.masks import rle

IouType = Literal["segm", "bbox"]
AnyGroundTruth = GroundTruth | Mapping[str, Any] | Path | str
"""What a data set holds, a COCO dictionary, or its file."""

_MALFORMED = (ValueError, TypeError, OverflowError)  # what unpacking an arbitrary json value can raise


def read_ground_truth(truth: AnyGroundTruth) -> GroundTruth:
    """Ground truth in any form.

    Raises:
        DataError: it cannot be read, a table is missing, or an id appears twice.
    """
    if isinstance(truth, GroundTruth):
        return truth
    source = "the ground truth" if isinstance(truth, Mapping) else str(truth)
    content = truth if isinstance(truth, Mapping) else parse_json(Path(truth))
    names = ("images", "categories", "annotations")
    if not isinstance(content, Mapping) or any(not isinstance(content.get(name), list) for name in names):
        raise DataError(f"{source} is not COCO ground truth: it needs the lists images, categories and annotations.")
    images = _by_id(content["images"], "image", source)
    categories = _by_id(content["categories"], "category", source)
    return GroundTruth(images, dict(sorted(categories.items())), content["annotations"], source)


def load_results(path: Path | str, truth: AnyGroundTruth, *, iou_type: IouType = "segm") -> list[Row]:
    """The detections of a COCO results file, each checked against the ground truth.

    What the metric measures is converted to one form: a segmentation becomes compressed run lengths, a box four floats,
    taken from the mask where the entry has none. All other fields stay as they are.

    Raises:
        DataError: names the file, the first bad entry and what is wrong with it.
    """
    entries = read_results(path)
    detections = check_results(entries, read_ground_truth(truth), iou_type, source=str(path))
    return [{**entry, **detection} for entry, detection in zip(entries, detections, strict=True)]


def read_results(path: Path | str) -> list[Row]:
    """The list in a COCO results file, its entries unchecked."""
    entries = parse_json(Path(path))
    if not isinstance(entries, list):
        raise DataError(f"{path} holds {_kind(entries)}, but COCO results are a list of detections.")
    return entries


def check_results(entries: Sequence[Any], truth: GroundTruth, iou_type: IouType, source: str) -> Iterator[Row]:
    """For each entry its image, category, score, and compressed mask or box.

    Raises:
        DataError: names the source, the entry's index and what is wrong with it.
    """
    for index, entry in enumerate(entries):
        try:
            yield _detection(entry, truth, iou_type)
        except _MALFORMED as error:
            raise DataError(f"{source}, entry {index}{_of_image(entry)}: {error}.") from error


def check_annotations(truth: GroundTruth, iou_type: IouType, image_ids: Collection[int]) -> Iterator[Row]:
    """For each annotation of these images its image, category, iscrowd, area, and compressed mask or box.

    Raises:
        DataError: names the source, the annotation's id and what is wrong with it.
    """
    for index, annotation in enumerate(truth.annotations):
        try:
            image = _owner(annotation, "image", truth.images)
            if image["id"] in image_ids:
                yield _object(annotation, image, truth, iou_type)
        except _MALFORMED as error:
            name = annotation.get("id", f"number {index}") if isinstance(annotation, dict) else f"number {index}"
            raise DataError(f"{truth.source}, annotation {name}{_of_image(annotation)}: {error}.") from error


def _detection(entry: Any, truth: GroundTruth, iou_type: IouType) -> Row:
    image, category = _owner(entry, "image", truth.images), _owner(entry, "category", truth.categories)
    if "score" not in entry:
        raise ValueError("it has no 'score'")
    score = read_number(entry["score"], "its score")
    return {"image_id": image["id"], "category_id": category["id"], "score": score, **_shape(entry, image, iou_type)}


def _object(annotation: Row, image: Row, truth: GroundTruth, iou_type: IouType) -> Row:
    category = _owner(annotation, "category", truth.categories)
    shape = _shape(annotation, image, iou_type)
    if annotation.get("area") is not None:
        area = read_number(annotation["area"], "its area")
    elif iou_type == "bbox" and annotation.get("segmentation"):
        area = area_of(_shape(annotation, image, "segm"))  # COCO's area is the mask's for both metrics
    else:
        area = area_of(shape)
    crowd = int(bool(annotation.get("iscrowd", 0)))
    return {"image_id": image["id"], "category_id": category["id"], "iscrowd": crowd, "area": area, **shape}


def area_of(shape: Row) -> float:
    """The area of the mask, else of the box.

    >>> area_of({"bbox": [3.0, 1.0, 4.0, 2.5]})
    10.0
    """
    if "segmentation" in shape:
        return float(rle.area(shape["segmentation"]))
    return float(shape["bbox"][2] * shape["bbox"][3])


def _shape(entry: Row, image: Row, iou_type: IouType) -> Row:
    """The entry's mask or its box, whichever is measured."""
    box, segmentation = entry.get("bbox"), entry.get("segmentation")
    if iou_type == "bbox" and box not in (None, []):
        return {"bbox": read_box(box)}
    if segmentation is None:
        needed = "no 'segmentation', which mask AP needs" if iou_type == "segm" else "neither 'bbox' nor 'segmentation'"
        raise ValueError(f"it has {needed}")
    mask = _mask(segmentation, image)
    return {"segmentation": mask} if iou_type == "segm" else {"bbox": list(rle.bounding_box(mask))}


def _mask(segmentation: Any, image: Row) -> rle.Rle:
    height, width = image.get("height"), image.get("width")
    if not is_id(height) or not is_id(width) or min(height, width) < 1:
        raise ValueError("its image has no valid height and width in the ground truth")
    return read_mask(segmentation, height, width)


def _owner(entry: Any, kind: Literal["image", "category"], rows: Mapping[Any, Row]) -> Row:
    """The image or the category that an entry names."""
    if not isinstance(entry, dict):
        raise ValueError(f"it is {_kind(entry)} instead of an object")
    if f"{kind}_id" not in entry:
        raise ValueError(f"it has no '{kind}_id'")
    identity = entry[f"{kind}_id"]
    if isinstance(identity, Real) and identity in rows:
        return rows[identity]
    raise ValueError(f"its {kind} id {identity!r} is not in the ground truth{_hint(identity, kind, rows)}")


def _hint(identity: Any, kind: str, rows: Mapping[Any, Row]) -> str:
    if not isinstance(identity, Real):
        return " (an id is a whole number)"
    if kind == "image":
        return " (perhaps the two belong to different data sets)"
    ids = f"has the ids {min(rows)} to {max(rows)}" if rows else "has no category"
    return f", which {ids} (perhaps a class index was written instead of the id)"


def _by_id(rows: Sequence[Any], table: str, source: str) -> dict[int, Row]:
    by_id: dict[int, Row] = {}
    for index, row in enumerate(rows):
        identity = row.get("id") if isinstance(row, dict) else None
        if not is_id(identity):
            raise DataError(f"{source}: {table} number {index} has no 'id' that is a whole number.")
        if identity in by_id:
            raise DataError(f"{source}: the {table} id {identity} appears twice; each needs its own.")
        by_id[identity] = row
    return by_id


def _of_image(entry: Any) -> str:
    return f" (image {entry['image_id']!r})" if isinstance(entry, dict) and "image_id" in entry else ""


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(type(value), "a single value")
