"""L_inter (Eq. 5): queries must not fire on the instances of other images.

Letters: Q queries, P stored pixels, c pixels of a chunk, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uniquery.parallel import loss_normalizer
from uniquery.querying.memory import InstancePixels
from uniquery.querying.pair_loss import PairLoss
from uniquery.querying.sampling import PixelSampling
from uniquery.settings import Settings, by_name
from uniquery.structures import Pixels, Queries

Similarity = Callable[[Any, Pixels], Tensor]

# (query, pixel) pairs of a chunk: small chunks stay in a CPU's cache, large ones need fewer kernel launches.
_PAIRS_AT_ONCE = {"cpu": 2**18, "cuda": 2**22}
_GENERIC_PAIRS_AT_ONCE = {"cpu": 2**18, "cuda": 2**19}  # in all threads; hidden layers take several times the memory
_MULTIPLE = 64  # pixels of a chunk: matrix products of other sizes are slower


class InterSceneSettings(Settings):
    """L_inter (Eq. 5): queries must not fire on the instances of other images. The defaults are the paper's."""

    weight: float = Field(1.0, ge=0, description="weight of L_inter")
    ramp_steps: int = Field(
        0, ge=0, description="training forwards (steps × train.accumulate) over which the weight grows from 0"
    )
    loss: Annotated[PairLoss, BeforeValidator(by_name)] = PairLoss()
    sampling: Annotated[PixelSampling, BeforeValidator(by_name)] = PixelSampling()
    capacity: int = Field(100_000, ge=0, description="pixels in memory; 0: only the other images of the same forward")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="data type of the stored embeddings")
    negatives_per_step: int | None = Field(None, gt=0, description="read a random part of the memory; None: all of it")
    max_queries: int | None = Field(None, gt=0, description="most queries of a decoder layer that take part; None: all")
    queries: Literal["all", "matched"] = Field("all", description="matched: only queries that own an instance")
    layers: Literal["last", "all"] = Field("last", description="decoder layers whose queries take part")
    gather: bool = Field(True, description="all processes share their pixels; false: a memory per process")


