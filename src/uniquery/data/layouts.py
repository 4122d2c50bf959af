"""Finds annotations and images in the common layouts of a data set's folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from uniquery.data.coco_json import image_file_name, read_json
from uniquery.data.images import find_image_root, inside_root, is_file
from uniquery.data.json_values import is_text
from uniquery.errors import DataError

ROBOFLOW = "_annotations.coco.json"
_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
_SPLIT = re.compile(r"(?:^|[_.-])(train|training|val|valid|validation|test|testing)([0-9]{4})?$")
_OTHER_TASKS = ("person_keypoints_", "captions_", "stuff_", "image_info_")  # beside COCO's instances


@dataclass(frozen=True)
class FoundSplit:
    """A part of a data set.

    Attributes:
        annotations: its json.
        images: the folder that its file names are relative to.
        count: how many images it lists.
    """

    annotations: Path
    images: Path
    count: int

    def __str__(self) -> str:
        return f"{self.annotations}, {self.count} images in {self.images}"


@dataclass(frozen=True)
class FoundData:
    """What was found in a folder.

    Attributes:
        train: the training data.
        val: the validation data, if there is any.
        test: the json of test data, which is not used.
    """

    train: FoundSplit
    val: FoundSplit | None
    test: Path | None


def find_dataset(folder: Path) -> FoundData:
    """The training and validation data in a folder.

    It may have Roboflow's layout (train/ and valid/, each with images and _annotations.coco.json), that of COCO
    (annotations/instances_train2017.json, images in train2017/ or images/train2017/), or one json, or train.json and
    val.json, and a folder of images.

    Raises:
        DataError: nothing is found, or several files could be meant.
    """
    if not folder.is_dir():
        raise DataError(f"--dataset {folder} is not a folder.")
    files = _roboflow(folder) or _by_split(folder)
    train = files.get("train")
    if train is None:
        raise DataError(
            f"{folder} has no training data that is found: a json such as annotations/instances_train.json, train.json "
            f"or train/{ROBOFLOW}. Say where it is with --train ANNOTATIONS IMAGES."
        )
    val = files.get("val")
    return FoundData(
        _with_images(folder, train, "train"),
        None if val is None else _with_images(folder, val, "val"),
        files.get("test"),
    )


def _roboflow(folder: Path) -> dict[str, Path]:
    return {
        split: file for split, names in _NAMES.items() for name in names if is_file(file := folder / name / ROBOFLOW)
    }


def _by_split(folder: Path) -> dict[str, Path]:
    """The json of each split; a json that names no split is training data if there is no other."""
    found = [file for place in (folder, folder / "annotations") for file in sorted(place.glob("*.json"))]
    files = [file for file in found if not file.name.startswith(_OTHER_TASKS)]
    by_split: dict[str, list[Path]] = {}
    for file in files:
        match = _SPLIT.search(file.stem)
        split = next((s for s, names in _NAMES.items() if match and match[1] in names), "")
        by_split.setdefault(split, []).append(file)
    if "train" not in by_split and "" in by_split:
        by_split["train"] = by_split[""]
    by_split.pop("", None)
    return {split: _only(files, split) for split, files in by_split.items()}


def _only(files: Sequence[Path], split: str) -> Path:
    """The json that is meant; one of panoptic segments only if there is no other."""
    files = [file for file in files if not file.name.startswith("panoptic_")] or files
    if len(files) > 1:
        names = ", ".join(map(str, files[:4]))
        raise DataError(f"Several files could be the {split} data ({names}): say which, --{split} ANNOTATIONS IMAGES.")
    return files[0]


def _with_images(folder: Path, annotations: Path, split: str) -> FoundSplit:
    """A split with the folder in which its first image is."""
    rows = read_json(annotations)["images"]
    for root in dict.fromkeys(_image_folders(folder, annotations, split)):
        name = image_file_name(rows[0], root)
        if is_text(name) and root.is_dir() and is_file(inside_root(root, name)):
            return FoundSplit(annotations, root, len(rows))
    name = image_file_name(rows[0], folder)
    near = find_image_root(folder, name) if is_text(name) else None
    if near is None or near == folder.absolute().parent:
        raise DataError(
            f"{annotations} lists {name!r:.80}, which is in no folder of {folder}: say where the images are with "
            f"--{split} {annotations} IMAGES."
        )
    return FoundSplit(annotations, near, len(rows))


def _image_folders(folder: Path, annotations: Path, split: str) -> Iterator[Path]:
    """Where the images may be, the most special place first."""
    match = _SPLIT.search(annotations.stem)
    names = [match[1] + (match[2] or "")] if match else []
    if annotations.name == ROBOFLOW:
        yield annotations.parent
    for name in (*names, *_NAMES[split]):
        yield from (folder / "images" / name, folder / name)
    yield from (folder / "images", annotations.parent, folder, folder.parent / "images")  # the last: of another split
