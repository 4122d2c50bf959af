"""Mask AP of one image, by COCO's rules: what a gallery is sorted by.

Letters: P predictions, G instances of the ground truth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from hotcoco import mask as coco_mask

from uniquery.evaluation.errors import LabeledRle
from uniquery.masks.rle import Rle

IOUS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
_LEAST_PRECISION = np.finfo(np.float64).eps


def image_ap(
    instances: Sequence[LabeledRle],
    predicted: Sequence[LabeledRle],
    *,
    crowds: Sequence[LabeledRle] = (),
    labeled_classes: Collection[int] | None = None,
    max_detections: int = 100,
) -> float | None:
    """The mean AP over the classes that the image has, and over IoU 0.5 to 0.95; None without instances.

    Args:
        instances: label and run-length mask of the ground truth, without crowd regions.
        predicted: label and run-length mask, best score first.
        crowds: label and mask of regions where predictions of that class do not count.
        labeled_classes: the classes that the image is labeled for; all by default.
        max_detections: how many predictions of each class count.
    """
    classes = {label for label, _ in instances}
    if labeled_classes is not None:
        classes &= set(labeled_classes)
    values = []
    for label in sorted(classes):
        masks = [[mask for other, mask in side if other == label] for side in (predicted, instances, crowds)]
        values.append(_class_ap(masks[0][:max_detections], masks[1], masks[2]))
    return float(np.mean(values)) if values else None


def _class_ap(predicted: list[Rle], truth: list[Rle], crowds: list[Rle]) -> float:
    if not predicted:
        return 0.0
    flags = [0] * len(truth) + [1] * len(crowds)
    overlaps = np.asarray(coco_mask.iou(predicted, [*truth, *crowds], flags))
    iou, in_crowd = overlaps[:, : len(truth)], overlaps[:, len(truth) :].max(1, initial=0.0)
    return float(np.mean([_ap_at(iou, in_crowd, least) for least in IOUS]))


def _ap_at(iou: npt.NDArray[np.float64], in_crowd: npt.NDArray[np.float64], least: float) -> float:
    """AP at one IoU threshold, from (P, G) IoU, best score first; a crowd takes what finds no instance."""
    free = np.ones(iou.shape[1], dtype=bool)
    hits = []
    for row, crowd in zip(iou, in_crowd, strict=True):
        candidates = np.where(free, row, -1.0)
        best = len(candidates) - 1 - int(candidates[::-1].argmax())  # of equal ones COCO takes the last
        if candidates[best] >= least:
            free[best] = False
            hits.append(True)
        elif crowd < least:
            hits.append(False)
    found = np.cumsum(hits)
    if not len(found):
        return 0.0
    recall = found / iou.shape[1]
    precision = found / (np.arange(1, len(found) + 1) + _LEAST_PRECISION)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    positions = np.searchsorted(recall, RECALLS, side="left")
    reached = positions < len(precision)
    return float(np.where(reached, precision[np.minimum(positions, len(precision) - 1)], 0.0).mean())
