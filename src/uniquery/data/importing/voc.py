"""Pascal VOC segmentation: SegmentationObject and SegmentationClass, PNG files with palettes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from uniquery.data.images import SUFFIXES, inside_root, is_file
from uniquery.data.importing.imported import NO_SPLIT, Imported, ImportedImage, ImportLog, check_classes
from uniquery.data.importing.mask_files import mask_values, read_values
from uniquery.errors import DataError
from uniquery.masks import rle

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
VOID = 255  # the outlines of objects
VOID_COLOR = 224 + 256 * 224 + 65536 * 192
SPLITS = ("train", "val", "test")


def read_voc(sources: Sequence[Path], log: ImportLog) -> Imported:
    """Reads a folder such as VOC2012, or a mask export in its layout with a labelmap.txt.

    Args:
        sources: the folder with JPEGImages, SegmentationClass and SegmentationObject. Lists in ImageSets/Segmentation
            (train.txt, val.txt, test.txt) are its splits; without them, all images with masks are one.
        log: notes what is dropped.

    Raises:
        DataError: the folder has another layout.
    """
    folder = sources[0]
    for name in ("SegmentationClass", "SegmentationObject"):
        if not (folder / name).is_dir():
            raise DataError(f"{folder} has no folder {name}: give the folder of the data set, such as VOC2012.")
    labels = folder / "labelmap.txt"
    colors = _read_labelmap(labels) if labels.is_file() else None
    classes = check_classes(CLASSES if colors is None else colors.values(), labels)
    name_of = _name_by_number if colors is None else colors.get
    names = _split_names(folder)
    total, done = sum(map(len, names.values())), 0
    splits: dict[str, list[ImportedImage]] = {split: [] for split in names}
    for split, stems in names.items():
        for stem in stems:
            image = _read_image(folder, stem, name_of, colors is not None, log)
            if image is not None:
                splits[split].append(image)
            done += 1
            log.progress(done, total)
    return Imported(classes, splits)


def _name_by_number(number: int) -> str | None:
    return CLASSES[number - 1] if 1 <= number <= len(CLASSES) else None


def _read_labelmap(file: Path) -> dict[int, str]:
    """Color → name of a labelmap.txt, whose lines are `name:red,green,blue::`; without the background."""
    colors: dict[int, str] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition(":")
        try:
            red, green, blue = (int(value) for value in rest.split(":")[0].split(","))
        except ValueError:
            raise DataError(f"{file}: '{line[:80]}' is not 'name:red,green,blue::'.") from None
        if (red, green, blue) != (0, 0, 0):
            colors[red + 256 * green + 65536 * blue] = name
    return colors


def _split_names(folder: Path) -> dict[str, list[str]]:
    lists = folder / "ImageSets" / "Segmentation"
    names = {
        split: [line.split()[0] for line in file.read_text(errors="replace").splitlines() if line.strip()]
        for split in SPLITS
        if (file := lists / f"{split}.txt").is_file()
    }
    return names or {NO_SPLIT: sorted(p.stem for p in (folder / "SegmentationObject").glob("*.png"))}


def _read_image(
    folder: Path, stem: str, name_of: Callable[[int], str | None], is_colored: bool, log: ImportLog
) -> ImportedImage | None:
    objects = inside_root(folder, f"SegmentationObject/{stem}.png")
    classes = inside_root(folder, f"SegmentationClass/{stem}.png")
    file = inside_root(folder, f"JPEGImages/{stem}.jpg")
    file = next((f for suffix in sorted(SUFFIXES) if is_file(f := file.with_name(file.stem + suffix))), file)
    if not is_file(objects) or not is_file(classes):
        log.drop("image without masks in SegmentationObject and SegmentationClass", file)
        return None
    image = log.open_image(file)
    if image is None:
        return None
    numbers = read_values(objects, image, log, _object_numbers)
    labels = read_values(classes, image, log, _color_numbers if is_colored else mask_values)
    if numbers is None or labels is None:
        return None
    for number in np.unique(numbers).tolist():
        if number:
            _add_object(image, numbers == number, labels, name_of, f"{objects}, object {number}", log)
    return image


def _object_numbers(mask: Image.Image) -> npt.NDArray[np.int64]:
    """Values of SegmentationObject, 0 where the pixel is void."""
    values = mask_values(mask)
    values[values == (VOID_COLOR if mask.mode in ("RGB", "RGBA") else VOID)] = 0
    return values


def _color_numbers(mask: Image.Image) -> npt.NDArray[np.int64]:
    """Values of SegmentationClass by color, also if they have a palette."""
    return mask_values(mask.convert("RGB"))


def _add_object(
    image: ImportedImage,
    mask: npt.NDArray[np.bool_],
    labels: npt.NDArray[np.int64],
    name_of: Callable[[int], str | None],
    where: str,
    log: ImportLog,
) -> None:
    found, counts = np.unique(labels[mask], return_counts=True)
    name = name_of(int(found[counts.argmax()]))
    if name is None:
        log.drop("object without a class in SegmentationClass", where)
        return
    if len(found) > 1:
        log.note("object with pixels of several classes, which gets the most frequent one", where)
    log.add_object(image, name, rle.encode(mask), where)
