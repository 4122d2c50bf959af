"""How far two predictions of the same image agree."""

from __future__ import annotations

import numpy as np
from hotcoco import mask as coco_mask

from uniquery.structures import Instances


def match_instances(a: Instances, b: Instances, least_iou: float = 0.5) -> list[tuple[int, int, float]]:
    """Pairs of instances of the same class and their IoU, each instance in one pair at most.

    In the order of `a`, each takes the free one of `b` whose mask overlaps most; of equal ones, that of nearest score.
    """
    if not len(a) or not len(b):
        return []
    ious = np.asarray(coco_mask.iou(list(a.rles), list(b.rles), [0] * len(b)))
    ious = np.where(a.labels.numpy()[:, None] == b.labels.numpy(), ious, 0.0)
    distance = np.abs(a.scores.numpy()[:, None] - b.scores.numpy())
    pairs: list[tuple[int, int, float]] = []
    free = np.ones(len(b), dtype=bool)
    for i, row in enumerate(ious):
        j = int(np.argmax(np.where(free, row - 1e-3 * distance[i], -1.0)))
        if free[j] and row[j] >= least_iou:
            free[j] = False
            pairs.append((i, j, float(row[j])))
    return pairs


def disagreement(a: Instances, b: Instances) -> float:
    """1 − panoptic quality of one prediction with the other as ground truth: 0 if equal, 1 if nothing matches."""
    if not len(a) and not len(b):
        return 0.0
    return 1 - 2 * sum(iou for _, _, iou in match_instances(a, b)) / (len(a) + len(b))
