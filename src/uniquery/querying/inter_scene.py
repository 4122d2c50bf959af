"""L_inter (Eq. 5): queries must not fire on the instances of other images.

Letters: Q queries, P stored pixels, c pixels of a chunk, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uniquery.parallel import normalizer
from uniquery.querying.memory import StoredPixels
from uniquery.structures import Pixels, Queries

Kind = Literal["focal", "cross_entropy", "l1", "l2"]
Similarity = Callable[[Any, Pixels], Tensor]

# (query, pixel) pairs of a chunk: small ones stay in a CPU's cache, large ones mean fewer launches and wake-ups.
_PAIRS_AT_ONCE = {"cpu": 2**20, "cuda": 2**22}


@dataclass(frozen=True)
class PairLoss:
    """A loss of one logit against target 0, with its derivative, up to `weight`; target 1 is the mirror image.

    Attributes:
        kind: which.
        alpha: focal only: weight of positives; negatives weigh 1 − alpha.
        gamma: focal only: how strongly easy pairs are discounted.
    """

    kind: Kind = "focal"
    alpha: float = 0.1
    gamma: float = 2.5

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"the loss of a pair is {self.kind!r} and must be one of {', '.join(get_args(Kind))}")
        if not 0 <= self.alpha < 1 or self.gamma < 0:
            raise ValueError("alpha must lie in 0..1 and gamma must not be negative")

    def __call__(self, minus_x: Tensor, room: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(Q,) sums of the values and (Q, c) derivatives at target 0, each pair weighted.

        Args:
            minus_x: (Q, c) minus the logits, that 1 − p is exact where p is large; overwritten.
            room: (3, Q, c) to work in; the derivatives lie there.
            weight: (Q, c) of each pair.
        """
        first, second, third = room
        rest = minus_x.sigmoid_().clamp_(min=torch.finfo(minus_x.dtype).tiny)  # 1 − p; its logarithm stays finite
        p = torch.sub(rest.new_ones(()), rest, out=first)
        if self.kind in ("l1", "l2"):
            power = 1 if self.kind == "l1" else 2
            discount, minus_cost = torch.pow(p, power - 1, out=second), torch.neg(p, out=third)
            bend = rest.mul_(p).mul_(power)
        else:
            discount, minus_cost = _power(p, self._gamma, out=second), torch.log(rest, out=third)
            bend = p.addcmul_(rest, minus_cost, value=-self._gamma)
        if weight is not None:
            discount.mul_(weight)
        return torch.linalg.vecdot(discount, minus_cost).neg_(), discount.mul_(bend)

    @property
    def _gamma(self) -> float:
        """Cross-entropy is the focal loss that discounts nothing."""
        return self.gamma if self.kind == "focal" else 0.0

    @property
    def weight(self) -> float:
        """What a pair with target 0 weighs."""
        return 1 - self.alpha if self.kind == "focal" else 1.0

    @property
    def positive_weight(self) -> float:
        """What a pair with target 1 weighs, relative to its mirror image."""
        return self.alpha / (1 - self.alpha) if self.kind == "focal" else 1.0


def _power(p: Tensor, exponent: float, out: Tensor) -> Tensor:
    """The power of p; halves of small whole numbers, as the paper's 2.5, need no logarithm."""
    if exponent == 2.5:
        return torch.sqrt(p, out=out).mul_(p).mul_(p)
    return torch.pow(p, exponent, out=out)


class InterSceneLoss(nn.Module):
    """Eq. 5, in chunks: peak memory does not grow with the number of stored pixels.

    Value and gradient are accumulated in one pass over the memory, so neither the Q × P logits nor a graph of them ever
    exists. Dot products have a closed form; any other similarity is differentiated chunk by chunk, with respect to the
    embeddings of the queries, so it can have no other parameters.

    Args:
        loss: of a (query, pixel) pair.
        dot_product_scale: similarity is this times q · p; None asks the given similarity instead.
        pairs_at_once: (query, pixel) pairs of a chunk; None chooses by device.
    """

    def __init__(
        self,
        loss: PairLoss | None = None,
        *,
        dot_product_scale: float | None = None,
        pairs_at_once: int | None = None,
    ) -> None:
        super().__init__()
        self.loss = loss or PairLoss()
        self.scale = dot_product_scale
        self.pairs_at_once = pairs_at_once

    def forward(
        self,
        queries: Queries,
        image_ids: Tensor,
        stored: StoredPixels | None,
        similarity: Similarity | None = None,
        stuff_labels: Tensor | None = None,
    ) -> Tensor:
        """The mean over queries of the mean over the pixels of other images.

        Args:
            queries: Q of them.
            image_ids: (Q,) id of each query's image; stored pixels of that image are left out.
            stored: the memory.
            similarity: ⟨q, I⟩, where it is not a dot product.
            stuff_labels: (Q,) class of each query that owns stuff, −1 for the others. Such a query is to fire on stuff
                of its class wherever it is.

        Raises:
            ValueError: the similarity would learn by itself, beside the queries.
        """
        count = normalizer(queries.embeddings.new_tensor(len(queries), dtype=torch.float32))
        if stored is None or not len(stored) or not len(queries):
            return queries.embeddings.sum() * 0
        pairs = _Pairs(self, queries, image_ids, stored, similarity, stuff_labels)
        means: Tensor = _AccumulatedLoss.apply(queries.embeddings, pairs)  # type: ignore[no-untyped-call]
        return means.sum() / count


