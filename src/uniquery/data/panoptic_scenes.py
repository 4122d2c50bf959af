"""Drawn scenes in COCO's panoptic form: objects are things, parts of the background stuff, and the rest void."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from uniquery.data.drawing import CLASS_NAMES, STUFF_NAMES
from uniquery.data.panoptic_json import MAX_ID, encode_ids
from uniquery.masks import rle

_MIN_STUFF = 0.01  # smallest share of an image that a kind of stuff has
_ID_STEP = 2_654_435  # odd, so that multiples differ modulo 256³; neighbors in the list get very different colors


def panoptic_categories(classes: int) -> list[dict[str, Any]]:
    """The objects, as in other scenes, and the stuff."""
    things = [{"id": i, "name": name, "isthing": 1} for i, name in enumerate(CLASS_NAMES[:classes], start=1)]
    first = len(CLASS_NAMES) + 1
    return things + [{"id": i, "name": name, "isthing": 0} for i, name in enumerate(STUFF_NAMES, start=first)]


def visible_stuff(stuff: npt.NDArray[np.int64], owner: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The stuff that no object covers; what is left of a kind becomes void if it is very little.

    Args:
        stuff: (H, W) index in `STUFF_NAMES`, −1 for void.
        owner: (H, W) index of the object at each pixel, −1 for none.
    """
    visible = np.where(owner < 0, stuff, -1)
    areas = np.bincount(visible[visible >= 0], minlength=len(STUFF_NAMES))
    return np.where(np.isin(visible, np.flatnonzero(areas < _MIN_STUFF * owner.size)), -1, visible)


def write_panoptic_entry(
    pngs: Path,
    image: int,
    masks: npt.NDArray[np.bool_],
    labels: Sequence[int],
    stuff: npt.NDArray[np.int64],
) -> dict[str, Any]:
    """Writes the PNG file of an image and returns its entry of 'annotations'.

    Args:
        pngs: the folder.
        image: number of the image.
        masks: (K, H, W), disjoint.
        labels: K indices in `CLASS_NAMES`.
        stuff: (H, W) index in `STUFF_NAMES`, −1 elsewhere.
    """
    kinds = np.unique(stuff[stuff >= 0]).tolist()
    categories = [label + 1 for label in labels] + [len(CLASS_NAMES) + 1 + kind for kind in kinds]
    ids = np.zeros(stuff.shape, np.int64)
    segments = []
    for number, (category, mask) in enumerate(zip(categories, [*masks, *(stuff == k for k in kinds)], strict=True), 1):
        ids[mask] = segment_id = number * _ID_STEP % (MAX_ID + 1)
        encoded = rle.encode(mask)
        box = [int(side) for side in rle.bounding_box(encoded)]
        about = {"id": segment_id, "category_id": category, "iscrowd": 0}
        segments.append(about | {"area": rle.area(encoded), "bbox": box})
    name = f"{image:06d}.png"
    pngs.mkdir(exist_ok=True)
    (pngs / name).write_bytes(encode_ids(ids))
    return {"image_id": image, "file_name": name, "segments_info": segments}
