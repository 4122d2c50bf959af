"""CondInst: conditional convolutions for instance segmentation (Tian et al., ECCV 2020).

Letters: B images, L locations of all levels, C classes, Q queries, P pixels, D mask channels, h × w the mask map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from uniquery.backbones import Backbone
from uniquery.layers.fpn import FPN
from uniquery.layers.inplace_relu import inplace_relu
from uniquery.layers.normalize import Normalize
from uniquery.layers.padding import GroupNorm
from uniquery.layers.resize import aligned_bilinear, aligned_linear_matrix
from uniquery.layers.winograd import SharedConv3x3, SharedSequential
from uniquery.masks.losses import dice, sigmoid_focal
from uniquery.masks.paste import encode_masks, resize_matrix, scale_boxes
from uniquery.masks.suppression import nms
from uniquery.matching import assign_points, box_distances, ignored_locations, random_subset
from uniquery.parallel import all_reduce_mean, loss_normalizer
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.federated import drop_unlabeled_classes
from uniquery.segmenters.settings import SegmenterSettings
from uniquery.structures import (
    Assignment,
    Images,
    Instances,
    Outputs,
    PixelMap,
    Pixels,
    Queries,
    Targets,
    at_least_float32,
    grid_locations,
    index_in_batch,
)

FILTER_CHANNELS = 8


class CondInstConfig(SegmenterSettings):
    """Settings of CondInst; the defaults are the original's."""

    name: Literal["condinst"] = "condinst"
    channels: int = Field(256, gt=0, multiple_of=32, description="channels of the FPN and the heads")
    head_convs: int = Field(4, ge=0, description="convolutions of each head tower")
    mask_channels: int = Field(128, gt=0, multiple_of=32, description="channels of the mask branch")
    mask_convs: int = Field(4, ge=0, description="convolutions of the mask branch")
    mask_norm: Literal["batch", "group"] = Field("batch", description="group: GroupNorm, for small batches")
    finest_stride: Literal[4, 8] = Field(
        8, description="stride of the first level and of the pixel embeddings; 4: small objects"
    )
    levels: int = Field(5, ge=3, le=6, description="levels of the FPN")
    size_limits: tuple[float, ...] | None = Field(
        None, description="box sizes that separate the levels, in pixels; None: 8 strides of each level"
    )
    max_queries: int = Field(500, gt=0, description="positives that decode a mask in a training step")
    score_threshold: float = Field(0.05, ge=0, le=1, description="smallest class × centerness, before the square root")
    candidates: int = Field(1000, gt=0, description="most candidates per level before NMS")
    nms_threshold: float = Field(0.6, ge=0, le=1, description="IoU of boxes above which NMS keeps the better")

    @property
    def has_federated_loss(self) -> bool:
        """See the base."""
        return True

    @property
    def memory_advice(self) -> str:
        """See the base."""
        return "a smaller model.max_queries"

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        limits = self.size_limits
        if limits is not None and len(limits) != self.levels - 1:
            raise ValueError(
                f"'size_limits' has {len(limits)} values; give {self.levels - 1}, one between each two of the "
                f"{self.levels} levels"
            )
        if limits is not None and any(low >= high for low, high in pairwise((0, *limits))):
            raise ValueError("'size_limits' must be positive and grow from level to level")
        if self.finest_stride == 4 and self.levels < 4:
            raise ValueError("'levels' must be at least 4 with finest_stride 4, which uses all four strides")
        return self


@dataclass(frozen=True)
class CondInstOutputs(Outputs):
    """What CondInst predicts at each location of all levels, finest level first.

    Attributes:
        logits: (B, L, C) class logits.
        distances: (B, L, 4) left, top, right, bottom, in strides.
        centerness: (B, L) logits.
        filters: (B, L, F) dynamic parameters.
        locations: (L, 2) x, y in input pixels.
        strides: (L,) stride of each location's level.
        lengths: number of locations of each level.
        sizes: valid (height, width) of each image.
    """

    logits: Tensor
    distances: Tensor
    centerness: Tensor
    filters: Tensor
    locations: Tensor
    strides: Tensor
    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CondInstQueries(Queries):
    """Dynamic filters. They read pixel coordinates relative to their own location, divided by a scale.

    Attributes:
        locations: (Q, 2) x, y in input pixels.
        sizes_of_interest: (Q,) scale in pixels that relative coordinates are divided by; AdelaiDet's name.
    """

    locations: Tensor
    sizes_of_interest: Tensor


