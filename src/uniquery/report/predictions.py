"""Predictions of many image files, written as COCO json, label maps and overlays."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from uniquery.data.images import SUFFIXES, read_image
from uniquery.data.panoptic_json import encode_ids
from uniquery.errors import DataError, UserError
from uniquery.evaluation.inference import Progress
from uniquery.evaluation.panoptic_files import segment_info
from uniquery.files import make_folder, write_atomically
from uniquery.model import Model
from uniquery.report.drawings import LabeledMask, label_map, labeled_masks, overlay, png_bytes

Format = Literal["json", "png", "overlay"]
FORMATS: tuple[Format, ...] = get_args(Format)


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
    formats: Collection[Format] = FORMATS,
    score_threshold: float | None = None,
    mask_threshold: float | None = None,
    short: int | None = None,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] | None = None,
) -> int:
    """Predicts each file and writes the results into a folder.

    Args:
        model: what predicts.
        files: image files.
        output: the folder; made if missing.
        formats: `json` writes COCO results (results.json) with their images and categories (images.json), `png` a
            16-bit label map for each image, `overlay` each image with its instances drawn over it.
        score_threshold: as for `Model.predict`.
        mask_threshold: as for `Model.predict`.
        short: as for `Model.predict`.
        progress: called with (done, total) after each file.
        on_unreadable: called with a sentence for each file that cannot be read, which is then left out; None raises a
            DataError instead. If no file can be read, the error of the last one is raised.

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
        try:
            image = read_image(file)
        except DataError as error:
            if on_unreadable is None or (image_id == len(files) and not images):  # none of them can be read
                raise
            on_unreadable(str(error))
            progress(image_id, len(files))
            continue
        instances = model.predict(image, score_threshold=score_threshold, mask_threshold=mask_threshold, short=short)
        height, width = instances.size
        images.append({"id": image_id, "file_name": str(file), "width": width, "height": height})
        results += instances.to_coco(image_id)
        masks = labeled_masks(instances)
        if "png" in formats:
            write_atomically(output / f"{name}.labels.png", png_bytes(label_map(masks, instances.size)))
        if "overlay" in formats:
            write_atomically(output / f"{name}.overlay.png", png_bytes(overlay(image, masks)))
        progress(image_id, len(files))
    if "json" in formats:
        categories = [{"id": category.id, "name": category.name} for category in model.categories]
        write_atomically(output / "results.json", json.dumps(results))
        write_atomically(output / "images.json", json.dumps({"images": images, "categories": categories}))
    return len(results)


def write_panoptic_predictions(
    model: Model,
    files: Sequence[Path],
    output: Path,
    *,
    formats: Collection[Format] = FORMATS,
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
        formats: `json` writes COCO's panoptic.json, `png` its PNG files into the folder panoptic, `overlay` each image
            with its segments drawn over it.
        object_threshold: as for `Model.predict_panoptic`.
        overlap_threshold: as for `Model.predict_panoptic`.
        short: as for `Model.predict`.
        progress: called with (done, total) after each file.
        on_unreadable: as for `write_predictions`.

    Returns:
        The number of segments.

    Raises:
        UserError: the model predicts no stuff, a file cannot be read, or the folder not written.
    """
    make_folder(output)
    content: dict[str, list[dict[str, Any]]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": c.id, "name": c.name, "isthing": int(bool(c.is_thing))} for c in model.categories],
    }
    category_ids = [category.id for category in model.categories]
    for image_id, (file, name) in enumerate(zip(files, _output_names(files), strict=True), start=1):
        try:
            image = read_image(file)
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
    if "json" in formats:
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
