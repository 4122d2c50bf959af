"""YOLO segmentation: a data.yaml, and for each image a text file with one polygon a line, in fractions of the image."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from uniquery.data.images import SUFFIXES, inside_root, is_file
from uniquery.data.importing.imported import Imported, ImportedImage, ImportLog, check_classes
from uniquery.errors import DataError

SPLITS = ("train", "val", "test")
_OUTSIDE = 0.01  # coordinates may leave the image by this fraction: tools round differently


def read_yolo(sources: Sequence[Path], log: ImportLog) -> Imported:
    """Reads the splits of a data.yaml.

    Args:
        sources: the data.yaml or the folder that holds it; then the folder that its paths are relative to, if that is
            neither its own folder nor its `path` inside that folder.
        log: notes what is dropped.

    Raises:
        DataError: the yaml is not one of YOLO, or leads outside the folder.
    """
    file = sources[0] / "data.yaml" if sources[0].is_dir() else sources[0]
    config = _read_yaml(file)
    classes = _class_names(config, file)
    entries = {split: config[split] for split in SPLITS if config.get(split)}
    if not entries:
        raise DataError(f"{file} names no images: it needs 'train', and may have 'val' and 'test'.")
    root = sources[1] if len(sources) > 1 else _root(config, file, entries)
    files = {split: list(_image_files(root, entry, file, log)) for split, entry in entries.items()}
    total, done = sum(map(len, files.values())), 0
    splits: dict[str, list[ImportedImage]] = {split: [] for split in files}
    for split, paths in files.items():
        for path in paths:
            image = log.open_image(path)
            if image is not None:
                _read_labels(image, _label_file(path), classes, log)
                splits[split].append(image)
            done += 1
            log.progress(done, total)
    return Imported(classes, splits)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            # A few lines of aliases of aliases can stand for more than fits into memory.
            raise DataError(f"{file} is not taken: it has aliases (*name), which YOLO does not write: write them out.")
        content = yaml.safe_load(text)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid yaml: {' '.join(str(error).split())[:200]}.") from None
    if not isinstance(content, dict):
        raise DataError(f"{file} is not the data.yaml of a YOLO data set: it holds no keys and values.")
    return content


def _class_names(config: dict[str, Any], file: Path) -> tuple[str, ...]:
    names = config.get("names")
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise DataError(f"{file}: the keys of 'names' must be 0, 1, 2 and so on, without a gap.")
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list):
        raise DataError(f"{file} has no 'names': list the classes, such as names: [cell, debris].")
    return check_classes([name if isinstance(name, str) else str(name) for name in names], file)


def _root(config: dict[str, Any], file: Path, entries: dict[str, Any]) -> Path:
    """The folder that the paths of the splits are relative to."""
    folder = file.parent
    path, first = config.get("path"), next(iter(entries.values()))
    first = first[0] if isinstance(first, list) and first else first
    if not isinstance(path, str) or _find(folder, str(first)):
        return folder
    relative = os.path.normpath(path)
    if Path(relative).is_absolute() or relative.startswith(os.pardir):
        raise DataError(
            f"{file}: 'path' is {path}, outside the folder of the file: give the data set's folder after the file."
        )
    return folder / relative


def _find(root: Path, entry: str) -> Path | None:
    """What a split names, inside the root; Roboflow writes one .. too many."""
    relative = os.path.normpath(entry.removeprefix("../"))
    if Path(relative).is_absolute() or relative.startswith(os.pardir) or min(entry, default=" ") < " ":
        return None
    return root / relative if os.path.exists(root / relative) else None  # noqa: PTH110 (raises for some names)


def _image_files(root: Path, entry: Any, file: Path, log: ImportLog) -> Iterator[Path]:
    """The images of a split: of a folder and its subfolders, of a text file with a name a line, or of several."""
    for one in entry if isinstance(entry, list) else [entry]:
        path = _find(root, one) if isinstance(one, str) else None
        if path is None:
            raise DataError(f"{file}: {one!r:.120} is neither a folder nor a list of images inside {root}.")
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip():
                image = inside_root(root, line.strip())
                if is_file(image):
                    yield image
                else:
                    log.drop("image file that is missing", image)


def _label_file(image: Path) -> Path:
    """YOLO's rule: the last folder `images` of the path is `labels`."""
    parts = list(image.with_suffix(".txt").parts)
    positions = [index for index, part in enumerate(parts[:-1]) if part == "images"]
    if positions:
        parts[positions[-1]] = "labels"
    return Path(*parts)


def _read_labels(image: ImportedImage, file: Path, classes: Sequence[str], log: ImportLog) -> None:
    """Adds the instances of a text file; an image without one has none."""
    if not is_file(file):
        log.note("image without a label file, kept as a negative", image.file)
        return
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        words, where = line.split(), f"{file}, line {number}"
        if not words:
            continue
        try:
            label, values = int(words[0]), [float(word) for word in words[1:]]
        except ValueError:
            log.drop("line that is not 'class x y x y …'", where)
            continue
        reason = _reason_to_drop(label, values, len(classes))
        if reason:
            log.drop(reason, where)
            continue
        # Rounded as a polygon in pixels may have exact tenths, where the last bit decides which pixels it covers.
        polygon = [round(v * (image.height if i % 2 else image.width), 6) for i, v in enumerate(values)]
        log.add_object(image, classes[label], [polygon], where)


def _reason_to_drop(label: int, values: Sequence[float], classes: int) -> str:
    if not 0 <= label < classes:
        return "class number that data.yaml does not name"
    if len(values) == 4:
        return "box, which has no outline"
    if len(values) % 2 or len(values) < 6:
        return "line that is not 'class x y x y …' with at least three points"
    if not all(math.isfinite(v) and -_OUTSIDE <= v <= 1 + _OUTSIDE for v in values):
        return "coordinates outside 0 to 1: YOLO has them in fractions of the image"
    return ""
