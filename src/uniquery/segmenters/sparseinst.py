"""SparseInst: sparse instance activation for real-time instance segmentation (Cheng et al., CVPR 2022).

Letters: B images, N queries of an image, C classes, D channels of a kernel and of a pixel, G activation maps of a
query, K instances of an image, Q queries that own an instance, P pixels, h × w the map of pixel embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from uniquery.backbones import Backbone
from uniquery.layers.fpn import FPN
from uniquery.layers.normalize import Normalize
from uniquery.layers.padding import GroupNorm
from uniquery.layers.winograd import SharedConv3x3
from uniquery.masks.losses import dice, sigmoid_focal
from uniquery.parallel import loss_normalizer
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.federated import drop_unlabeled_classes
from uniquery.segmenters.grid import coordinates, paste_instances, quarter_shares, quarter_valid
from uniquery.segmenters.set_prediction import (
    SetAssignment,
    SetOutputs,
    match_layers,
    mostly_invalid,
    queries_with_targets,
)
from uniquery.segmenters.settings import SegmenterSettings
from uniquery.structures import (
    Images,
    Instances,
    Outputs,
    PixelMap,
    Queries,
    Targets,
    at_least_float32,
    index_in_batch,
)

STRIDES = (8, 16, 32)  # of the features that are used; masks are predicted at the first and compared at half of it
CLASS_WEIGHT, MASK_WEIGHT, DICE_WEIGHT, OBJECTNESS_WEIGHT = 2.0, 5.0, 2.0, 1.0
MATCH_MASK_POWER, MATCH_CLASS_POWER = 0.8, 0.2
POOL_SIZES = (1, 2, 3, 6)
PRIOR_LOGIT = -math.log((1 - 0.01) / 0.01)
_DICE_EPS = 1e-4
_INSTANCES_AT_ONCE = 64  # bounds the memory of matching with hundreds of instances


class SparseInstConfig(SegmenterSettings):
    """Settings of SparseInst; the defaults are the original's."""

    name: Literal["sparseinst"] = "sparseinst"
    queries: int = Field(100, gt=0, description="most instances that an image can have")
    channels: int = Field(256, gt=0, multiple_of=4, description="channels of the encoder")
    head_channels: int = Field(256, gt=0, description="channels of the instance branch and the mask branch")
    head_convs: int = Field(4, ge=1, description="convolutions of each branch")
    norm: Literal["none", "group"] = Field(
        "none",
        description="normalization of the encoder's features; group: for backbones whose features are large beside "
        "coordinates from -1 to 1, as EfficientNet's",
    )
    kernel_channels: int = Field(128, gt=0, description="channels of kernels and pixel embeddings")
    groups: int = Field(
        4,
        ge=1,
        description="activation maps of each query, each from its own group of channels; 1 is the original's base "
        "form, without the layer that merges them",
    )
    score_threshold: float = Field(0.005, ge=0, le=1, description="smallest score before the mask's is multiplied")
    mask_threshold: float = Field(0.45, gt=0, lt=1, description="probability above which a pixel belongs to a mask")

    @property
    def has_federated_loss(self) -> bool:
        """See the base."""
        return True

    @property
    def instance_limit(self) -> tuple[str, int]:
        """Each query can own one instance."""
        return "model.queries", self.queries

    @property
    def memory_advice(self) -> str:
        """See the base."""
        return "a smaller model.queries"

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        if self.norm == "group" and self.channels % 32:
            raise ValueError(f"with group normalization, 'channels' must be a multiple of 32 (given: {self.channels})")
        if self.head_channels % self.groups:
            raise ValueError(
                f"'groups' must divide 'head_channels'; {self.groups} does not divide {self.head_channels}"
            )
        return self


@dataclass(frozen=True)
class SparseInstOutputs(Outputs):
    """What SparseInst predicts for each query.

    Attributes:
        logits: (B, N, C) class logits.
        kernels: (B, N, D).
        objectness: (B, N) logits of the mask's IoU with the instance.
        sizes: valid (height, width) of each image.
    """

    logits: Tensor
    kernels: Tensor
    objectness: Tensor
    sizes: tuple[tuple[int, int], ...]