class CondInst(Segmenter[CondInstOutputs, Assignment, CondInstQueries]):
    """FCOS detects; a controller predicts three 1×1 layers per location; they run over the mask branch's map."""

    def __init__(self, backbone: Backbone, num_classes: int, config: CondInstConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or CondInstConfig()
        self.stride = config.finest_stride
        used = {stride: c for stride, c in backbone.channels.items() if stride >= self.stride}
        self.normalize = Normalize(backbone.pixels.mean, backbone.pixels.std, backbone.pixels.order)
        self.backbone = backbone
        backbone.use_outputs(used)
        self.fpn = FPN(used, config.channels, extra_levels=config.levels - len(used))
        self.head = FCOSHead(config.channels, config.head_convs, num_classes, config.levels)
        self.mask_branch = MaskBranch(config.channels, config.mask_channels, config.mask_convs, config.mask_norm)
        strides = [self.stride * 2**level for level in range(config.levels)]
        limits = config.size_limits or [8.0 * stride for stride in strides[:-1]]
        self.size_ranges = dict(zip(strides, zip([-1, *limits], [*limits, 1e8], strict=True), strict=True))
        self.sizes_of_interest = dict(zip(strides, [*limits, 2 * limits[-1]], strict=True))

    def forward(self, images: Images) -> CondInstOutputs:
        pyramid = self.fpn(self.backbone(self.normalize(images)))  # stride → (B, channels, h, w)
        embeddings = self.mask_branch([pyramid[self.stride * 2**i] for i in range(3)])  # (B, D, h, w)
        logits, distances, centerness, filters = (
            torch.cat([m.flatten(2) for m in levels], dim=2).mT for levels in self.head(list(pyramid.values()))
        )  # (B, L, C), (B, L, 4), (B, L, 1), (B, L, F)
        locations = [grid_locations(m.shape[2], m.shape[3], s, m.device) for s, m in pyramid.items()]
        strides = [
            torch.full((level.shape[0],), s, device=logits.device) for s, level in zip(pyramid, locations, strict=True)
        ]
        return CondInstOutputs(
            PixelMap(embeddings, self.stride),
            logits=logits,
            distances=distances,
            centerness=centerness.squeeze(2),
            filters=filters,
            locations=torch.cat(locations),
            strides=torch.cat(strides),
            lengths=tuple(level.shape[0] for level in locations),
            sizes=images.sizes,
        )

    @torch.no_grad()
    def assign(self, outputs: CondInstOutputs, targets: Sequence[Targets]) -> Assignment:
        ranges = _by_stride(outputs.strides, self.size_ranges)  # (L, 2)
        owners = torch.stack([assign_points(outputs.locations, outputs.strides, ranges, t) for t in targets])  # (B, L)
        image, location = (owners >= 0).nonzero(as_tuple=True)
        has_query = random_subset(len(image), self.config.max_queries, image.device)
        return Assignment(query=location, image=image, target=owners[image, location], has_query=has_query)

    def queries(self, outputs: CondInstOutputs, assignment: Assignment) -> CondInstQueries:
        assignment = assignment[assignment.has_query]
        return self._queries_at(outputs, assignment.image, assignment.query, assignment.target)

    def _queries_at(self, outputs: CondInstOutputs, image: Tensor, location: Tensor, target: Tensor) -> CondInstQueries:
        return CondInstQueries(
            embeddings=outputs.filters[image, location],
            image=image,
            target=target,
            locations=outputs.locations[location],
            sizes_of_interest=_by_stride(outputs.strides[location], self.sizes_of_interest),
        )

    def similarity(self, queries: CondInstQueries, pixels: Pixels) -> Tensor:
        """(Q, P) logits: three 1×1 layers over [relative x, relative y, embedding].

        The first layer is affine in the pixel's position, so relative coordinates are never formed for each pair; its
        sums are taken in float32 or wider, where positions of a large image are exact.
        """
        weights, biases = split_filters(at_least_float32(queries.embeddings), pixels.embeddings.shape[1])
        with torch.autocast(queries.embeddings.device.type, enabled=False):
            per_pixel = -1 / queries.sizes_of_interest[:, None, None]
            position, content = weights[0][..., :2] * per_pixel, weights[0][..., 2:]  # (Q, 8, 2), (Q, 8, D)
            offset = biases[0] - (position * queries.locations[:, None]).sum(2)  # (Q, 8)
            layer = torch.cat([position, content, offset[..., None]], dim=2).flatten(0, 1)  # (Q · 8, 2 + D + 1)
            ones = pixels.locations.new_ones(len(pixels), 1)
            values = torch.cat([pixels.locations, pixels.embeddings, ones], dim=1).to(layer.dtype)  # (P, 2 + D + 1)
            hidden = inplace_relu(layer @ values.T).unflatten(0, (-1, FILTER_CHANNELS))  # (Q, 8, P)
            hidden = inplace_relu(torch.baddbmm(biases[1][..., None], weights[1], hidden))
            return torch.baddbmm(biases[2][..., None], weights[2], hidden).squeeze(1)

    def mask_loss(self, logits: Tensor, queries: CondInstQueries, targets: Sequence[Targets]) -> Tensor:
        step = self.stride // 2  # masks are supervised at twice the map's resolution
        probabilities = aligned_bilinear(logits[:, None], 2)[:, 0].sigmoid()  # (Q, 2h, 2w)
        masks = probabilities.new_zeros(probabilities.shape)
        for i, target in enumerate(targets):
            rows = queries.image == i
            masks[rows] = target.masks[:, step // 2 :: step, step // 2 :: step][queries.target[rows]].to(masks.dtype)
            if target.valid is not None:
                valid = target.valid[step // 2 :: step, step // 2 :: step]
                probabilities = torch.where(rows[:, None, None] & ~valid, 0, probabilities)
                masks[rows] *= valid
        return dice(probabilities, masks).sum() / loss_normalizer(probabilities.new_tensor(len(queries)))

    def losses(self, outputs: CondInstOutputs, targets: Sequence[Targets], assignment: Assignment) -> dict[str, Tensor]:
        image, location = assignment.image, assignment.query
        labels, boxes = _assigned_labels_and_boxes(targets, assignment)
        is_class = torch.zeros_like(outputs.logits)
        is_class[image, location, labels] = 1
        strides = outputs.strides[location][:, None]
        distances = at_least_float32(outputs.distances[image, location])
        target_distances = (box_distances(outputs.locations[location], boxes) / strides).to(distances.dtype)
        centerness = _centerness(target_distances)
        positives = loss_normalizer(centerness.new_tensor(len(assignment)))
        center_sum = all_reduce_mean(centerness.sum()).clamp(min=1e-6)
        class_losses = sigmoid_focal(at_least_float32(outputs.logits), is_class)
        if any(t.valid is not None for t in targets):
            ignored = ignored_locations(outputs.locations, assignment, targets)  # (B, L)
            class_losses = class_losses.masked_fill(ignored[..., None], 0)
        class_losses = drop_unlabeled_classes(class_losses, is_class, targets)
        queries = self.queries(outputs, assignment)
        return {
            "loss_class": class_losses.sum() / positives,
            "loss_box": (_giou_loss(distances, target_distances) * centerness).sum() / center_sum,
            "loss_centerness": F.binary_cross_entropy_with_logits(
                at_least_float32(outputs.centerness[image, location]), centerness, reduction="sum"
            )
            / positives,
            "loss_mask": self.mask_loss(self.decode(queries, outputs.pixels), queries, targets),
        }

    @torch.no_grad()
    def predict(
        self, outputs: CondInstOutputs, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        threshold = self.config.mask_threshold if mask_threshold is None else mask_threshold
        return [self._predict_one(outputs, i, size, threshold) for i, size in enumerate(sizes)]

    def _predict_one(self, outputs: CondInstOutputs, i: int, size: tuple[int, int], mask_threshold: float) -> Instances:
        location, labels, scores = self._candidates(outputs, i)
        distances = outputs.distances[i, location].float() * outputs.strides[location][:, None]
        centers = outputs.locations[location]
        boxes = torch.cat([centers - distances[:, :2], centers + distances[:, 2:]], dim=1)
        kept = nms(boxes, scores, labels, self.config.nms_threshold)[: self.config.max_detections]
        boxes = scale_boxes(boxes[kept], outputs.sizes[i], size)
        visible = (boxes[:, 2:] > boxes[:, :2]).all(1)
        kept, boxes = kept[visible], boxes[visible]

        image = torch.full_like(kept, i)
        queries = self._queries_at(outputs, image, location[kept], torch.full_like(kept, -1))
        logits = self.similarity(queries, outputs.pixels.of_image(i)).unflatten(1, outputs.pixels.embeddings.shape[-2:])
        probabilities = aligned_bilinear(logits[:, None], 2)[:, 0].sigmoid()
        rows, columns = (
            resize_matrix(aligned_linear_matrix(cells, self.stride // 2)[:, :valid], length)
            for cells, valid, length in zip(probabilities.shape[1:], outputs.sizes[i], size, strict=True)
        )
        rles = encode_masks(probabilities, rows, columns, mask_threshold)
        return Instances(scores[kept].cpu(), labels[kept].cpu(), boxes.cpu(), rles, size)

    def _candidates(self, outputs: CondInstOutputs, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Location, class and score of the best pairs of each level."""
        classes = outputs.logits.shape[2]
        scores = outputs.logits[i].float().sigmoid() * outputs.centerness[i].float().sigmoid()[:, None]  # (L, C)
        chosen = []
        for stride in self.size_ranges:
            level = (outputs.strides == stride).nonzero().flatten()
            level_scores = scores[level].flatten()
            best, index = level_scores.topk(min(self.config.candidates, len(level_scores)))
            index = index[best > self.config.score_threshold]
            chosen.append(level[index // classes] * classes + index % classes)
        pairs = torch.cat(chosen)
        return pairs // classes, pairs % classes, scores.flatten()[pairs].sqrt()


class FCOSHead(nn.Module):
    """Two towers shared by all levels: classes on one; boxes, centerness and the controller's filters on the other."""

    def __init__(self, channels: int, convs: int, num_classes: int, levels: int) -> None:
        super().__init__()
        self.class_tower = _tower(channels, convs)
        self.box_tower = _tower(channels, convs)
        self.classes = SharedConv3x3(channels, num_classes)
        self.distances = nn.Conv2d(channels, 4, 3, padding=1)
        self.centerness = nn.Conv2d(channels, 1, 3, padding=1)
        self.controller = nn.Conv2d(channels, num_filter_parameters(FILTER_CHANNELS), 3, padding=1)
        self.scales = nn.ParameterList(torch.ones(1) for _ in range(levels))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(cast(Tensor, module.bias))
        nn.init.constant_(cast(Tensor, self.classes.bias), -math.log((1 - 0.01) / 0.01))

    def forward(self, levels: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
        """(B, channels, h, w) of each level → class logits, box distances in strides, centerness logits, filters."""
        logits = self.classes(self.class_tower(levels))
        # One convolution for the three: the few channels of boxes and centerness are slow on their own.
        predictors = (self.distances, self.centerness, self.controller)
        weight, bias = (torch.cat([getattr(p, name) for p in predictors]) for name in ("weight", "bias"))
        joined = [
            F.conv2d(x, weight, bias, padding=1).split([p.out_channels for p in predictors], dim=1)
            for x in self.box_tower(levels)
        ]
        distances, centerness, filters = zip(*joined, strict=True)
        scaled = [(x * scale).relu() for x, scale in zip(distances, self.scales, strict=True)]
        return logits, scaled, centerness, filters


class MaskBranch(nn.Module):
    """Three levels, refined, upsampled to the finest and summed; then a tower down to the pixel embeddings."""

    def __init__(self, in_channels: int, channels: int, convs: int, norm: Literal["batch", "group"]) -> None:
        super().__init__()

        def block(inputs: int) -> nn.Sequential:
            conv = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
            nn.init.kaiming_uniform_(conv.weight, a=1)
            normed = nn.BatchNorm2d(channels) if norm == "batch" else GroupNorm(channels)
            return nn.Sequential(conv, normed, nn.ReLU(inplace=True))

        self.refine = nn.ModuleList(block(in_channels) for _ in range(3))
        self.tower = nn.Sequential(*(block(channels) for _ in range(convs)), nn.Conv2d(channels, FILTER_CHANNELS, 1))

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Three (B, in_channels, h / 2^i, w / 2^i) → (B, 8, h, w)."""
        x = self.refine[0](levels[0])
        for i in (1, 2):
            x = x + aligned_bilinear(self.refine[i](levels[i]), 2**i)
        return cast(Tensor, self.tower(x))


def _tower(channels: int, convs: int) -> SharedSequential:
    def block() -> tuple[nn.Module, ...]:
        return SharedConv3x3(channels, channels), GroupNorm(channels), nn.ReLU(inplace=True)

    return SharedSequential(*(module for _ in range(convs) for module in block()))


def num_filter_parameters(mask_channels: int) -> int:
    """How many numbers the controller predicts per location.

    >>> num_filter_parameters(8)
    169
    """
    return sum(outputs * inputs + outputs for outputs, inputs in _filter_shapes(mask_channels))


def _filter_shapes(mask_channels: int) -> list[tuple[int, int]]:
    return [(FILTER_CHANNELS, mask_channels + 2), (FILTER_CHANNELS, FILTER_CHANNELS), (1, FILTER_CHANNELS)]


def split_filters(filters: Tensor, mask_channels: int) -> tuple[list[Tensor], list[Tensor]]:
    """(Q, F) → weights (Q, out, in) and biases (Q, out) of the three layers: all weights come before all biases."""
    shapes = _filter_shapes(mask_channels)
    tensors = filters.split([o * i for o, i in shapes] + [o for o, _ in shapes], dim=1)
    weights = [weight.unflatten(1, shape) for weight, shape in zip(tensors[:3], shapes, strict=True)]
    return weights, list(tensors[3:])


def _assigned_labels_and_boxes(targets: Sequence[Targets], assignment: Assignment) -> tuple[Tensor, Tensor]:
    """Labels (Q,) and boxes (Q, 4) of the assigned instances."""
    index = index_in_batch(targets, assignment.image, assignment.target)
    return torch.cat([t.labels for t in targets])[index], torch.cat([t.boxes for t in targets])[index]


def _by_stride(strides: Tensor, table: dict[int, float] | dict[int, tuple[float, float]]) -> Tensor:
    """The values of a table for each of some strides, which are powers of two."""
    first = min(table)
    values = torch.tensor(list(table.values()), dtype=torch.float32, device=strides.device)
    return values[(strides / first).log2().round().long()]


def _centerness(distances: Tensor) -> Tensor:
    """(Q,) √(min(l, r)/max(l, r) · min(t, b)/max(t, b)) of (Q, 4) distances."""
    x, y = distances[:, [0, 2]], distances[:, [1, 3]]
    return (x.amin(1) / x.amax(1) * (y.amin(1) / y.amax(1))).sqrt()


def _area(distances: Tensor) -> Tensor:
    """(Q,) areas of boxes given as (Q, 4) distances from a point inside."""
    return (distances[:, 0] + distances[:, 2]) * (distances[:, 1] + distances[:, 3])


def _giou_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """(Q,) 1 − generalized IoU of boxes given as (Q, 4) distances from one point, in strides."""
    overlap = _area(torch.minimum(predicted, target))
    enclosing = _area(torch.maximum(predicted, target))
    union = _area(predicted) + _area(target) - overlap
    iou = (overlap + 1) / (union + 1)
    return 1 - (iou - (enclosing - union) / enclosing)
