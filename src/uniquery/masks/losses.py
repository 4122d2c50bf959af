"""Losses between logits and binary targets: pure functions, one value per row unless said otherwise.

The second half compares masks on sampled points instead of all pixels (PointRend, Kirillov et al., CVPR 2020), as
Mask2Former does. All masks of an image share their candidate points, so their ground truth is sampled once for all
decoder layers; each prediction is then compared on those candidates where it is most uncertain.

Letters: Q queries, R predictions, K instances, P candidate points, n chosen points.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from uniquery.layers.sampling import sample_masks, valid_at
from uniquery.structures import Targets


def dice(probabilities: Tensor, targets: Tensor, eps: float = 1e-5) -> Tensor:
    r"""The dice loss of V-Net: :math:`1 - 2 \sum p t \, / \, (\sum p^2 + \sum t^2 + \epsilon)`.

    Args:
        probabilities: (Q, ...) in 0..1.
        targets: (Q, ...) in 0..1.
        eps: keeps an empty pair finite.

    Returns:
        (Q,) in 0..1.

    >>> dice(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]])).round(decimals=4)
    tensor([0.])
    """
    p, t = probabilities.flatten(1), targets.flatten(1).to(probabilities.dtype)
    return 1 - 2 * (p * t).sum(1) / (p.square().sum(1) + t.square().sum(1) + eps)


def sigmoid_focal(logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    r"""Focal loss on sigmoids, :math:`-\alpha_t (1 - p_t)^\gamma \log p_t`, elementwise.

    α weighs positives, 1 − α negatives.

    Args:
        logits: any shape.
        targets: the same shape, in 0..1.
        alpha: weight of positives.
        gamma: focusing parameter.

    Returns:
        the shape of the logits.
    """
    targets = targets.to(logits.dtype)
    p = logits.sigmoid()
    missed = p + targets - 2 * p * targets  # 1 − p_t
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return weight * missed**gamma * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


@dataclass(frozen=True)
class PointSampling:
    """How many points, and which.

    Attributes:
        points: points per mask.
        oversample: candidates for each point.
        importance: share of the points that are the most uncertain candidates; the rest are drawn at random.
    """

    points: int
    oversample: float
    importance: float

    @property
    def num_uncertain(self) -> int:
        """How many points are the most uncertain candidates."""
        return int(self.importance * self.points)

    @property
    def num_uncertainty_candidates(self) -> int:
        """How many candidates they are chosen from."""
        return max(int(self.points * self.oversample), self.num_uncertain)

    @property
    def num_candidates(self) -> int:
        """All candidates: the uncertainty candidates, then the points that are always used."""
        return self.num_uncertainty_candidates + self.points - self.num_uncertain


@dataclass(frozen=True)
class PointTargets:
    """Ground truth of one image at its candidate points.

    Attributes:
        values: (K, P) in 0..1.
        valid: (P,) bool, false in ignore regions; None means valid everywhere.
    """

    values: Tensor
    valid: Tensor | None

    @classmethod
    def sampled(cls, targets: Targets, points: Tensor) -> PointTargets:
        """The targets at (P, 2) points, given as shares of the padded width and height."""
        valid = None if targets.valid is None else valid_at(targets.valid, points)
        return cls(sample_masks(targets.masks, points), valid)


def draw_points(count: int, extent: tuple[float, float], like: Tensor) -> Tensor:
    """(count, 2) x, y at random, uniform over the first (height, width) shares of the padded image."""
    height, width = extent
    points = torch.rand(count, 2, device=like.device)  # in float32, so that all precisions see the same points
    points = points.to(torch.promote_types(like.dtype, torch.float32))
    return torch.stack([points[:, 0] * width, points[:, 1] * height], dim=1)


def point_losses(logits: Tensor, owned: Tensor, targets: PointTargets, sampling: PointSampling) -> Tensor:
    """(2, R): cross-entropy, the mean over a prediction's points, and dice loss.

    Args:
        logits: (R, P) at the candidate points.
        owned: (R,) which instance each prediction owns.
        targets: the instances at the candidate points.
        sampling: how many candidates there are, and how many points are chosen from them.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    first_fixed = sampling.num_uncertainty_candidates  # from here on, all candidates are used
    index = _most_uncertain(logits.detach()[:, :first_fixed], targets.valid, sampling.num_uncertain)
    chosen = torch.cat([logits.gather(1, index), logits[:, first_fixed:]], dim=1)  # (R, n)
    flat_index = owned[:, None] * targets.values.shape[1] + index
    values = torch.cat([targets.values.take(flat_index), targets.values[owned, first_fixed:]], dim=1).to(chosen.dtype)
    if targets.valid is None:
        return torch.stack([_cross_entropy(chosen, values), _dice(chosen.sigmoid(), values)])
    valid = torch.cat([targets.valid[index], targets.valid[first_fixed:].expand(len(index), -1)], dim=1)
    chosen, values, weight = chosen.masked_fill(~valid, 0), values * valid, valid.to(chosen.dtype)
    return torch.stack([_cross_entropy(chosen, values, weight), _dice(chosen.sigmoid() * weight, values)])


def _most_uncertain(logits: Tensor, valid: Tensor | None, count: int) -> Tensor:
    """(R, count): the valid candidates with the smallest |logit|; invalid ones only where there are too few."""
    certainty = logits.abs()
    if valid is not None:
        certainty.masked_fill_(~valid[: certainty.shape[1]], torch.inf)
    return certainty.topk(count, dim=1, largest=False, sorted=False).indices


def _cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """(R,): binary cross-entropy, the weighted mean over points."""
    loss = F.binary_cross_entropy_with_logits(logits, targets, weight, reduction="none")
    return loss.mean(1) if weight is None else loss.sum(1) / weight.sum(1).clamp(min=1)


def _dice(probabilities: Tensor, targets: Tensor) -> Tensor:
    """(R,): 1 − (2 Σ p t + 1) / (Σ p + Σ t + 1)."""
    overlap = (probabilities * targets).sum(1)
    return 1 - (2 * overlap + 1) / (probabilities.sum(1) + targets.sum(1) + 1)