class InterSceneLoss(nn.Module):
    """Eq. 5, in chunks: peak memory does not grow with the number of stored pixels.

    Value and gradient are accumulated in one pass over the memory, so neither the Q × P logits nor a graph of them ever
    exists. Dot products have a closed form; any other similarity is differentiated chunk by chunk, with respect to the
    embeddings of the queries, so it can have no other parameters. On a CPU, chunks are shared among threads, which call
    the similarity at the same time.

    Args:
        loss: the loss of a (query, pixel) pair.
        dot_product_scale: similarity is this times q · p; None: the `similarity` argument is called.
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
        stored: InstancePixels | None,
        similarity: Similarity | None = None,
        stuff_labels: Tensor | None = None,
    ) -> Tensor:
        """The mean over queries of the mean over the pixels of other images.

        Args:
            queries: Q of them.
            image_ids: (Q,) id of each query's image; stored pixels of that image are left out.
            stored: the memory.
            similarity: ⟨q, I⟩, where it is not a dot product.
            stuff_labels: (Q,) class of each query that owns stuff, −1 for the others. The target of such a query is 1
                on stuff of its class, in any image.

        Raises:
            ValueError: the similarity has parameters that require a gradient.
        """
        count = loss_normalizer(queries.embeddings.new_tensor(len(queries), dtype=torch.float32))
        if stored is None or not len(stored) or not len(queries):
            return queries.embeddings.sum() * 0
        pairs = _Pairs(self, queries, image_ids, stored, similarity, stuff_labels)
        means: Tensor = _ChunkedLoss.apply(queries.embeddings, pairs)  # type: ignore[no-untyped-call]
        return means.sum() / count


@dataclass(frozen=True)
class _Pairs:
    """All (query, pixel) pairs of a step, walked in chunks."""

    module: InterSceneLoss
    queries: Queries
    image_ids: Tensor
    stored: InstancePixels
    similarity: Similarity | None
    stuff_labels: Tensor | None

    def accumulate(self, embeddings: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
        """(Q,) mean loss of each query, and (Q, d) its gradient."""
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        device = embeddings.device.type
        if with_gradient and self.module.scale is None:
            self._check_similarity_has_no_parameters(embeddings)
        threads = torch.get_num_threads() if device == "cpu" else 1
        size = self._chunk_size(len(embeddings), device, threads)
        starts = range(0, len(self.stored), size)
        # On a GPU, checking whether a chunk needs a mask would cost more than the mask.
        query_ids = None if device == "cuda" else self.image_ids.unique()
        sums, counts, gradient = _sum_in_threads(
            [
                partial(self._accumulate, embeddings, with_gradient, query_ids, starts[i::threads], size)
                for i in range(min(threads, len(starts)))
            ]
        )
        scale = self.module.loss.weight / counts.clamp(min=1)
        return sums * scale, gradient * scale[:, None]

    def _chunk_size(self, queries: int, device: str, threads: int) -> int:
        """How many pixels a chunk has."""
        pairs = self.module.pairs_at_once
        if pairs is None and self.module.scale is not None:
            pairs = _PAIRS_AT_ONCE.get(device, 2**18)
        elif pairs is None:
            pairs = _GENERIC_PAIRS_AT_ONCE.get(device, 2**18) // min(threads, 8)
        size = max(1, pairs // queries)
        return size - size % _MULTIPLE if size > _MULTIPLE else size

    @torch.no_grad()  # threads start with gradients
    def _accumulate(
        self,
        embeddings: Tensor,
        with_gradient: bool,
        query_ids: Tensor | None,
        starts: Sequence[int],
        size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Over some chunks: (Q,) sums of the losses, (Q,) counts, (Q, d) gradients."""
        sums = embeddings.new_zeros(len(embeddings))
        counts, gradient = sums.clone(), torch.zeros_like(embeddings)
        chunk_loss = self._generic_chunk if self.module.scale is None else self._dot_product_chunk
        # Allocated once: on a CPU, allocating it for each chunk would take a third of the time.
        workspace = embeddings.new_empty(4, len(embeddings) * min(size, len(self.stored)))
        for start in starts:
            chunk = self.stored[start : start + size]
            needs_mask = query_ids is None or bool(torch.isin(chunk.image_ids, query_ids).any())
            mask = chunk.of_other_images(self.image_ids).to(embeddings.dtype) if needs_mask else None  # (Q, c)
            scratch = workspace[:, : len(embeddings) * len(chunk)].view(4, len(embeddings), -1)  # (4, Q, c)
            sums += chunk_loss(embeddings, chunk, mask, scratch, gradient if with_gradient else None)
            counts += len(chunk) if mask is None else mask.sum(1)
        return sums, counts, gradient

    def _dot_product_chunk(
        self, embeddings: Tensor, chunk: InstancePixels, mask: Tensor | None, workspace: Tensor, gradient: Tensor | None
    ) -> Tensor:
        scale = self.module.scale
        assert scale is not None
        pixels = chunk.embeddings.to(embeddings.dtype)
        minus_logits = torch.mm(embeddings * -scale, pixels.T, out=workspace[0])
        sums, derivatives = self._pair_losses(minus_logits, chunk, mask, workspace[1:])
        if gradient is not None:
            gradient.addmm_(derivatives, pixels, alpha=scale)
        return sums

    def _generic_chunk(
        self, embeddings: Tensor, chunk: InstancePixels, mask: Tensor | None, workspace: Tensor, gradient: Tensor | None
    ) -> Tensor:
        with torch.enable_grad():
            leaf = embeddings.detach().requires_grad_(gradient is not None)
            logits = self._similarity(leaf, chunk)
        minus_logits = torch.neg(logits.detach(), out=workspace[0])
        sums, derivatives = self._pair_losses(minus_logits, chunk, mask, workspace[1:])
        if gradient is not None:
            gradient += torch.autograd.grad(logits, leaf, derivatives.to(logits.dtype))[0]
        return sums

    def _similarity(self, embeddings: Tensor, chunk: InstancePixels) -> Tensor:
        assert self.similarity is not None, "a similarity is needed where it is not a dot product"
        queries = replace(self.queries, embeddings=embeddings)
        return self.similarity(queries, replace(chunk, embeddings=chunk.embeddings.to(embeddings.dtype)))

    def _check_similarity_has_no_parameters(self, embeddings: Tensor) -> None:
        with torch.enable_grad():
            if self._similarity(embeddings, self.stored[:1]).requires_grad:
                raise ValueError(
                    "the similarity has trainable parameters; only gradients for query embeddings are supported"
                )

    def _pair_losses(
        self, minus_logits: Tensor, chunk: InstancePixels, mask: Tensor | None, workspace: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(Q,) sums of the losses of a chunk, and (Q, c) derivatives; zero for pixels of a query's own image."""
        loss = self.module.loss
        if self.stuff_labels is None:
            return loss(minus_logits, workspace, mask)
        is_positive = (self.stuff_labels[:, None] == chunk.labels) & ~chunk.is_thing  # target 1
        sign = 1 - 2 * is_positive.to(minus_logits.dtype)
        weight = torch.where(is_positive, loss.positive_weight, 1.0).to(minus_logits.dtype)
        sums, derivatives = loss(minus_logits.mul_(sign), workspace, weight if mask is None else weight * mask)
        return sums, derivatives.mul_(sign)


def _sum_in_threads(parts: Sequence[Callable[[], tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
    """The sum of what the parts return; each runs in a thread of its own, in which an operator uses one core.

    Operators that share the cores wait for each other at the end of each one; beside other busy processes, that takes
    longer than the work.
    """
    if len(parts) == 1:
        return parts[0]()
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(parts), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = [future.result() for future in [pool.submit(part) for part in parts]]
    finally:
        torch.set_num_threads(threads)  # the pool also changed the number for threads that start later
    return tuple(torch.stack(column).sum(0) for column in zip(*results, strict=True))


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradient already in the forward pass."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, pairs: _Pairs) -> Tensor:
        with torch.autocast(embeddings.device.type, enabled=False):
            means, gradient = pairs.accumulate(embeddings.detach(), with_gradient=ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient)
        ctx.dtype = embeddings.dtype
        return means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (upstream[:, None] * gradient).to(ctx.dtype), None
