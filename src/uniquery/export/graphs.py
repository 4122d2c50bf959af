"""Each segmenter as a graph from pixels to instances: its own forward, then its `predict` on whole batches.

Masks stay on their map, and each image has as many instances as the one that has most. What `predict` does at the size
of the caller's image is left to `MaskFrame`: masks are resized, and boxes and scores that come from them follow.

Letters: B images, L locations or cells, C classes, k instances, D channels, P pixels, h × w the map, S × S a square.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uniquery.errors import UserError
from uniquery.export.selection import boxes_of_masks, clip_boxes, mean_inside, select_best, suppress, take
from uniquery.layers.padding import repeat_border
from uniquery.layers.resize import aligned_bilinear
from uniquery.masks.suppression import matrix_nms
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.box_set import to_corners
from uniquery.segmenters.condinst import FILTER_CHANNELS, CondInst, split_filters
from uniquery.segmenters.grid import MASK_STRIDE as GRID_STRIDE
from uniquery.segmenters.grid import find_peaks, pairs_to_score
from uniquery.segmenters.grid_segmenter import LEVEL_STRIDES, GridSegmenter
from uniquery.segmenters.mask2former import MASK_STRIDE as MASK2FORMER_STRIDE
from uniquery.segmenters.mask2former import Mask2Former
from uniquery.segmenters.solq import SOLQ
from uniquery.segmenters.sparseinst import STRIDES, SparseInst
from uniquery.structures import Images, grid_locations

InstanceTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""(B, k) scores, (B, k) labels, (B, k, 4) boxes in input pixels, (B, k, h, w) masks as probabilities."""


@dataclass(frozen=True)
class MaskFrame:
    """Where the cells of a mask lie, and how it becomes a mask of the caller's image.

    Attributes:
        kind: "image": the masks cover the padded input; "box": each covers its own box.
        stride: input pixels that a cell spans; 0 in a box.
        offset: input pixel at which the first cell lies; values between cells are linear.
        resize: what is resized, the probabilities or their logits.
        boxes_from_masks: whether the boxes are those around the resized masks.
        scores_from_masks: whether a score contains the mean probability of the mask, which then is that of the resized
            mask.
    """

    kind: Literal["image", "box"]
    stride: int = 0
    offset: float = 0.0
    resize: Literal["probabilities", "logits"] = "probabilities"
    boxes_from_masks: bool = False
    scores_from_masks: bool = False