@dataclass(frozen=True)
class _Pairs:
    """All (query, pixel) pairs of a step, walked in chunks."""

    settings: InterSceneLoss
    queries: Queries
    image_ids: Tensor
    stored: StoredPixels
    similarity: Similarity | None
    stuff_labels: Tensor | None

    def accumulate(self, embeddings: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
        """(Q,) mean loss of each query, and (Q, d) its gradient."""
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        sums = embeddings.new_zeros(len(embeddings), dtype=dtype)
        counts, gradient = torch.zeros_like(sums), torch.zeros_like(embeddings, dtype=dtype)
        device = embeddings.device.type
        closed = self.settings.scale is not None
        # A similarity of several layers holds several times as much as its logits.
        pairs = self.settings.pairs_at_once or _PAIRS_AT_ONCE.get(device, 2**20) // (1 if closed else 8)
        size = max(1, pairs // len(embeddings))
        step = self._closed_form if closed else self._generic
        # Memory is asked for once: of a CPU, as much again for each chunk would cost a third of the time.
        room = embeddings.new_empty(4, len(embeddings) * min(size, len(self.stored)), dtype=dtype)
        # On a GPU, looking whether a chunk needs a mask would cost more than the mask.
        current = None if device == "cuda" else self.image_ids.unique()
        with torch.autocast(device, enabled=False):
            if with_gradient and not closed:
                self._check_only_queries_learn(embeddings.to(dtype))
            for start in range(0, len(self.stored), size):
                chunk = self.stored[start : start + size]
                needed = current is None or bool(torch.isin(chunk.image_ids, current).any())
                other = chunk.of_other_images(self.image_ids).to(dtype) if needed else None  # (Q, c)
                here = room[:, : len(embeddings) * len(chunk)].view(4, len(embeddings), -1)  # (4, Q, c)
                sums += step(embeddings.to(dtype), chunk, other, here, gradient if with_gradient else None)
                counts += len(chunk) if other is None else other.sum(1)
        share = self.settings.loss.weight / counts.clamp(min=1)
        return sums * share, gradient * share[:, None]

    def _closed_form(
        self, embeddings: Tensor, chunk: StoredPixels, other: Tensor | None, room: Tensor, gradient: Tensor | None
    ) -> Tensor:
        scale = self.settings.scale
        assert scale is not None
        pixels = chunk.embeddings.to(embeddings.dtype)
        sums, slope = self._pair_loss(torch.mm(embeddings * -scale, pixels.T, out=room[0]), chunk, other, room[1:])
        if gradient is not None:
            gradient.addmm_(slope, pixels, alpha=scale)
        return sums

    def _generic(
        self, embeddings: Tensor, chunk: StoredPixels, other: Tensor | None, room: Tensor, gradient: Tensor | None
    ) -> Tensor:
        with torch.enable_grad():
            leaf = embeddings.detach().requires_grad_(gradient is not None)
            logits = self._similarity(leaf, chunk)
        sums, slope = self._pair_loss(torch.neg(logits.detach(), out=room[0]), chunk, other, room[1:])
        if gradient is not None:
            gradient += torch.autograd.grad(logits, leaf, slope.to(logits.dtype))[0]
        return sums

    def _similarity(self, embeddings: Tensor, chunk: StoredPixels) -> Tensor:
        assert self.similarity is not None, "a similarity is needed where it is not a dot product"
        queries = replace(self.queries, embeddings=embeddings)
        return self.similarity(queries, replace(chunk, embeddings=chunk.embeddings.to(embeddings.dtype)))

    def _check_only_queries_learn(self, embeddings: Tensor) -> None:
        with torch.enable_grad():
            if self._similarity(embeddings, self.stored[:1]).requires_grad:
                raise ValueError("the similarity has parameters of its own: fold them into the queries' embeddings")

    def _pair_loss(
        self, minus_logits: Tensor, chunk: StoredPixels, other: Tensor | None, room: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(Q,) sums of the losses of a chunk, and (Q, c) slopes; zero for pixels of a query's own image."""
        loss = self.settings.loss
        if self.stuff_labels is None:
            return loss(minus_logits, room, other)
        wanted = (self.stuff_labels[:, None] == chunk.labels) & ~chunk.is_thing  # target 1
        sign = 1 - 2 * wanted.to(minus_logits.dtype)
        weight = torch.where(wanted, loss.positive_weight, 1.0).to(minus_logits.dtype)
        sums, slope = loss(minus_logits.mul_(sign), room, weight if other is None else weight * other)
        return sums, slope.mul_(sign)


class _AccumulatedLoss(torch.autograd.Function):
    """Knows its gradient when the forward is done."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, pairs: _Pairs) -> Tensor:
        means, gradient = pairs.accumulate(embeddings.detach(), with_gradient=ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient)
        ctx.dtype = embeddings.dtype
        return means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (upstream[:, None] * gradient).to(ctx.dtype), None
