"""Opens a data set in whichever format its json has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from uniquery.data.coco import CocoData
from uniquery.data.coco_json import read_json
from uniquery.data.panoptic import PanopticData
from uniquery.data.panoptic_json import has_segments
from uniquery.errors import DataError


def open_data(
    annotations: Path,
    images: Path,
    *,
    pngs: Path | None = None,
    classes: Sequence[str] | None = None,
    allow_missing: bool = False,
    keep_empty: bool = True,
    ignore_crowd: bool = True,
    bit_depth: int | None = None,
    needs_annotations: bool = True,
) -> CocoData:
    """COCO instances, or COCO panoptic segments if the annotations have 'segments_info'.

    Args:
        annotations: the json.
        images: the folder its file names are relative to.
        pngs: the folder of panoptic PNG files; None: the path of the json without its ending.
        classes: names of the classes to use, in the order of their labels; None takes all, by id.
        allow_missing: whether `classes` may name some that the data does not have; they get no label.
        keep_empty: whether images without instances stay, as negatives.
        ignore_crowd: whether `load` marks crowd regions and void as not valid; otherwise they are background.
        bit_depth: how many bits the values of 16-bit images use; None: as `read_image` finds them.
        needs_annotations: False accepts a json without 'annotations', such as that of COCO test-dev.

    Raises:
        DataError: anything that would make training go wrong, in one sentence.
    """
    tables = read_json(Path(annotations))
    data: CocoData
    if not needs_annotations:
        tables.setdefault("annotations", [])
    if has_segments(tables.get("annotations", [])):
        data = PanopticData(
            annotations,
            images,
            pngs=pngs,
            classes=classes,
            allow_missing=allow_missing,
            keep_empty=keep_empty,
            ignore_crowd=ignore_crowd,
            tables=tables,
        )
    elif pngs is not None:
        raise DataError(f"{annotations} is not panoptic, it has no 'segments_info': leave out the folder {pngs}.")
    else:
        data = CocoData(
            annotations,
            images,
            classes=classes,
            allow_missing=allow_missing,
            keep_empty=keep_empty,
            ignore_crowd=ignore_crowd,
            tables=tables,
        )
    data.bit_depth = bit_depth
    return data
