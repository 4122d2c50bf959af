"""Label Studio's json: polygons and brush strokes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from uniquery.data.images import SUFFIXES, inside_root, is_file
from uniquery.data.importing.brush_rle import decode_brush
from uniquery.data.importing.imported import NO_SPLIT, Imported, ImportedImage, ImportLog, Segmentation, check_classes
from uniquery.data.json_values import is_finite_number, parse_json, shorten
from uniquery.errors import DataError
from uniquery.masks import rle

_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{8}-")  # Label Studio puts it before the name of an uploaded file
_SHAPES = {"polygon": "polygon", "polygonlabels": "polygon", "brush": "brush", "brushlabels": "brush"}


def read_label_studio(sources: Sequence[Path], log: ImportLog) -> Imported:
    """Reads an export in the format JSON.

    Args:
        sources: the json, and the folder of the images, which are found by name, also in its subfolders.
        log: notes what is dropped.

    Raises:
        DataError: the json is not such an export, or labels nothing.
    """
    file, root = sources
    tasks = parse_json(file)
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise DataError(f"{file} is not an export of Label Studio: it is not a list of tasks.")
    if tasks and not any(isinstance(task.get("annotations"), list) for task in tasks):
        raise DataError(f"{file} has no 'annotations': export it from Label Studio as JSON, not as JSON-MIN or CSV.")
    if not root.is_dir():
        raise DataError(f"Image folder not found: {root}.")
    names, images, classes = _files_by_name(root), list[ImportedImage](), dict[str, None]()
    for done, task in enumerate(tasks, start=1):
        image = _read_task(task, root, names, f"{file}, task {shorten(task.get('id', done))}", log)
        if image is not None:
            images.append(image)
            classes.update(dict.fromkeys(one.class_name for one in image.objects))
        log.progress(done, len(tasks))
    if not classes:
        return Imported((), {NO_SPLIT: images})
    return Imported(check_classes(sorted(classes), file), {NO_SPLIT: images})


def _files_by_name(root: Path) -> dict[str, list[Path]]:
    names: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() in SUFFIXES:
            names.setdefault(path.name, []).append(path)
    return names


def _read_task(
    task: Mapping[str, Any], root: Path, names: Mapping[str, list[Path]], where: str, log: ImportLog
) -> ImportedImage | None:
    file = _image_file(task, root, names, where, log)
    image = log.open_image(file) if file is not None else None
    if image is None:
        return None
    annotations = task.get("annotations")
    done = [a for a in annotations if isinstance(a, dict)] if isinstance(annotations, list) else []
    kept = [a for a in done if not a.get("was_cancelled")]
    if not kept:
        log.drop("task without an annotation, or skipped by its annotator", where)
        return None
    for other in kept[1:]:
        log.drop("further annotation of the same image; the first is taken", f"{where}, annotation {other.get('id')}")
    results = kept[0].get("result")
    regions = [r for r in results if isinstance(r, dict)] if isinstance(results, list) else []
    labels = _labels_by_region(regions)
    for number, region in enumerate(regions):
        _add_region(image, region, labels, f"{where}, region {shorten(region.get('id', number))}", log)
    return image


def _image_file(
    task: Mapping[str, Any], root: Path, names: Mapping[str, list[Path]], where: str, log: ImportLog
) -> Path | None:
    """The file of a task: by the path in its url if there is such a file, else by its name."""
    data = task.get("data")
    texts = [t for t in data.values() if isinstance(t, str)] if isinstance(data, dict) else []
    for text in texts:
        url = unquote(text.rpartition("?d=")[2] if "?d=" in text else text.partition("?")[0])
        name = url.replace("\\", "/").rpartition("/")[2]
        if Path(name).suffix.lower() not in SUFFIXES:
            continue
        relative = url.rpartition("://")[2].lstrip("/")
        if ".." not in Path(relative).parts and is_file(inside_root(root, relative)):
            return root / relative
        found = names.get(name) or names.get(_UPLOAD_PREFIX.sub("", name), [])
        if len(found) > 1:
            log.drop("image whose name several files have", f"{where}: {found[0]} and {found[1]}")
        elif not found:
            log.drop("image file that is missing", f"{where}: {shorten(name)} in {root}")
        return found[0] if len(found) == 1 else None
    log.drop("task without the name of an image", where)
    return None


def _labels_by_region(regions: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """The label of each region; a region and its label may be two results with the same id."""
    labels: dict[Any, str] = {}
    for region in regions:
        kind, value = region.get("type"), region.get("value")
        given = value.get(kind) if isinstance(value, dict) and isinstance(kind, str) else None
        if isinstance(kind, str) and kind.endswith("labels") and isinstance(given, list) and given:
            labels.setdefault(_key(region), str(given[0]))
    return labels


def _key(region: Mapping[str, Any]) -> str:
    """What ties results of one region together."""
    return str(region.get("id", id(region)))


def _add_region(
    image: ImportedImage, region: Mapping[str, Any], labels: Mapping[Any, str], where: str, log: ImportLog
) -> None:
    kind, label = region.get("type"), labels.get(_key(region))
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    if shape is None:
        if kind != "labels":  # the label of another region
            log.drop(f"result of type {shorten(kind)}, which has no outline", where)
        return
    if label is None:
        log.drop("region without a label", where)
        return
    try:
        _check_size(region, image)
        segmentation = _polygon(region, image) if shape == "polygon" else _brush(region, image)
    except ValueError as error:
        log.drop(f"{shape} that is not valid: {error}", where)
        return
    log.add_object(image, label, segmentation, where)


def _check_size(region: Mapping[str, Any], image: ImportedImage) -> None:
    given = region.get("original_width"), region.get("original_height")
    if given != (image.width, image.height):
        raise ValueError(f"it is for {given[0]}×{given[1]} pixels, but the image is {image.width}×{image.height}")
    if region.get("image_rotation"):
        raise ValueError("the image was rotated in Label Studio")


def _polygon(region: Mapping[str, Any], image: ImportedImage) -> Segmentation:
    points = region["value"].get("points") if isinstance(region.get("value"), dict) else None
    if not isinstance(points, list) or not all(
        isinstance(p, list) and len(p) == 2 and all(map(is_finite_number, p)) for p in points
    ):
        raise ValueError("its points are not pairs of numbers")
    return [[value for x, y in points for value in (round(x * image.width / 100, 6), round(y * image.height / 100, 6))]]


def _brush(region: Mapping[str, Any], image: ImportedImage) -> Segmentation:
    codes = region["value"].get("rle") if isinstance(region.get("value"), dict) else None
    if not isinstance(codes, list):
        raise ValueError("it has no rle")
    return rle.encode(decode_brush(codes, image.height, image.width))
