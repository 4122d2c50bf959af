"""The interface between the method and a model: what a query-based segmenter implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from uniquery.masks.panoptic import PanopticSegments
from uniquery.structures import (
    Assignment,
    Images,
    Instances,
    Outputs,
    PixelMap,
    Pixels,
    Queries,
    Targets,
    rows_by_image,
)

OutputsT = TypeVar("OutputsT", bound=Outputs)
AssignmentT = TypeVar("AssignmentT", bound=Assignment)
QueriesT = TypeVar("QueriesT", bound=Queries)


class Segmenter(nn.Module, ABC, Generic[OutputsT, AssignmentT, QueriesT]):
    """A query-based segmenter: masks are ⟨q, I⟩, the similarity of queries and pixel embeddings.

    A subclass may extend `Outputs`, `Assignment` and `Queries`; `docs/paper.md` maps each method to the paper.

    Attributes:
        dot_product_scale: set it if the similarity is this factor times q · p, which is computed faster; else None.
    """

    dot_product_scale: float | None = None

    @abstractmethod
    def forward(self, images: Images) -> OutputsT:
        """Forward pass: pixel embeddings (f) and queries (h)."""

    @abstractmethod
    def assign(self, outputs: OutputsT, targets: Sequence[Targets]) -> AssignmentT:
        """σ: which query owns (is matched or assigned to) which instance; no gradient."""

    @abstractmethod
    def queries(self, outputs: OutputsT, assignment: AssignmentT) -> QueriesT:
        """The queries that take part in training, each with its image and the instance it owns; no randomness.

        Dynamic filters: those of positive samples. Set prediction: all of the last decoder layer, matched or not.
        """

    def layer_queries(self, outputs: OutputsT, assignment: AssignmentT) -> Sequence[QueriesT]:
        """`queries` of every decoder layer, from first to last; one entry without decoder layers."""
        return [self.queries(outputs, assignment)]

    def similarity(self, queries: QueriesT, pixels: Pixels) -> Tensor:
        """⟨q, I⟩ as (Q, P) logits of every query on any set of pixels; by default the scaled dot product."""
        if self.dot_product_scale is None:
            raise NotImplementedError("override similarity, or set dot_product_scale")
        dtype = torch.promote_types(queries.embeddings.dtype, pixels.embeddings.dtype)
        return (queries.embeddings * self.dot_product_scale).to(dtype) @ pixels.embeddings.to(dtype).T

    def decode(self, queries: QueriesT, pixel_map: PixelMap) -> Tensor:
        """⟨q, I⟩ as (Q, h, w) logits of each query on the map of its own image."""
        order, rows = rows_by_image(queries.image, len(pixel_map.embeddings))
        logits = [self.similarity(queries[index], pixel_map.of_image(i)) for i, index in enumerate(rows)]
        return torch.cat(logits)[order.argsort()].view(-1, *pixel_map.embeddings.shape[-2:])

    @abstractmethod
    def mask_loss(self, logits: Tensor, queries: QueriesT, targets: Sequence[Targets]) -> Tensor:
        """The base objective's own mask loss, with its weight, on the (Q, h, w) logits of `decode`.

        Every query given here owns an instance. The segmenter may upsample the logits, sample points or resize the
        ground truth before the loss. Pixels outside `Targets.valid` do not count.
        """

    @abstractmethod
    def losses(self, outputs: OutputsT, targets: Sequence[Targets], assignment: AssignmentT) -> dict[str, Tensor]:
        """The base objective (Eq. 3), each term weighted; every parameter gets a gradient, also without instances."""

    @abstractmethod
    def predict(
        self, outputs: OutputsT, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        """Instances of each image, with masks at the given (height, width)."""

    def predict_panoptic(
        self,
        outputs: OutputsT,
        sizes: Sequence[tuple[int, int]],
        is_thing: Sequence[bool],
        *,
        object_threshold: float | None = None,
        overlap_threshold: float | None = None,
    ) -> list[PanopticSegments]:
        """Segments of things and stuff of each image; only of segmenters whose settings have `supports_panoptic`.

        Args:
            outputs: what `forward` gave.
            sizes: (height, width) of each result.
            is_thing: whether each class is a thing.
            object_threshold: least class score of a segment; None: the model's own.
            overlap_threshold: least share of its own area that a mask must keep; None: the model's own.
        """
        raise NotImplementedError("this segmenter does not predict stuff")
