"""The loss of one (query, pixel) pair, and its derivative.

Letters: Q queries, c pixels of a chunk.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from uniquery.settings import Settings

LossName = Literal["focal", "cross_entropy", "l1", "l2"]


class PairLoss(Settings):
    """A loss of one (query, pixel) logit x against target 0, with its derivative; for target 1, use −x.

    With p = sigmoid(x), all are a modulating factor times a base loss:
    focal pᵞ · −log(1 − p), cross-entropy −log(1 − p), ℓ1 p, ℓ2 p · p. `__call__` does not apply the property `weight`;
    `InterSceneLoss` does.
    """

    name: LossName = Field("focal", description="the loss of a pair; only focal has alpha and gamma")
    alpha: float = Field(0.1, ge=0, lt=1, description="focal loss: weight of positives; negatives weigh 1 − alpha")
    gamma: float = Field(2.5, ge=0, description="focusing parameter of the focal loss")

    def __call__(self, minus_x: Tensor, workspace: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(Q,) sums of the losses and (Q, c) derivatives by x at target 0, each pair weighted.

        Args:
            minus_x: (Q, c) minus the logits, so that 1 − p is exact where p is large; overwritten.
            workspace: (3, Q, c) scratch memory; the derivatives are returned in it.
            weight: (Q, c) weight of each pair; None: 1.
        """
        first, second, third = workspace
        one_minus_p = minus_x.sigmoid_().clamp_(min=torch.finfo(minus_x.dtype).tiny)  # its logarithm stays finite
        p = torch.sub(1, one_minus_p, out=first)
        if self.name in ("l1", "l2"):
            power = 1 if self.name == "l1" else 2
            modulating, minus_base = torch.pow(p, power - 1, out=second), torch.neg(p, out=third)
            derivative = one_minus_p.mul_(p).mul_(power)  # power · p (1 − p), before the modulating factor
        else:
            modulating, minus_base = _power(p, self._gamma, out=second), torch.log(one_minus_p, out=third)
            derivative = p.addcmul_(one_minus_p, minus_base, value=-self._gamma)  # p − γ (1 − p) log(1 − p)
        if weight is not None:
            modulating.mul_(weight)
        return minus_base.mul_(modulating).sum(1).neg_(), modulating.mul_(derivative)

    @property
    def _gamma(self) -> float:
        """Cross-entropy is the focal loss with γ = 0."""
        return self.gamma if self.name == "focal" else 0.0

    @property
    def weight(self) -> float:
        """Weight of a pair with target 0."""
        return 1 - self.alpha if self.name == "focal" else 1.0

    @property
    def positive_weight(self) -> float:
        """Weight of a pair with target 1, relative to that of a pair with target 0."""
        return self.alpha / (1 - self.alpha) if self.name == "focal" else 1.0


def _power(p: Tensor, exponent: float, out: Tensor) -> Tensor:
    """`p ** exponent`; 2.5 is computed with a square root, which is faster."""
    if exponent == 2.5:
        return torch.sqrt(p, out=out).mul_(p).mul_(p)
    return torch.pow(p, exponent, out=out)
