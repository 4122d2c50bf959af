"""Writes imported data as a folder of COCO json and images."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uniquery.data.importing.imported import NO_SPLIT, Imported, ImportedImage
from uniquery.errors import UserError
from uniquery.files import make_folder, replace_folder
from uniquery.masks import rle


def write_coco_folder(imported: Imported, output: Path) -> None:
    """Writes `annotations.json` and `images/`.

    Of each split it writes `annotations/instances_<split>.json` and `images/<split>/` instead. Images
    are hard links where the disk allows it, else copies. If anything fails, nothing is left.

    Raises:
        UserError: the folder exists and is not empty, or cannot be written.
    """
    check_is_free(output)
    make_folder(output.absolute().parent)
    if output.is_dir():
        output.rmdir()
    with replace_folder(output) as folder:
        for split, images in imported.splits.items():
            names = _relative_names([image.file for image in images])
            for image, name in zip(images, names, strict=True):
                _link(image.file, folder / "images" / split / name)
            file = folder / "annotations.json"
            if split != NO_SPLIT:
                file = make_folder(folder / "annotations") / f"instances_{split}.json"
            file.write_text(json.dumps(_tables(imported.classes, images, names)))


def check_is_free(output: Path) -> None:
    """Raises unless a folder may be written: an import never replaces files."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not an empty folder: choose another --output.")


def _relative_names(files: Sequence[Path]) -> list[str]:
    """The names of files below their common folder."""
    absolute = [file.absolute() for file in files]
    common = os.path.commonpath([file.parent for file in absolute]) if files else ""
    return [file.relative_to(common).as_posix() for file in absolute]


def _link(source: Path, target: Path) -> None:
    make_folder(target.parent)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def _tables(classes: Sequence[str], images: Sequence[ImportedImage], names: Sequence[str]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(classes, start=1)}
    tables: dict[str, list[dict[str, Any]]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": number, "name": name} for name, number in numbers.items()],
    }
    for image_id, (image, name) in enumerate(zip(images, names, strict=True), start=1):
        tables["images"].append({"id": image_id, "file_name": name, "width": image.width, "height": image.height})
        for one in image.objects:
            tables["annotations"].append(
                {
                    "id": len(tables["annotations"]) + 1,
                    "image_id": image_id,
                    "category_id": numbers[one.class_name],
                    "segmentation": one.segmentation,
                    "area": rle.area(one.mask),
                    "bbox": list(rle.bounding_box(one.mask)),
                    "iscrowd": 0,
                }
            )
    return tables