class SparseInst(Segmenter[SparseInstOutputs, SetAssignment, Queries]):
    """Activation maps highlight an instance each; the features they pool give its class and the kernel of its mask."""

    dot_product_scale = 1.0

    def __init__(self, backbone: Backbone, num_classes: int, config: SparseInstConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or SparseInstConfig()
        self.num_classes = num_classes
        self.normalize = Normalize(backbone.pixels.mean, backbone.pixels.std, backbone.pixels.order)
        self.backbone = backbone
        backbone.use_outputs(STRIDES)
        self.encoder = ContextEncoder(backbone.channels, config)
        self.instance_branch = InstanceBranch(config, num_classes)
        self.mask_branch = MaskBranch(config)

    def forward(self, images: Images) -> SparseInstOutputs:
        features = self.encoder(self.backbone(self.normalize(images)))  # (B, channels, h, w)
        features = torch.cat([coordinates(features), features], dim=1)
        logits, kernels, objectness = self.instance_branch(features)  # (B, N, C), (B, N, D), (B, N)
        embeddings = self.mask_branch(features)  # (B, D, h, w)
        return SparseInstOutputs(
            PixelMap(embeddings, STRIDES[0]), logits=logits, kernels=kernels, objectness=objectness, sizes=images.sizes
        )

    @torch.no_grad()
    def assign(self, outputs: SparseInstOutputs, targets: Sequence[Targets]) -> SetAssignment:
        costs = [-self._match_scores(outputs, i, target)[None] for i, target in enumerate(targets)]
        return match_layers(costs, targets, self.num_classes)

    def _match_scores(self, outputs: SparseInstOutputs, i: int, target: Targets) -> Tensor:
        """(N, K): dice^0.8 · p^0.2 of the queries and instances of an image."""
        probabilities = self._probabilities(outputs, i, slice(None))  # (N, 2h, 2w)
        shares = quarter_shares(target.masks)
        if target.valid is not None:
            valid = quarter_valid(target)
            probabilities, shares = probabilities * valid, shares * valid
        overlap = [dice_scores(probabilities, some) for some in shares.split(_INSTANCES_AT_ONCE)]
        labels = target.labels.clamp(0, self.num_classes - 1)  # `match_layers` reports wrong labels
        classes = at_least_float32(outputs.logits[i]).sigmoid()[:, labels]
        return torch.cat(overlap, dim=1) ** MATCH_MASK_POWER * classes**MATCH_CLASS_POWER

    def _probabilities(self, outputs: SparseInstOutputs, i: int, query: Tensor | slice) -> Tensor:
        """(n, 2h, 2w): the masks of some queries of an image."""
        pixels = at_least_float32(outputs.pixels.embeddings[i])
        with torch.autocast(pixels.device.type, enabled=False):
            logits = outputs.kernels[i, query].to(pixels.dtype) @ pixels.flatten(1)
        return upsample_masks(logits.unflatten(1, pixels.shape[1:])).sigmoid()

    def queries(self, outputs: SparseInstOutputs, assignment: SetAssignment) -> Queries:
        return queries_with_targets(outputs.kernels, assignment.image, assignment.query, assignment.target)

    def mask_loss(self, logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> Tensor:
        cross_entropy, dice_loss, _ = compare_masks(logits, queries, targets)
        count = loss_normalizer(cross_entropy.new_tensor(len(queries)))
        return (MASK_WEIGHT * cross_entropy + DICE_WEIGHT * dice_loss).sum() / count

    def losses(
        self, outputs: SparseInstOutputs, targets: Sequence[Targets], assignment: SetAssignment
    ) -> dict[str, Tensor]:
        image, query = assignment.image, assignment.query
        owners = Queries(outputs.kernels[image, query], image, assignment.target)
        cross_entropy, dice_loss, iou = compare_masks(self.decode(owners, outputs.pixels), owners, targets)
        objectness = at_least_float32(outputs.objectness)[image, query]
        objectness_loss = F.binary_cross_entropy_with_logits(objectness, iou, reduction="none")
        instances = loss_normalizer(dice_loss.new_tensor(sum(len(t) for t in targets)))
        matched = loss_normalizer(dice_loss.new_tensor(len(owners)))  # fewer if there are more instances than queries
        return {
            "loss_class": CLASS_WEIGHT * self._class_loss(outputs, targets, assignment) / instances,
            "loss_mask": MASK_WEIGHT * cross_entropy.sum() / matched,
            "loss_dice": DICE_WEIGHT * dice_loss.sum() / instances,
            "loss_objectness": OBJECTNESS_WEIGHT * objectness_loss.sum() / matched,
        }

    def _class_loss(self, outputs: SparseInstOutputs, targets: Sequence[Targets], assignment: SetAssignment) -> Tensor:
        """The sum over queries; without those that own nothing and lie on invalid pixels."""
        labels = torch.cat([t.labels for t in targets])[index_in_batch(targets, assignment.image, assignment.target)]
        is_class = torch.zeros_like(outputs.logits)
        is_class[assignment.image, assignment.query, labels] = 1
        losses = sigmoid_focal(at_least_float32(outputs.logits), is_class)
        one_layer = SetOutputs(outputs.pixels, outputs.logits[None], outputs.kernels[None], outputs.sizes)
        ignored = mostly_invalid(one_layer, targets)
        if ignored is not None:
            ignored[0, assignment.image, assignment.query] = False
            losses = losses.masked_fill(ignored[0, ..., None], 0)
        return drop_unlabeled_classes(losses, is_class, targets).sum()

    @torch.no_grad()
    def predict(
        self, outputs: SparseInstOutputs, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        threshold = self.config.mask_threshold if mask_threshold is None else mask_threshold
        return [self._predict_one(outputs, i, size, threshold) for i, size in enumerate(sizes)]

    def _predict_one(
        self, outputs: SparseInstOutputs, i: int, size: tuple[int, int], mask_threshold: float
    ) -> Instances:
        classes, objectness = (at_least_float32(x[i]).sigmoid() for x in (outputs.logits, outputs.objectness))
        scores, labels = (classes * objectness[:, None]).sqrt().max(1)
        kept = (scores > self.config.score_threshold).nonzero().flatten()
        probabilities = self._probabilities(outputs, i, kept)
        inside = probabilities > mask_threshold
        maskness = (probabilities * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
        scores, order = (scores[kept] * maskness).sort(descending=True, stable=True)
        scores, order = scores[: self.config.max_detections], order[: self.config.max_detections]
        return paste_instances(
            probabilities[order], scores, labels[kept[order]], outputs.sizes[i], size, mask_threshold
        )


def upsample_masks(logits: Tensor) -> Tensor:
    """(Q, h, w) → (Q, 2h, 2w), in float32 or wider."""
    return F.interpolate(at_least_float32(logits)[:, None], scale_factor=2, mode="bilinear")[:, 0]


def dice_scores(probabilities: Tensor, shares: Tensor) -> Tensor:
    """(N, K): 2 Σ p t / (Σ p² + Σ t² + ε) of every one of (N, h, w) masks with every one of (K, h, w)."""
    p, t = probabilities.flatten(1), shares.flatten(1).to(probabilities.dtype)
    with torch.autocast(p.device.type, enabled=False):
        return 2 * (p @ t.T) / (p.square().sum(1)[:, None] + t.square().sum(1) + _DICE_EPS)


def compare_masks(logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, the mean over pixels, dice loss, and IoU without gradient, of each query with its instance.

    Args:
        logits: (Q, h, w) at stride 8.
        queries: each owns an instance.
        targets: ground truth of each image; pixels that are not valid do not count.

    Returns:
        (Q,) each.
    """
    logits = upsample_masks(logits)
    shares = torch.cat([quarter_shares(t.masks) for t in targets])[
        index_in_batch(targets, queries.image, queries.target)
    ].to(logits.dtype)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, shares, reduction="none")
    probabilities = logits.sigmoid()
    count: Tensor | int = shares.shape[1:].numel()
    if any(t.valid is not None for t in targets):
        valid = torch.stack([quarter_valid(t) for t in targets])[queries.image]  # (Q, 2h, 2w)
        cross_entropy, probabilities, shares = (
            torch.where(valid, x, 0) for x in (cross_entropy, probabilities, shares)
        )
        count = valid.sum((1, 2)).clamp(min=1)
    is_predicted, is_inside = probabilities.detach() >= 0.4, shares > 0.5
    overlap, union = (pairs.sum((1, 2)) for pairs in (is_predicted & is_inside, is_predicted | is_inside))
    iou = overlap / (union + 1e-6)
    return cross_entropy.sum((1, 2)) / count, dice(probabilities, shares, eps=_DICE_EPS), iou.to(logits.dtype)


class ContextEncoder(nn.Module):
    """A pyramid of three levels, whose coarsest one sees the whole image, fused into one map at the finest."""

    def __init__(self, channels: Mapping[int, int], config: SparseInstConfig) -> None:
        super().__init__()
        used = {stride: channels[stride] for stride in STRIDES}
        self.pyramid = FPN(used, config.channels, context=PyramidPooling(config.channels))
        self.fusion = nn.Conv2d(len(STRIDES) * config.channels, config.channels, 1)
        self.norm = GroupNorm(config.channels) if config.norm == "group" else None
        _init_for_relu(self.fusion)

    def forward(self, features: Mapping[int, Tensor]) -> Tensor:
        """Stride → features, to (B, channels, h, w)."""
        finest, *coarser = self.pyramid(features).values()
        # The fusion of all levels at the size of the finest; resizing after the 1×1 convolution is less work.
        kernel, *kernels = self.fusion.weight.chunk(len(STRIDES), dim=1)
        fused = F.conv2d(finest, kernel, self.fusion.bias)
        for x, kernel in zip(coarser, kernels, strict=True):
            fused = fused + F.interpolate(F.conv2d(x, kernel), size=finest.shape[-2:], mode="bilinear")
        return fused if self.norm is None else cast(Tensor, self.norm(fused))


class PyramidPooling(nn.Module):
    """Averages over grids of 1, 2², 3² and 6² cells, resized and joined with the features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(channels, channels // 4, 1) for _ in POOL_SIZES)
        self.merge = nn.Conv2d(channels + len(POOL_SIZES) * (channels // 4), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w) → (B, C, h, w)."""
        pooled = [level(adaptive_average(x, size)) for level, size in zip(self.levels, POOL_SIZES, strict=True)]
        resized = (F.interpolate(p.relu(), size=x.shape[-2:], mode="bilinear", align_corners=False) for p in pooled)
        return F.relu_(self.merge(torch.cat([*resized, x], dim=1)))


def adaptive_average(x: Tensor, size: int) -> Tensor:
    """`F.adaptive_avg_pool2d` to size × size cells; ONNX has it for maps of a fixed size only."""
    if not torch.onnx.is_in_onnx_export():
        return F.adaptive_avg_pool2d(x, size)
    rows, columns = (pooling_matrix(cells, size, x) for cells in x.shape[-2:])
    return rows @ x @ columns.T


def pooling_matrix(cells: int, size: int, like: Tensor) -> Tensor:
    """(size, cells): adaptive average pooling along one axis.

    >>> pooling_matrix(3, 2, torch.zeros(1)).tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    cell, out = torch.arange(cells, device=like.device), torch.arange(size, device=like.device)[:, None]
    inside = (cell >= out * cells // size) & (cell < ((out + 1) * cells + size - 1) // size)
    weights = inside.to(like.dtype)
    return weights / weights.sum(1, keepdim=True)


class Branch(nn.Sequential):
    """3×3 convolutions, each followed by a ReLU."""

    def __init__(self, config: SparseInstConfig) -> None:
        super().__init__()
        for i in range(config.head_convs):
            inputs = config.channels + 2 if i == 0 else config.head_channels  # the first sees the coordinates
            conv = SharedConv3x3(inputs, config.head_channels)
            _init_for_relu(conv)
            self.extend((conv, nn.ReLU(inplace=True)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels + 2, h, w) → (B, head_channels, h, w)."""
        for layer in self:
            x = layer([x])[0] if isinstance(layer, SharedConv3x3) else layer(x)
        return x


class InstanceBranch(nn.Module):
    """Features under each query's activation maps, averaged, and what is predicted from them."""

    def __init__(self, config: SparseInstConfig, num_classes: int) -> None:
        super().__init__()
        self.groups = config.groups
        inputs = config.groups * config.head_channels
        self.convs = Branch(config)
        self.activation = nn.Conv2d(
            config.head_channels, config.groups * config.queries, 3, padding=1, groups=config.groups
        )
        self.merge = nn.Linear(inputs, inputs) if config.groups > 1 else None
        self.classes = nn.Linear(inputs, num_classes)
        self.kernels = nn.Linear(inputs, config.kernel_channels)
        self.objectness = nn.Linear(inputs, 1)
        for layer in (self.activation, self.classes, self.kernels):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.constant_(cast(Tensor, layer.bias), 0.0 if layer is self.kernels else PRIOR_LOGIT)
        if self.merge is not None:
            nn.init.kaiming_uniform_(self.merge.weight, a=1)
            nn.init.zeros_(self.merge.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, channels + 2, h, w) → (B, N, C) class logits, (B, N, D) kernels and (B, N) objectness logits."""
        features = self.convs(features)
        pooled = pool_by_activation(features, self.activation(features)).to(features.dtype)  # (B, G · N, channels)
        pooled = pooled.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(2)  # (B, N, G · channels)
        if self.merge is not None:
            pooled = F.relu_(self.merge(pooled))
        return self.classes(pooled), self.kernels(pooled), self.objectness(pooled).squeeze(2)


def pool_by_activation(features: Tensor, activation: Tensor) -> Tensor:
    """(B, M, C): the mean of (B, C, h, w) features, weighted by each of M sigmoids of (B, M, h, w) logits."""
    weights, values = at_least_float32(activation).sigmoid().flatten(2), at_least_float32(features).flatten(2).mT
    with torch.autocast(features.device.type, enabled=False):
        return weights @ values / weights.sum(2, keepdim=True).clamp(min=1e-6)


class MaskBranch(nn.Module):
    """Pixel embeddings."""

    def __init__(self, config: SparseInstConfig) -> None:
        super().__init__()
        self.convs = Branch(config)
        self.project = nn.Conv2d(config.head_channels, config.kernel_channels, 1)
        _init_for_relu(self.project)

    def forward(self, features: Tensor) -> Tensor:
        """(B, channels + 2, h, w) → (B, D, h, w)."""
        return cast(Tensor, self.project(self.convs(features)))


def _init_for_relu(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(cast(Tensor, conv.bias))
