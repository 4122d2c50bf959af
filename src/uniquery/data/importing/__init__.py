"""Imports annotations of other tools as COCO json; see `import_data`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from uniquery.data.importing.coco_folder import check_is_free, write_coco_folder
from uniquery.data.importing.cvat import read_cvat
from uniquery.data.importing.imported import NO_SPLIT, Imported, ImportLog
from uniquery.data.importing.label_studio import read_label_studio
from uniquery.data.importing.mask_files import DEFAULT_CLASS, read_mask_files
from uniquery.data.importing.voc import read_voc
from uniquery.data.importing.yolo import read_yolo
from uniquery.errors import DataError

__all__ = ["DEFAULT_CLASS", "FORMATS", "ImportReport", "import_data"]


ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")


@dataclass(frozen=True)
class ImportFormat:
    """A format that can be imported.

    Attributes:
        sources: what to give, as it stands in a usage line; those in brackets may be left out.
        read: the reader.
    """

    sources: tuple[str, ...]
    read: Callable[[Sequence[Path], ImportLog], Imported]


FORMATS = {
    "yolo": ImportFormat(("data.yaml", "[FOLDER]"), read_yolo),
    "masks": ImportFormat(("IMAGES", "[MASKS]"), read_mask_files),
    "voc": ImportFormat(("FOLDER",), read_voc),
    "cvat": ImportFormat(("annotations.xml", "[IMAGES]"), read_cvat),
    "label-studio": ImportFormat(("export.json", "IMAGES"), read_label_studio),
}


@dataclass(frozen=True)
class ImportReport:
    """What was imported.

    Attributes:
        images: how many, by split; the key is empty if there is only one split.
        instances: how many, by split.
        classes: class → instances.
        dropped: why something was left out → what it was.
        notes: what was taken and may be wrong → where it is.
    """

    images: dict[str, int]
    instances: dict[str, int]
    classes: dict[str, int]
    dropped: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)


def import_data(
    format: str,  # noqa: A002 (what the command line calls it)
    sources: Sequence[Path],
    output: Path,
    *,
    class_name: str = DEFAULT_CLASS,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ImportReport:
    """Writes annotations of another tool as COCO json, with the images, into a new folder.

    Args:
        format: a key of `FORMATS`.
        sources: what its reader reads: files and folders.
        output: the folder to make.
        class_name: the class of masks that are files, which name none.
        progress: called with how many images are done, and how many there are.

    Raises:
        UserError: the sources cannot be read, or the folder not written; nothing is left.
    """
    if format not in FORMATS:
        raise DataError(f"The format '{format}' is not known; there are {', '.join(FORMATS)}.")
    usage = FORMATS[format].sources
    least = sum(not source.startswith("[") for source in usage)
    if not least <= len(sources) <= len(usage):
        raise DataError(f"The format {format} needs: {' '.join(usage)}.")
    for source in sources:
        if not source.exists():
            raise DataError(f"{source} does not exist.")
        if source.suffix.lower() in ARCHIVES:
            raise DataError(f"{source} is an archive: unpack it, and give what is inside.")
    check_is_free(output)
    log = ImportLog(progress)
    read = partial(read_mask_files, class_name=class_name) if format == "masks" else FORMATS[format].read
    imported = read(sources, log)
    splits = {split: images for split, images in imported.splits.items() if images}
    if list(splits) == ["train"]:  # to be divided by the user
        splits = {NO_SPLIT: splits["train"]}
    imported = replace(imported, splits=splits)
    report = _report(imported, log)
    if not sum(report.instances.values()):
        reasons = "; ".join(f"{len(where)} × {reason}" for reason, where in log.dropped.items())
        raise DataError(f"{sources[0]} has no instance that can be imported{f' ({reasons})' if reasons else ''}.")
    write_coco_folder(imported, output)
    return report


def _report(imported: Imported, log: ImportLog) -> ImportReport:
    classes = dict.fromkeys(imported.classes, 0)
    for images in imported.splits.values():
        for image in images:
            for one in image.objects:
                classes[one.class_name] += 1
    return ImportReport(
        images={split: len(images) for split, images in imported.splits.items()},
        instances={split: sum(len(i.objects) for i in images) for split, images in imported.splits.items()},
        classes=classes,
        dropped=log.dropped,
        notes=log.notes,
    )
