"""From masks that overlap to a panoptic segmentation: every pixel belongs to one segment, or to none.

Letters: N masks, h × w their map, H × W the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from uniquery.masks import rle


@dataclass(frozen=True)
class Segment:
    """One segment of a panoptic prediction.

    Attributes:
        id: its number in the map, from 1.
        label: its class, contiguous from 0.
        score: score in 0..1; for merged stuff, the score of its first mask.
        is_thing: an instance, not stuff.
    """

    id: int
    label: int
    score: float
    is_thing: bool


@dataclass(frozen=True)
class PanopticSegments:
    """A panoptic prediction of one image.

    Attributes:
        ids: (H, W) int32, the segment of each pixel, 0 for none.
        segments: the segments by rising id.
    """

    ids: Tensor
    segments: tuple[Segment, ...]

    @property
    def rles(self) -> list[rle.Rle]:
        """The run-length mask of each segment."""
        ids = self.ids.numpy()
        return [rle.encode(ids == segment.id) for segment in self.segments]

    def to_coco(self, image_id: int, category_ids: Sequence[int | None]) -> list[dict[str, Any]]:
        """COCO results, one dict for each segment, as `Instances.to_coco` gives; None leaves a class out."""
        return [
            {
                "image_id": image_id,
                "category_id": category_ids[segment.label],
                "segmentation": mask,
                "bbox": list(rle.bounding_box(mask)),
                "score": segment.score,
            }
            for segment, mask in zip(self.segments, self.rles, strict=True)
            if category_ids[segment.label] is not None
        ]


def ids_to_rgb(ids: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """(H, W, 3): the ids of (H, W) segments as colors, as COCO's panoptic PNG files have them.

    >>> ids_to_rgb(np.array([[0, 258]])).tolist()
    [[[0, 0, 0], [2, 1, 0]]]
    """
    return np.stack([ids % 256, ids // 256 % 256, ids // 256**2], axis=-1).astype(np.uint8)


def rgb_to_ids(colors: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """(H, W) segment ids, R + 256 G + 256² B, of (H, W, 3) colors.

    >>> rgb_to_ids(np.array([[[2, 1, 0]]], np.uint8)).tolist()
    [[258]]
    """
    red, green, blue = np.moveaxis(colors.astype(np.int32), -1, 0)
    ids: npt.NDArray[np.int32] = red + 256 * green + 256**2 * blue
    return ids


def panoptic_segments(
    logits: Tensor,
    labels: Sequence[int],
    scores: Sequence[float],
    is_thing: Sequence[bool],
    matrices: tuple[Tensor, Tensor],
    overlap_threshold: float,
) -> PanopticSegments:
    """Each pixel goes to the mask with the largest score × probability there, if that probability is at least ½.

    A mask that keeps too little of what it would cover alone is dropped; masks of one class of stuff become one
    segment. Three maps are held at full size, independent of the number of masks.

    Args:
        logits: (N, h, w).
        labels: N classes.
        scores: N class scores.
        is_thing: whether each class is a thing.
        matrices: (h, H) and (w, W) resizing matrices.
        overlap_threshold: least share of its own area that a mask must win.
    """
    owner, is_inside, areas = _winners(logits.float().cpu(), scores, *matrices)
    ids = torch.zeros_like(owner)
    segments: list[Segment] = []
    stuff: dict[int, int] = {}
    for k, (label, score) in enumerate(zip(labels, scores, strict=True)):
        won = owner == k
        mask = won & is_inside
        if not mask.any() or int(won.sum()) / areas[k] < overlap_threshold:
            continue
        segment_id = stuff.get(label, len(segments) + 1)
        ids[mask] = segment_id
        if segment_id > len(segments):
            segments.append(Segment(segment_id, label, score, is_thing[label]))
        if not is_thing[label]:
            stuff[label] = segment_id
    return PanopticSegments(ids, tuple(segments))


def _winners(
    logits: Tensor, scores: Sequence[float], rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor, Sequence[int]]:
    """(H, W) which mask wins each pixel, (H, W) whether its probability there is at least ½, and N areas of that."""
    best = torch.full((rows.shape[1], columns.shape[1]), -1.0)
    owner = torch.full(best.shape, -1, dtype=torch.int32)
    is_inside = torch.zeros_like(owner, dtype=torch.bool)
    areas = []
    for k, (mask, score) in enumerate(zip(logits, scores, strict=True)):
        resized = rows.T @ mask @ columns
        inside = resized >= 0
        weight = resized.sigmoid_().mul_(score)
        wins = weight > best
        best = torch.where(wins, weight, best)
        owner.masked_fill_(wins, k)
        is_inside = torch.where(wins, inside, is_inside)
        areas.append(int(inside.sum()))
    return owner, is_inside, areas
