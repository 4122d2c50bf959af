"""What makes an instance hard, measured on the ground truth: its size, its neighbors, what touches it, its topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_dilation, label

from uniquery.masks import rle
from uniquery.masks.rle import Rle

SPECK = 0.01
"""Parts and holes below this share of the instance's area are not counted: they come from drawing polygons."""
HEAVY_CONTACT = 0.25
"""From this share of its outline on, an instance is heavily occluded."""

TRAITS = {
    "size": ("small", "medium", "large"),
    "crowding": ("no neighbor", "1 or 2 neighbors", "3 or more"),
    "occlusion": ("free", "touched", "heavily"),
    "holes and parts": ("one part", "with holes", "several parts"),
}
"""Trait → its groups, in order; see docs/errors.md."""

_ALL_AROUND = np.ones((3, 3), dtype=bool)


@dataclass(frozen=True)
class Traits:
    """What makes an instance hard.

    Attributes:
        area: pixels of its mask.
        neighbors: other instances of the image whose bounding boxes overlap or touch its own.
        contact: share of the pixels around it that belong to other instances.
        parts: connected parts, specks excluded.
        holes: enclosed holes, specks excluded.
    """

    area: int
    neighbors: int
    contact: float
    parts: int
    holes: int

    @property
    def groups(self) -> dict[str, str]:
        """Its group by each of `TRAITS`."""
        levels = {
            "size": (self.area >= 32**2) + (self.area > 96**2),
            "crowding": (self.neighbors > 0) + (self.neighbors > 2),
            "occlusion": (self.contact > 0) + (self.contact >= HEAVY_CONTACT),
            "holes and parts": 2 if self.parts > 1 else int(self.holes > 0),
        }
        return {trait: TRAITS[trait][level] for trait, level in levels.items()}


def instance_traits(masks: Sequence[Rle]) -> list[Traits]:
    """The traits of all instances of one image.

    >>> import numpy as np
    >>> ring = np.ones((40, 40), np.uint8)
    >>> ring[10:20, 10:20] = 0
    >>> (traits,) = instance_traits([rle.encode(ring)])
    >>> traits.holes, traits.groups["holes and parts"]
    (1, 'with holes')
    """
    if not masks:
        return []
    boxes = np.array([rle.bounding_box(mask) for mask in masks], dtype=int)
    starts, ends = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
    touching = ((starts[:, None] <= ends) & (starts <= ends[:, None])).all(2)
    np.fill_diagonal(touching, False)
    height, width = masks[0]["size"]
    owners = np.zeros((height, width), np.int32)  # how many instances cover a pixel
    for mask in masks:
        owners += rle.decode(mask)
    return [
        _traits(rle.decode(mask), owners, box, int(neighbors))
        for mask, box, neighbors in zip(masks, boxes, touching.sum(1), strict=True)
    ]


def _traits(mask: rle.Bitmap, owners: npt.NDArray[np.int32], box: npt.NDArray[np.int64], neighbors: int) -> Traits:
    x, y, width, height = box.tolist()
    rows, columns = slice(max(y - 1, 0), y + height + 1), slice(max(x - 1, 0), x + width + 1)  # with a pixel around it
    inside = mask[rows, columns].astype(bool)
    around = binary_dilation(inside, _ALL_AROUND) & ~inside
    touched = around & (owners[rows, columns] > 0)
    area = int(inside.sum())
    return Traits(
        area=area,
        neighbors=neighbors,
        contact=int(touched.sum()) / max(int(around.sum()), 1),
        parts=_count(inside, area, _ALL_AROUND),
        holes=_count(_enclosed(inside), area, None),
    )


def _enclosed(inside: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """What the mask encloses: background from which no path leads outside."""
    outside = np.pad(~inside, 1, constant_values=True)
    components, _ = label(outside)
    enclosed: npt.NDArray[np.bool_] = (outside & (components != components[0, 0]))[1:-1, 1:-1]
    return enclosed


def _count(mask: npt.NDArray[np.bool_], area: int, structure: npt.NDArray[np.bool_] | None) -> int:
    """How many connected components are not specks."""
    components, count = label(mask, structure)
    if not count:
        return 0
    sizes = np.bincount(components[mask])[1:]
    return int((sizes >= SPECK * area).sum())