class Graph(nn.Module, ABC):
    """(B, 3, H, W) uint8 RGB pixels, padded to multiples of 32, and (B, 2) int64 sizes before padding, to instances."""

    frame: MaskFrame

    def __init__(self, model: Segmenter[Any, Any, Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, sizes: Tensor) -> InstanceTensors:
        """See the class."""
        outputs = self.model(Images(images, cast(Any, sizes)))  # a tensor of sizes is what the layers expect here
        return self.instances(outputs, sizes)

    @abstractmethod
    def instances(self, outputs: Any, sizes: Tensor) -> InstanceTensors:
        """What `predict` does, for all images at once."""


class CondInstGraph(Graph):
    """CondInst."""

    model: CondInst

    def __init__(self, model: CondInst) -> None:
        super().__init__(model)
        self.frame = MaskFrame("image", model.stride // 2, offset=model.stride // 2 // 2)

    def instances(self, outputs: Any, sizes: Tensor) -> InstanceTensors:
        """See the base."""
        config, classes = self.model.config, outputs.logits.shape[2]
        products = outputs.logits.sigmoid() * outputs.centerness.sigmoid()[..., None]  # (B, L, C)
        products = torch.where(products > config.score_threshold, products, 0)
        chosen_scores, chosen, start = [], [], 0
        for level, length in zip(products.split(list(outputs.lengths), dim=1), outputs.lengths, strict=True):
            scores, index = select_best(level.flatten(1), config.candidates)
            chosen_scores.append(scores)
            chosen.append(index + start * classes)
            start = start + length
        scores, pairs = torch.cat(chosen_scores, dim=1), torch.cat(chosen, dim=1)  # (B, N)
        location, labels = pairs // classes, pairs % classes
        distances = take(outputs.distances, location) * outputs.strides[location][..., None]
        centers = outputs.locations[location]
        boxes = torch.cat([centers - distances[..., :2], centers + distances[..., 2:]], dim=2)
        one_class = labels[:, None] == torch.arange(classes, device=labels.device)[:, None]  # (B, C, N)
        kept = suppress(boxes, torch.where(one_class, scores[:, None], 0), config.nms_threshold)
        scores, index = select_best(scores * kept, config.max_detections)
        boxes = clip_boxes(take(boxes, index), sizes)
        scores = torch.where((boxes[..., 2:] > boxes[..., :2]).all(2), scores.sqrt(), 0)
        logits = self._decode(outputs, take(location, index))
        masks = aligned_bilinear(logits, 2).sigmoid()
        return scores, take(labels, index), boxes, masks

    def _decode(self, outputs: Any, location: Tensor) -> Tensor:
        """(B, k, h, w): `CondInst.similarity` of (B, k) locations on the map of their image."""
        embeddings = outputs.pixels.embeddings  # (B, D, h, w)
        height, width = embeddings.shape[-2:]
        weights, biases = split_filters(
            take(outputs.filters, location).flatten(0, 1), embeddings.shape[1]
        )  # (B · k, …)
        per_pixel = -1 / self._sizes_of_interest(outputs.strides[location]).flatten()[:, None, None]
        position, content = weights[0][..., :2] * per_pixel, weights[0][..., 2:]
        offset = biases[0] - (position * outputs.locations[location].flatten(0, 1)[:, None]).sum(2)
        layer = torch.cat([position, content, offset[..., None]], dim=2)  # (B · k, 8, 2 + D + 1)
        layer = layer.unflatten(0, location.shape).flatten(1, 2)  # (B, k · 8, 2 + D + 1)
        xy = grid_locations(height, width, outputs.pixels.stride, embeddings.device).T  # (2, P)
        values = embeddings.flatten(2)
        xy = xy.expand(values.shape[0], -1, -1)
        values = torch.cat([xy, values, torch.ones_like(values[:, :1])], dim=1)  # (B, 2 + D + 1, P)
        hidden = (layer @ values).relu().unflatten(1, (-1, FILTER_CHANNELS)).flatten(0, 1)  # (B · k, 8, P)
        hidden = (weights[1] @ hidden + biases[1][..., None]).relu()
        logits = weights[2] @ hidden + biases[2][..., None]
        masks: Tensor = logits.squeeze(1).unflatten(0, location.shape).unflatten(2, (height, width))
        return masks

    def _sizes_of_interest(self, strides: Tensor) -> Tensor:
        """The scale of relative coordinates of each of some strides."""
        total = torch.zeros_like(strides, dtype=torch.float32)
        for stride, size in self.model.sizes_of_interest.items():
            total = torch.where(strides == stride, size, total)
        return total


class GridGraph(Graph):
    """SOLOv2 and SOTR."""

    model: GridSegmenter

    def __init__(self, model: GridSegmenter) -> None:
        super().__init__(model)
        self.frame = _image_frame(GRID_STRIDE)
        grids = torch.tensor(model.config.grids)
        strides = torch.tensor(LEVEL_STRIDES[: len(grids)])
        self.register_buffer("min_area", strides.repeat_interleave(grids.square()), persistent=False)  # (L,)

    def instances(self, outputs: Any, sizes: Tensor) -> InstanceTensors:
        """See the base."""
        config, classes = self.model.config, outputs.logits.shape[2]
        class_scores = outputs.logits.sigmoid()  # (B, L, C)
        is_candidate = find_peaks(class_scores, config.grids) & (class_scores > config.score_threshold)
        class_scores = torch.where(is_candidate, class_scores, 0).flatten(1)
        scores, pairs = select_best(class_scores, min(pairs_to_score(config.candidates), class_scores.shape[1]))
        cells, labels = pairs // classes, pairs % classes
        masks = _products(take(outputs.kernels, cells), outputs.pixels.embeddings).sigmoid()  # (B, N, h, w)
        area, maskness = mean_inside(masks, masks > config.mask_threshold)
        large = area > cast(Tensor, self.min_area)[cells]
        scores, index = select_best(torch.where(large, scores * maskness, 0), config.candidates)
        labels, masks = take(labels, index), take(masks, index)
        decayed = matrix_nms(masks > config.mask_threshold, scores, labels, config.nms_sigma)
        decayed = torch.where(decayed >= config.final_threshold, decayed, 0)
        scores, index = select_best(decayed, config.max_detections)
        masks = take(masks, index)
        return scores, take(labels, index), boxes_of_masks(masks > config.mask_threshold, GRID_STRIDE, sizes), masks


class SparseInstGraph(Graph):
    """SparseInst."""

    model: SparseInst

    def __init__(self, model: SparseInst) -> None:
        super().__init__(model)
        self.frame = _image_frame(STRIDES[0] // 2)

    def instances(self, outputs: Any, sizes: Tensor) -> InstanceTensors:
        """See the base."""
        config = self.model.config
        scores, labels = (outputs.logits.sigmoid() * outputs.objectness.sigmoid()[..., None]).sqrt().max(2)
        scores, index = select_best(torch.where(scores > config.score_threshold, scores, 0), config.queries)
        labels = take(labels, index)
        logits = _products(take(outputs.kernels, index), outputs.pixels.embeddings)
        masks = F.interpolate(logits, scale_factor=2, mode="bilinear").sigmoid()
        _, maskness = mean_inside(masks, masks > config.mask_threshold, eps=1e-6)
        scores, index = select_best(scores * maskness, config.max_detections)
        labels, masks = take(labels, index), take(masks, index)
        return scores, labels, boxes_of_masks(masks > config.mask_threshold, STRIDES[0] // 2, sizes), masks


class Mask2FormerGraph(Graph):
    """Mask2Former."""

    model: Mask2Former

    def __init__(self, model: Mask2Former) -> None:
        super().__init__(model)
        self.frame = _image_frame(MASK2FORMER_STRIDE, resize="logits", scores_from_masks=True)

    def instances(self, outputs: Any, sizes: Tensor) -> InstanceTensors:
        """See the base."""
        config = self.model.config
        scores = outputs.logits[-1].softmax(dim=2)[..., :-1]  # (B, N, C)
        best, query, labels = _best_pairs(scores, config.max_detections)
        masks = _products(take(outputs.embeddings[-1], query), outputs.pixels.embeddings).sigmoid()
        if not config.attend_padding:
            masks = repeat_border(masks, sizes, MASK2FORMER_STRIDE)  # padding does not count when they are resized
        inside = masks > config.mask_threshold
        _, maskness = mean_inside(masks, inside)
        return best * maskness, labels, boxes_of_masks(inside, MASK2FORMER_STRIDE, sizes), masks


class SOLQGraph(Graph):
    """SOLQ."""

    model: SOLQ

    def __init__(self, model: SOLQ) -> None:
        super().__init__(model)
        self.frame = MaskFrame("box")
        basis, index = model.mask_vectors.basis(torch.zeros(1))
        source = torch.full((len(basis) ** 2,), len(index))  # where each coefficient is in the vector, if it is
        source[index] = torch.arange(len(index))
        self.register_buffer("basis", basis, persistent=False)  # (U, S)
        self.register_buffer("source", source, persistent=False)  # (U · U,)

    def instances(self, outputs: Any, sizes: Tensor) -> InstanceTensors:
        """See the base."""
        config, basis, source = self.model.config, cast(Tensor, self.basis), cast(Tensor, self.source)
        best, query, labels = _best_pairs(outputs.logits[-1].sigmoid(), config.max_detections)
        vectors = self.model.vectors(take(outputs.embeddings[-1], query))  # (B, k, V)
        coefficients = F.pad(vectors, (0, 1))[..., source].unflatten(2, (len(basis), -1))  # (B, k, U, U)
        values = basis.T @ coefficients @ basis  # (B, k, S, S)
        low, high = values.flatten(2).amin(2)[..., None, None], values.flatten(2).amax(2)[..., None, None]
        masks = torch.where(low > config.mask_threshold, 1.0, (values - low) / (high - low).clamp(min=1e-6))
        boxes = to_corners(take(outputs.boxes[-1], query)) * sizes.flip(1).repeat(1, 2)[:, None]
        return best, labels, boxes, masks


def _image_frame(stride: int, **changes: Any) -> MaskFrame:
    """The frame of masks that are resized like any image, the center of a cell being that of its pixels."""
    return MaskFrame("image", stride, offset=(stride - 1) / 2, boxes_from_masks=True, **changes)


def _products(queries: Tensor, embeddings: Tensor) -> Tensor:
    """(B, k, h, w): (B, k, D) queries times (B, D, h, w) pixel embeddings."""
    products: Tensor = (queries @ embeddings.flatten(2)).unflatten(2, embeddings.shape[-2:])
    return products


def _best_pairs(scores: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of (B, N, C) scores: (B, k) score, query and class of each."""
    best, pairs = scores.flatten(1).topk(min(limit, scores.shape[1] * scores.shape[2]), dim=1)
    return best, pairs // scores.shape[2], pairs % scores.shape[2]


def build_graph(model: Segmenter[Any, Any, Any]) -> Graph:
    """The graph of a segmenter.

    Raises:
        UserError: there is none for its class.
    """
    graphs: list[tuple[type[Any], type[Any]]] = [
        (CondInst, CondInstGraph),
        (GridSegmenter, GridGraph),
        (SparseInst, SparseInstGraph),
        (Mask2Former, Mask2FormerGraph),
        (SOLQ, SOLQGraph),
    ]
    for kind, graph in graphs:
        if isinstance(model, kind):
            return cast(Graph, graph(model).eval())
    raise UserError(f"{type(model).__name__} cannot be exported: only the segmenters of uniquery can.")
