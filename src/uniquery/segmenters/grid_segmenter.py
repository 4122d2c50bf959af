"""What SOLOv2 and SOTR share: settings, assignment, losses, predictions, and the mask head.

Letters: B images, G levels, each with a grid of S × S cells, L cells of all levels, C classes, K instances of an image,
Q queries, N candidates of an image, D channels of a kernel and of a pixel, h × w the mask map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from uniquery.layers.padding import GroupNorm
from uniquery.masks.losses import dice, sigmoid_focal
from uniquery.masks.suppression import matrix_nms
from uniquery.matching import ignored_locations, random_subset
from uniquery.parallel import all_reduce_mean, get_world_size, loss_normalizer
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.federated import drop_unlabeled_classes
from uniquery.segmenters.grid import (
    MASK_STRIDE,
    assign_cells,
    cell_centers,
    coordinates,
    paste_instances,
    positive_cells,
    quarter_masks,
    quarter_valid,
    score_candidates,
)
from uniquery.segmenters.settings import SegmenterSettings
from uniquery.structures import (
    Assignment,
    Instances,
    Outputs,
    Queries,
    Targets,
    at_least_float32,
    index_in_batch,
)

LEVEL_STRIDES = (8, 8, 16, 32, 32)  # strides of the features that each level's grid is resized from
MASK_WEIGHT = 3.0


class GridSettings(SegmenterSettings):
    """Settings of a segmenter that predicts on grids; the defaults are those of SOLOv2 and SOTR."""

    channels: int = Field(256, gt=0, multiple_of=32, description="FPN channels")
    mask_channels: int = Field(128, gt=0, multiple_of=32, description="channels of the mask head")
    kernel_channels: int = Field(256, gt=0, multiple_of=32, description="channels of kernels and pixel embeddings")
    grids: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        (40, 36, 24, 16, 12), min_length=1, max_length=5, description="cells along a side of each level's grid"
    )
    size_ranges: tuple[tuple[float, float], ...] = Field(
        ((1, 96), (48, 192), (96, 384), (192, 768), (384, 2048)),
        description="smallest and largest √(box area) in pixels of the instances of each level; they may overlap",
    )
    center_fraction: float = Field(
        0.2, ge=0, le=1, description="fraction of the box around the centroid whose cells are positive"
    )
    max_queries: int = Field(10_000, gt=0, description="positives that decode a mask in a training step")
    score_threshold: float = Field(0.1, ge=0, le=1, description="smallest class score before NMS")
    candidates: int = Field(500, gt=0, description="most candidates before NMS")
    nms_sigma: float = Field(2.0, gt=0, description="how sharply overlap lowers a score")
    final_threshold: float = Field(0.05, ge=0, le=1, description="smallest score after matrix NMS")

    @property
    def has_federated_loss(self) -> bool:
        """See the base."""
        return True

    @property
    def memory_advice(self) -> str:
        """See the base."""
        return "a smaller model.max_queries"

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        ranges = self.size_ranges
        if len(ranges) != len(self.grids):
            raise ValueError(
                f"'size_ranges' has {len(ranges)} values; give {len(self.grids)}, one for each of the 'grids'"
            )
        if any(not 0 <= low < high for low, high in ranges):
            raise ValueError("each of the 'size_ranges' must go from 0 or more to a larger size")
        if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(ranges)):
            raise ValueError("'size_ranges' must grow from level to level")
        for (_, high), (low, _) in pairwise(ranges):
            if high < low:
                raise ValueError(f"'size_ranges' leave out instances of {high:g} to {low:g} pixels; make them overlap")
        return self


@dataclass(frozen=True)
class GridOutputs(Outputs):
    """What is predicted in each cell of all levels, finest level first, row by row.

    Attributes:
        logits: (B, L, C) class logits.
        kernels: (B, L, D).
        sizes: valid (height, width) of each image.
    """

    logits: Tensor
    kernels: Tensor
    sizes: tuple[tuple[int, int], ...]


class GridSegmenter(Segmenter[GridOutputs, Assignment, Queries]):
    """Each cell of a grid classifies the instance centered on it, and predicts the 1×1 kernel of its mask.

    A subclass defines `forward`.
    """

    dot_product_scale = 1.0
    config: GridSettings

    @torch.no_grad()
    def assign(self, outputs: GridOutputs, targets: Sequence[Targets]) -> Assignment:
        c = self.config
        extent = self._extent(outputs)
        pairs = [assign_cells(t, extent, c.grids, c.size_ranges, c.center_fraction) for t in targets]
        image = [torch.full_like(cells, i) for i, (cells, _) in enumerate(pairs)]
        cells, owned = (torch.cat(column) for column in zip(*pairs, strict=True))
        has_query = random_subset(len(cells), c.max_queries, cells.device)
        return Assignment(query=cells, image=torch.cat(image), target=owned, has_query=has_query)

    @staticmethod
    def _extent(outputs: GridOutputs) -> tuple[int, int]:
        """(height, width) in pixels that the grids span: the padded image."""
        height, width = outputs.pixels.embeddings.shape[-2:]
        return MASK_STRIDE * height, MASK_STRIDE * width

    def queries(self, outputs: GridOutputs, assignment: Assignment) -> Queries:
        assignment = assignment[assignment.has_query]
        kernels = outputs.kernels[assignment.image, assignment.query]
        return Queries(kernels, assignment.image, assignment.target)

    def mask_loss(self, logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> Tensor:
        probabilities = at_least_float32(logits).sigmoid()  # (Q, h, w)
        masks = torch.cat([quarter_masks(t.masks) for t in targets])[
            index_in_batch(targets, queries.image, queries.target)
        ]
        if any(t.valid is not None for t in targets):
            valid = torch.stack([quarter_valid(t) for t in targets])[queries.image]  # (Q, h, w)
            probabilities, masks = torch.where(valid, probabilities, 0), masks & valid
        count = loss_normalizer(probabilities.new_tensor(len(queries)))
        return MASK_WEIGHT * dice(probabilities, masks, eps=2e-3).sum() / count

    def losses(self, outputs: GridOutputs, targets: Sequence[Targets], assignment: Assignment) -> dict[str, Tensor]:
        image, cells, labels = positive_cells(assignment, targets, outputs.logits.shape[1])
        is_class = torch.zeros_like(outputs.logits)
        is_class[image, cells, labels] = 1
        class_losses = sigmoid_focal(at_least_float32(outputs.logits), is_class)
        if any(t.valid is not None for t in targets):
            centers = cell_centers(self.config.grids, self._extent(outputs), is_class.device)
            ignored = ignored_locations(centers, assignment, targets)  # (B, L)
            class_losses = class_losses.masked_fill(ignored[..., None], 0)
        class_losses = drop_unlabeled_classes(class_losses, is_class, targets)
        # The number of positive cells plus one, over all processes: each process adds its share of that one.
        positives = all_reduce_mean(class_losses.new_tensor(len(cells))) + 1 / get_world_size()
        queries = self.queries(outputs, assignment)
        return {
            "loss_class": class_losses.sum() / positives,
            "loss_mask": self.mask_loss(self.decode(queries, outputs.pixels), queries, targets),
        }

    @torch.no_grad()
    def predict(
        self, outputs: GridOutputs, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        threshold = self.config.mask_threshold if mask_threshold is None else mask_threshold
        return [self._predict_one(outputs, i, size, threshold) for i, size in enumerate(sizes)]

    def _predict_one(self, outputs: GridOutputs, i: int, size: tuple[int, int], mask_threshold: float) -> Instances:
        cells, labels, scores = self._candidates(outputs, i, mask_threshold)
        probabilities = self._probabilities(outputs, i, cells)  # (N, h, w)
        scores = matrix_nms(probabilities > mask_threshold, scores, labels, self.config.nms_sigma)
        order = scores.argsort(descending=True, stable=True)[: self.config.max_detections]
        order = order[scores[order] >= self.config.final_threshold]
        return paste_instances(
            probabilities[order], scores[order], labels[order], outputs.sizes[i], size, mask_threshold
        )

    def _candidates(self, outputs: GridOutputs, i: int, mask_threshold: float) -> tuple[Tensor, Tensor, Tensor]:
        """(N,) cell, class and score of the best pairs of an image."""
        return score_candidates(
            outputs.logits[i].float().sigmoid(),
            self.config.grids,
            LEVEL_STRIDES,
            partial(self._probabilities, outputs, i),
            score_threshold=self.config.score_threshold,
            mask_threshold=mask_threshold,
            max_candidates=self.config.candidates,
        )

    def _probabilities(self, outputs: GridOutputs, i: int, cells: Tensor) -> Tensor:
        """(N, h, w): the masks of some cells of one image."""
        queries = Queries(outputs.kernels[i, cells], torch.full_like(cells, i), torch.full_like(cells, -1))
        probabilities = self.similarity(queries, outputs.pixels.of_image(i)).float().sigmoid()
        return probabilities.view(-1, *outputs.pixels.embeddings.shape[-2:])


def grid_levels(p2: Tensor, p3: Tensor, p4: Tensor, p5: Tensor) -> tuple[Tensor, ...]:
    """Features of strides 4, 8, 16, 32 → those of the five levels, of strides 8, 8, 16, 32, 32."""
    return (
        F.interpolate(p2, scale_factor=0.5, mode="bilinear"),
        p3,
        p4,
        p5,
        F.interpolate(p5[..., ::2, ::2], size=p5.shape[-2:], mode="bilinear"),  # p6 is every second cell of p5
    )


def flatten_levels(levels: Sequence[Tensor]) -> Tensor:
    """(B, C, S, S) of each level → (B, L, C)."""
    return torch.cat([x.flatten(2).mT for x in levels], dim=1)


class MaskHead(nn.Module):
    """Four levels, refined and upsampled to the finest step by step, summed; then embeddings, after a ReLU.

    Args:
        in_channels: channels of each level.
        channels: channels of the refined levels.
        out_channels: channels of the embeddings.
        with_coordinates: whether the coarsest level gets two channels of coordinates.
    """

    def __init__(self, in_channels: int, channels: int, out_channels: int, *, with_coordinates: bool) -> None:
        super().__init__()
        self.with_coordinates = with_coordinates
        self.refine = nn.ModuleList([_block(in_channels, channels)])
        for steps, inputs in ((1, in_channels), (2, in_channels), (3, in_channels + 2 * with_coordinates)):
            blocks = [_block(inputs if step == 0 else channels, channels) for step in range(steps)]
            up = nn.Upsample(scale_factor=2, mode="bilinear")
            self.refine.append(nn.Sequential(*(layer for block in blocks for layer in (block, up))))
        self.project = _block(channels, out_channels, kernel_size=1)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Four (B, in_channels, h / 2^i, w / 2^i) → (B, out_channels, h, w)."""
        *finer, coarsest = levels
        if self.with_coordinates:
            coarsest = torch.cat([coarsest, coordinates(coarsest)], dim=1)
        x, *others = (refine(features) for refine, features in zip(self.refine, (*finer, coarsest), strict=True))
        for other in others:
            x = x + other
        return cast(Tensor, self.project(x))


def _block(inputs: int, outputs: int, kernel_size: int = 3) -> nn.Sequential:
    """Convolution, group normalization, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2, bias=False)
    nn.init.normal_(conv.weight, std=0.01)
    return nn.Sequential(conv, GroupNorm(outputs), nn.ReLU(inplace=True))
