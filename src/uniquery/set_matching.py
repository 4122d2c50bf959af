"""One-to-one matching of predictions and ground truth, as set-prediction segmenters use it. Nothing carries a gradient.

Letters: R predictions, K instances, P points.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

_WORST = 1e6  # stands for a cost that is no number


def mask_costs(logits: Tensor, wanted: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(R, K) cross-entropy, the mean over points, and (R, K) dice loss, of every prediction with every instance.

    With softplus(x) − softplus(−x) = x, the cross-entropy of a pair is Σ softplus(x) − Σ x t: one matrix product.

    Args:
        logits: (R, P).
        wanted: (K, P) in 0..1.
        known: (P,) bool, the points that count; None means all.
    """
    softplus, probabilities = F.softplus(logits), logits.sigmoid()
    count: Tensor | int = logits.shape[1]
    if known is not None:
        softplus, probabilities, wanted = softplus * known, probabilities * known, wanted * known
        count = known.sum().clamp(min=1)
    cross_entropy = (softplus.sum(1)[:, None] - logits @ wanted.T) / count
    overlap = probabilities @ wanted.T
    dice = 1 - (2 * overlap + 1) / (probabilities.sum(1)[:, None] + wanted.sum(1) + 1)
    return cross_entropy, dice


def cheapest_pairs(costs: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of the min(R, K) pairs of (R, K) costs whose sum is the least, rows in order.

    A cost that is no number counts as a very bad one: a network that has diverged is told so by its losses.

    >>> cheapest_pairs(np.array([[1.0, 9.0], [0.0, 1.0], [np.nan, 0.5]]))
    (array([1, 2]), array([0, 1]))
    """
    rows, columns = linear_sum_assignment(np.nan_to_num(costs, nan=_WORST, posinf=_WORST, neginf=-_WORST))
    return rows, columns


def match_all(costs: npt.NDArray[np.floating]) -> Tensor:
    """(2, L, min(R, K)): rows and columns of the cheapest pairs of each of (L, R, K) tables."""
    return torch.from_numpy(np.stack([np.stack(cheapest_pairs(table)) for table in costs], axis=1)).long()
