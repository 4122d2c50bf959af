"""Masks as image files: one file of instance ids per image, or one file per instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from uniquery.data.images import SUFFIXES, opened
from uniquery.data.importing.imported import NO_SPLIT, Imported, ImportedImage, ImportLog
from uniquery.errors import DataError
from uniquery.masks import rle

DEFAULT_CLASS = "object"
MASK_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".gif")  # JPEG changes values


def read_mask_files(sources: Sequence[Path], log: ImportLog, class_name: str = DEFAULT_CLASS) -> Imported:
    """Reads images and their masks, all of one class.

    Args:
        sources: the folder of the images and that of the masks, where `a/b.jpg` has the file `a/b.png` of instance
            ids, or the folder `a/b` with a file per instance. Or one folder, in which each image has a folder of its
            own, with `images/` and `masks/`, as in the Data Science Bowl 2018.
        log: notes what is dropped.
        class_name: the class of all instances.

    Raises:
        DataError: there is no image, or no mask of any image.
    """
    pairs = _pairs(*sources) if len(sources) == 2 else _folder_per_image(sources[0])
    images: list[ImportedImage] = []
    for done, (file, masks) in enumerate(pairs, start=1):
        image = log.open_image(file)
        if image is not None:
            _read_masks(image, masks, class_name, log)
            images.append(image)
        log.progress(done, len(pairs))
    return Imported((class_name,), {NO_SPLIT: images})


Masks = Path | list[Path] | None
"""A file of instance ids, the files of instances, or nothing."""


def _pairs(images: Path, masks: Path) -> list[tuple[Path, Masks]]:
    files = _image_files([images])
    pairs = [(file, _masks_of(masks / file.relative_to(images))) for file in files]
    if files and not any(found for _, found in pairs):
        raise DataError(
            f"No mask in {masks} belongs to an image of {images}: {files[0].name} needs the file {files[0].stem}.png "
            f"of instance ids, or the folder {files[0].stem} with a file per instance."
        )
    return pairs


def _masks_of(place: Path) -> Masks:
    stem = place.with_suffix("")
    file = next((f for suffix in MASK_SUFFIXES if (f := stem.with_name(stem.name + suffix)).is_file()), None)
    if stem.is_dir() and file is not None:
        raise DataError(f"{file} and {stem} are masks of the same image: keep one of them.")
    return file or (_mask_files(stem) if stem.is_dir() else None)


def _mask_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in MASK_SUFFIXES)


def _folder_per_image(folder: Path) -> list[tuple[Path, Masks]]:
    files = _image_files(sorted(folder.glob("*/images")))
    if not files:
        raise DataError(
            f"{folder} has no images: give the folder of the images and the folder of the masks, or one folder with "
            "images/ and masks/ in a folder per image."
        )
    return [
        (file, _mask_files(masks) if (masks := file.parent.with_name("masks")).is_dir() else None) for file in files
    ]


def _image_files(folders: Iterable[Path]) -> list[Path]:
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES]
    return sorted(files)


def _read_masks(image: ImportedImage, masks: Masks, class_name: str, log: ImportLog) -> None:
    if masks is None:
        log.note("image without masks, kept as a negative", image.file)
        return
    for file in masks if isinstance(masks, list) else [masks]:
        values = read_values(file, image, log)
        if values is None:
            continue
        numbers = [number for number in np.unique(values).tolist() if number]
        if isinstance(masks, list) and len(numbers) > 1:
            log.drop("mask of one instance with several values beside 0", file)
            continue
        if not isinstance(masks, list) and numbers in ([1], [255]):
            log.note("mask with one value: all of it is one instance", file)
        for number in numbers:
            log.add_object(image, class_name, rle.encode(values == number), f"{file}, value {number}")


def mask_values(mask: Image.Image) -> npt.NDArray[np.int64]:
    """(H, W) palette indices or numbers; of colors red + 256 · green + 65536 · blue, as in COCO panoptic."""
    if mask.mode in ("RGB", "RGBA"):
        colors = np.asarray(mask.convert("RGB")).astype(np.int64)
        return np.asarray(colors @ np.array([1, 256, 65536]), np.int64)
    values = np.asarray(mask.getchannel(0) if mask.mode == "LA" else mask)
    if values.ndim != 2 or values.dtype.kind not in "ubi":
        raise ValueError("its values are neither whole numbers nor colors")
    return values.astype(np.int64)


def read_values(
    file: Path,
    image: ImportedImage,
    log: ImportLog,
    values_of: Callable[[Image.Image], npt.NDArray[np.int64]] = mask_values,
) -> npt.NDArray[np.int64] | None:
    """(H, W) the values of a mask file; None if it cannot be read, or has another size than its image."""
    try:
        with opened(file) as mask:
            values = values_of(mask)
    except DataError as error:
        log.drop("mask file that cannot be read", str(error).rstrip("."))
        return None
    if values.shape != (image.height, image.width):
        where = f"{file} is {values.shape[1]}×{values.shape[0]}, the image {image.width}×{image.height}"
        log.drop("mask of another size than its image", where)
        return None
    return values
