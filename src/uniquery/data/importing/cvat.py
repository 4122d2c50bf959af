"""CVAT's xml for images, version 1.1: polygons and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from uniquery.data.images import find_image_root, inside_root, is_file
from uniquery.data.importing.imported import NO_SPLIT, Imported, ImportedImage, ImportLog, Segmentation, check_classes
from uniquery.errors import DataError
from uniquery.masks import rle

SHAPES = ("polygon", "mask")
OTHER_SHAPES = ("box", "polyline", "points", "cuboid", "ellipse", "skeleton")
_SUBSETS = {"train": "train", "training": "train", "val": "val", "validation": "val", "test": "test"}


def read_cvat(sources: Sequence[Path], log: ImportLog) -> Imported:
    """Reads an annotations.xml; shapes of one group and label are one instance.

    Args:
        sources: the xml; then the folder that its image names are relative to, by default `images` beside it.
        log: notes what is dropped.

    Raises:
        DataError: the file is not CVAT's xml for images, or has a document type.
    """
    file = sources[0]
    root = sources[1] if len(sources) > 1 else file.parent / "images"
    if not root.is_dir():
        raise DataError(f"Image folder not found: {root}. Give it after the xml.")
    document = _parse(file)
    used = [shape["label"] for image in document.images for shape in image.shapes if shape.get("label")]
    classes = check_classes(dict.fromkeys([*document.labels, *used]), file)
    subsets = [_SUBSETS.get(image.fields.get("subset", "").lower()) for image in document.images]
    is_split = "train" in subsets and None not in subsets
    splits: dict[str, list[ImportedImage]] = {}
    for done, (entry, subset) in enumerate(zip(document.images, subsets, strict=True), start=1):
        image = _open_image(entry, root, log)
        if image is not None:
            _add_shapes(image, entry, file, log)
            splits.setdefault((is_split and subset) or NO_SPLIT, []).append(image)
        log.progress(done, len(document.images))
    return Imported(classes, splits)


@dataclass
class _Image:
    """An `image` element: its attributes, and those of its shapes with the tag as 'tag' and the line as 'line'."""

    fields: dict[str, str]
    shapes: list[dict[str, Any]] = field(default_factory=list)


class _Document:
    """Collects images and labels while the xml is parsed."""

    def __init__(self) -> None:
        self.images: list[_Image] = []
        self.labels: list[str] = []
        self._path: list[str] = []
        self._text = ""

    def start(self, tag: str, fields: dict[str, str], line: int) -> None:
        if not self._path and tag != "annotations":
            raise ValueError("its root is not <annotations>")
        if tag == "track":
            raise ValueError("it is of a video: export it from CVAT as 'CVAT for images 1.1'")
        if tag == "image":
            self.images.append(_Image(fields))
        elif self._path[-1:] == ["image"] and tag in (*SHAPES, *OTHER_SHAPES):
            self.images[-1].shapes.append({**fields, "tag": tag, "line": line})
        self._path.append(tag)
        self._text = ""

    def text(self, text: str) -> None:
        if self._path[-1] == "name":
            self._text += text

    def end(self, _: str) -> None:
        if self._path[-3:] == ["labels", "label", "name"]:
            self.labels.append(self._text.strip())
        self._path.pop()
        self._text = ""


def _parse(file: Path) -> _Document:
    parser, document = expat.ParserCreate(), _Document()

    def refuse_document_type(*_: Any) -> None:
        raise ValueError("it has a document type (<!DOCTYPE …>), which CVAT does not write and which is refused")

    parser.StartDoctypeDeclHandler = refuse_document_type
    parser.StartElementHandler = lambda tag, fields: document.start(tag, fields, parser.CurrentLineNumber)
    parser.EndElementHandler = document.end
    parser.CharacterDataHandler = document.text
    try:
        with file.open("rb") as stream:
            parser.ParseFile(stream)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    except (expat.ExpatError, LookupError) as error:  # the latter: an unknown encoding
        raise DataError(f"{file} is not valid xml: {error}.") from None
    except ValueError as error:
        raise DataError(f"{file} is not taken: {error}.") from None
    if not document.images:
        raise DataError(f"{file} lists no images: export it from CVAT as 'CVAT for images 1.1'.")
    return document


def _open_image(entry: _Image, root: Path, log: ImportLog) -> ImportedImage | None:
    name = entry.fields.get("name", "")
    path = inside_root(root, name)
    if not is_file(path):
        near = find_image_root(root, name)
        if near is None or not near.is_relative_to(root):
            log.drop("image file that is missing", path)
            return None
        path = inside_root(near, name)
    try:
        given = int(entry.fields["height"]), int(entry.fields["width"])
    except (KeyError, ValueError):
        given = None
    return log.open_image(path, given)


def _add_shapes(image: ImportedImage, entry: _Image, file: Path, log: ImportLog) -> None:
    """Adds the polygons and masks of an image; those of one group and label together."""
    groups: dict[tuple[str, str], list[tuple[str, Segmentation]]] = {}
    for number, shape in enumerate(entry.shapes):
        where, label = f"{file}, line {shape['line']}", shape.get("label", "")
        if shape["tag"] not in SHAPES:
            log.drop(f"{shape['tag']}, which has no outline", where)
            continue
        try:
            segmentation = _polygon(shape) if shape["tag"] == "polygon" else _mask(shape, image)
        except (KeyError, ValueError, OverflowError) as error:
            reason = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else error
            log.drop(f"{shape['tag']} that is not valid: {reason}", where)
            continue
        group = shape.get("group_id", "0")
        key = (label, group if group not in ("", "0") else f"shape {number}")
        groups.setdefault(key, []).append((where, segmentation))
    for (label, _), parts in groups.items():
        if not label:
            log.drop("shape without a label", parts[0][0])
            continue
        log.add_object(image, label, _merge([part for _, part in parts], image), parts[0][0])


def _merge(parts: Sequence[Segmentation], image: ImportedImage) -> Segmentation:
    """Several polygons stay polygons; as soon as there is a mask, all become one mask."""
    if len(parts) == 1:
        return parts[0]
    outlines = [polygon for part in parts if isinstance(part, list) for polygon in part]
    if not any(isinstance(part, dict) for part in parts):
        return outlines
    try:
        masks = [rle.decode(rle.from_segmentation(part, image.height, image.width)) for part in parts]
    except ValueError:  # a polygon with too few points: `add_object` says it
        return outlines
    return rle.encode(np.any(masks, axis=0))


def _polygon(shape: dict[str, Any]) -> Segmentation:
    points = [[float(value) for value in point.split(",")] for point in shape["points"].split(";")]
    if any(len(point) != 2 for point in points):
        raise ValueError("its points are not x,y;x,y;…")
    return [[value for point in points for value in point]]


def _mask(shape: dict[str, Any], image: ImportedImage) -> Segmentation:
    """The runs of a mask: of zeros and ones in turn, row by row inside its box."""
    left, top, width, height = (int(shape[key]) for key in ("left", "top", "width", "height"))
    if min(left, top) < 0 or min(width, height) < 1 or left + width > image.width or top + height > image.height:
        raise ValueError("its box leaves the image")
    runs = [int(run) for run in shape["rle"].split(",")]
    if min(runs) < 0 or sum(runs) > width * height:
        raise ValueError("its runs are negative, or more than the pixels of its box")
    box = np.zeros(width * height, np.uint8)
    box[: sum(runs)] = np.repeat(np.arange(len(runs)) % 2, runs)
    bitmap = np.zeros((image.height, image.width), np.uint8)
    bitmap[top : top + height, left : left + width] = box.reshape(height, width)
    return rle.encode(bitmap)
