"""Losses between logits and binary targets: pure functions, one value per row unless said otherwise."""

import torch.nn.functional as F
from torch import Tensor


def dice(probabilities: Tensor, targets: Tensor, eps: float = 1e-5) -> Tensor:
    r"""The dice loss of V-Net: :math:`1 - 2 \sum p t \, / \, (\sum p^2 + \sum t^2 + \epsilon)`.

    Args:
        probabilities: (Q, ...) in 0..1.
        targets: (Q, ...) in 0..1.
        eps: keeps an empty pair finite.

    Returns:
        (Q,) in 0..1.

    >>> import torch
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
        gamma: how strongly easy elements are discounted.

    Returns:
        the shape of the logits.
    """
    targets = targets.to(logits.dtype)
    p = logits.sigmoid()
    missed = p + targets - 2 * p * targets  # 1 − p_t
    weight = alpha * targets + (1 - alpha) * (1 - targets)
    return weight * missed**gamma * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
