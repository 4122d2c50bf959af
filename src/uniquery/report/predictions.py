"""Predictions of many image files, written as COCO json, label maps, overlays and in formats of other tools."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from uniquery.data.images import MAX_PIXELS, SUFFIXES, read_image
from uniquery.data.panoptic_json import encode_ids
from uniquery.errors import DataError, UserError
from uniquery.evaluation.formats import to_geojson, to_labelme, to_yolo
from uniquery.evaluation.inference import Progress
from uniquery.evaluation.panoptic_files import segment_info
from uniquery.evaluation.tiles import Tiling
from uniquery.files import make_folder, write_atomically
from uniquery.model import Model
from uniquery.report.drawings import LabeledMask, label_map, labeled_masks, overlay, png_bytes
from uniquery.structures import Instances

Format = Literal["coco", "png", "overlay", "yolo", "labelme", "geojson"]
FORMATS: tuple[Format, ...] = get_args(Format)
DEFAULT_FORMATS: tuple[Format, ...] = ("coco", "png", "overlay")


def find_images(inputs: Sequence[str | Path]) -> list[Path]:
    """The image files that files, folders (with their subfolders) and glob patterns name, each once, in order.

    Raises:
        UserError: an input names no image.
    """
    images: dict[Path, None] = {}
    for given in inputs:
        files = list(_expand(given))
        if not files:
            raise UserError(f"No image at '{given}': give an image file, a folder with images or a glob pattern.")
        images.update(dict.fromkeys(files))
    return list(images)


def _expand(given: str | Path) -> Iterator[Path]:
    path = Path(given)
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    elif path.is_file():
        yield path
    else:
        matches = map(Path, glob.glob(str(given), recursive=True))  # noqa: PTH207 (Path.glob refuses absolute patterns)
        yield from sorted(p for p in matches if p.suffix.lower() in SUFFIXES)


def write_predictions(
    model: Model,
    files: Sequence[Path],
    output: Path,
    *,
    formats: Collection[Format] = DEFAULT_FORMATS,
    score_threshold: float | None = None,
    mask_threshold: float | None = None,
    short: int | None = None,
    tiling: Tiling | None = None,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> int:
    """Predicts each file and writes the results into a folder.

    Args:
        model: what predicts.
        files: image files.
        output: the folder; made if missing.
        formats: `coco` writes COCO results (results.json) with their images and categories (images.json), `png` a
            16-bit label map for each image, `overlay` each image with its instances drawn over it; `yolo`, `labelme`
            and `geojson` a file for each image into the folder labels, labelme or geojson. YOLO's data.yaml names the
            classes.
        score_threshold: as for `Model.predict`.
        mask_threshold: as for `Model.predict`.
        short: as for `Model.predict`.
        tiling: predicts files of any size tile by tile; those with too many pixels get no pictures.
        progress: called with (done, total) after each file, or each tile of the only file.
        on_unreadable: called with a sentence for each file that cannot be read, which is then left out; None raises a
            DataError instead. If no file can be read, the error of the last one is raised.
        note: called with a sentence about a file that gets no pictures.

    Returns:
        The number of instances.

    Raises:
        UserError: a file cannot be read, or the folder not written.
    """
    make_folder(output)
    names = _output_names(files)
    images: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image_id, (file, name) in enumerate(zip(files, names, strict=True), start=1):
        options: dict[str, Any] = {"score_threshold": score_threshold, "mask_threshold": mask_threshold, "short": short}
        try:
            if tiling is None:
                instances = model.predict(file, **options)
            else:
                per_tile = progress if len(files) == 1 else lambda *_: None
                instances = model.predict_tiles(file, tiling, progress=per_tile, **options)
        except DataError as error:
            if on_unreadable is None or (image_id == len(files) and not images):  # none of them can be read
                with suppress(OSError):  # it is there for more than this
                    output.rmdir()
                raise
            on_unreadable(str(error))
            progress(image_id, len(files))
            continue
        height, width = instances.size
        images.append({"id": image_id, "file_name": str(file), "width": width, "height": height})
        results += instances.to_coco(image_id)
        progress(image_id, len(files))
        if height * width <= MAX_PIXELS:
            _write_pictures(model, file, instances, output / name, formats)
        elif not {"png", "overlay"}.isdisjoint(formats):
            note(f"{file} is too large for pictures; they are left out.")
        _write_other_formats(instances, file, output, name, formats)
    if "yolo" in formats:
        content = {"train": "images", "names": dict(enumerate(model.classes))}
        write_atomically(output / "data.yaml", yaml.safe_dump(content, allow_unicode=True))
    if "coco" in formats:
        categories = [{"id": category.id, "name": category.name} for category in model.categories]
        write_atomically(output / "results.json", json.dumps(results))
        write_atomically(output / "images.json", json.dumps({"images": images, "categories": categories}))
    return len(results)


def _write_pictures(model: Model, file: Path, instances: Instances, target: Path, formats: Collection[Format]) -> None:
    """The label map and the overlay of one file; the target is their path without its ending."""
    masks = labeled_masks(instances)
    if "png" in formats:
        write_atomically(Path(f"{target}.labels.png"), png_bytes(label_map(masks, instances.size)))
    if "overlay" in formats:
        image = read_image(file, model.info.bit_depth)
        write_atomically(Path(f"{target}.overlay.png"), png_bytes(overlay(image, masks)))


def _write_other_formats(
    instances: Instances, file: Path, output: Path, name: str, formats: Collection[Format]
) -> None:
    """The files of one image in the formats of other tools."""
    if "yolo" in formats:
        write_atomically(make_folder(output / "labels") / f"{name}.txt", to_yolo(instances))
    if "labelme" in formats:
        folder = make_folder(output / "labelme")
        content = to_labelme(instances, os.path.relpath(file, folder))
        write_atomically(folder / f"{name}.json", json.dumps(content, ensure_ascii=False))
    if "geojson" in formats:
        content = to_geojson(instances)
        write_atomically(make_folder(output / "geojson") / f"{name}.geojson", json.dumps(content, ensure_ascii=False))


def write_panoptic_predictions(
    model: Model,
    files: Sequence[Path],
    output: Path,
    *,
    formats: Collection[Format] = DEFAULT_FORMATS,
    object_threshold: float | None = None,
    overlap_threshold: float | None = None,
    short: int | None = None,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] | None = None,
) -> int:
    """Predicts things and stuff of each file and writes the results into a folder.

    Args:
        model: what predicts.
        files: image files.
        output: the folder; made if missing.
        formats: `coco` writes COCO's panoptic.json, `png` its PNG files into the folder panoptic, `overlay` each image
            with its segments drawn over it.
        object_threshold: as for `Model.predict_panoptic`.
        overlap_threshold: as for `Model.predict_panoptic`.
        short: as for `Model.predict`.
        progress: called with (done, total) after each file.
        on_unreadable: as for `write_predictions`.

    Returns:
        The number of segments.

    Raises:
        UserError: the model predicts no stuff, a file cannot be read, the folder not written, or a format is for
            instances only.
    """
    if not set(formats) <= set(DEFAULT_FORMATS):
        others = ", ".join(sorted(set(formats) - set(DEFAULT_FORMATS)))
        raise UserError(f"{others} is for instances: with --panoptic there are {', '.join(DEFAULT_FORMATS)}.")
    make_folder(output)
    content: dict[str, list[dict[str, Any]]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": c.id, "name": c.name, "isthing": int(bool(c.is_thing))} for c in model.categories],
    }
    category_ids = [category.id for category in model.categories]
    for image_id, (file, name) in enumerate(zip(files, _output_names(files), strict=True), start=1):
        try:
            image = read_image(file, model.info.bit_depth)
        except DataError as error:
            if on_unreadable is None or (image_id == len(files) and not content["images"]):
                raise
            on_unreadable(str(error))
            progress(image_id, len(files))
            continue
        predicted = model.predict_panoptic(
            image, object_threshold=object_threshold, overlap_threshold=overlap_threshold, short=short
        )
        rows = predicted.to_coco(image_id, category_ids)
        segments = [segment_info(segment.id, row) for segment, row in zip(predicted.segments, rows, strict=True)]
        height, width = image.shape[:2]
        content["images"].append({"id": image_id, "file_name": str(file), "width": width, "height": height})
        entry = {"image_id": image_id, "file_name": f"{name}.png", "segments_info": segments}
        content["annotations"].append(entry)
        if "png" in formats:
            write_atomically(make_folder(output / "panoptic") / f"{name}.png", encode_ids(predicted.ids.numpy()))
        if "overlay" in formats:
            masks = [
                LabeledMask(row["segmentation"], model.classes[segment.label], segment.score)
                for segment, row in zip(predicted.segments, rows, strict=True)
            ]
            write_atomically(output / f"{name}.overlay.png", png_bytes(overlay(image, masks)))
        progress(image_id, len(files))
    if "coco" in formats:
        write_atomically(output / "panoptic.json", json.dumps(content))
    return sum(len(entry["segments_info"]) for entry in content["annotations"])


def _output_names(files: Sequence[Path]) -> list[str]:
    """A name for each file's pictures: its stem, with a number where an earlier file has the same one."""
    names: dict[str, None] = {}
    for file in files:
        name, number = file.stem, 2
        while name in names:
            name, number = f"{file.stem}-{number}", number + 1
        names[name] = None
    return list(names)
