"""Mask2Former: masked-attention mask transformer (Cheng et al., CVPR 2022).

A mask is a dot product of a query and the pixel embeddings, and resizing and point sampling are linear: both are
applied once to the embeddings, not to the masks of all queries and layers.

Letters: B images, N queries of an image, L predictions (one per decoder layer, and one before the first), C classes,
D channels, S tokens, M matched pairs, K instances of an image, P points, h × w a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from uniquery.backbones import Backbone
from uniquery.layers.attention import MLP, Attention, FeedForward
from uniquery.layers.deformable_attention import DeformableLayer, token_centers
from uniquery.layers.normalize import Normalize
from uniquery.layers.padding import (
    GroupNorm,
    Sizes,
    repeat_border,
    upsample,
    valid_cells,
    valid_tokens,
    whole_size,
    without_padding,
)
from uniquery.layers.position import map_positions
from uniquery.masks.losses import PointSampling
from uniquery.masks.panoptic import PanopticSegments, panoptic_segments
from uniquery.masks.paste import resize_matrices
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.set_prediction import (
    PointCriterion,
    SetAssignment,
    SetOutputs,
    best_instances,
    match_layers,
    queries_of_layers,
    queries_with_targets,
)
from uniquery.segmenters.settings import SegmenterSettings
from uniquery.structures import Images, Instances, PixelMap, Queries, Targets, at_least_float32

MASK_STRIDE = 4
LEVEL_STRIDES = (32, 16, 8)  # strides of the tokens, in the order that decoder layers read them


class Mask2FormerConfig(SegmenterSettings):
    """Settings of Mask2Former; the defaults are the original's, but for the padding."""

    name: Literal["mask2former"] = "mask2former"
    queries: int = Field(100, gt=0, description="most instances that an image can have")
    channels: int = Field(256, gt=0, multiple_of=32, description="channels of tokens, queries and pixel embeddings")
    heads: int = Field(8, gt=0, description="attention heads; must divide the channels")
    encoder_layers: int = Field(6, ge=1, description="deformable layers of the pixel decoder")
    encoder_width: int = Field(1024, gt=0, description="hidden channels of their feed-forward network")
    decoder_layers: int = Field(9, ge=1, description="masked layers; they read strides 32, 16, 8 in turn")
    decoder_width: int = Field(2048, gt=0, description="hidden channels of their feed-forward network")
    attend_padding: bool = Field(
        False, description="True: padding counts as image, as in the original; for published weights"
    )
    class_weight: float = Field(2.0, ge=0, description="weight of the class loss, also in matching")
    mask_weight: float = Field(5.0, ge=0, description="weight of the masks' cross-entropy, also in matching")
    dice_weight: float = Field(5.0, ge=0, description="weight of the dice loss, also in matching")
    no_object_weight: float = Field(0.1, gt=0, description="class weight of no object, in the class loss")
    points: int = Field(12544, gt=0, description="points per mask for loss and matching")
    oversample: float = Field(3.0, ge=1, description="candidates for each point")
    importance: float = Field(0.75, ge=0, le=1, description="share of points that are the most uncertain candidates")
    object_threshold: float = Field(0.8, ge=0, le=1, description="panoptic: least class score of a segment")
    overlap_threshold: float = Field(0.8, ge=0, le=1, description="panoptic: least share of its area that it keeps")

    @property
    def instance_limit(self) -> tuple[str, int]:
        """Each query can own one instance."""
        return "model.queries", self.queries

    @property
    def supports_panoptic(self) -> bool:
        """A query can own stuff as well as a thing."""
        return True

    @property
    def memory_advice(self) -> str:
        """See the base."""
        return "a smaller model.queries"

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.channels % self.heads:
            raise ValueError(f"'heads' must divide 'channels'; {self.heads} does not divide {self.channels}")
        return self


class Mask2Former(Segmenter[SetOutputs, SetAssignment, Queries]):
    """Deformable attention gives tokens and pixel embeddings; learned queries attend to tokens inside their masks."""

    dot_product_scale = 1.0

    def __init__(self, backbone: Backbone, num_classes: int, config: Mask2FormerConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or Mask2FormerConfig()
        self.num_classes = num_classes
        self.criterion = PointCriterion(
            PointSampling(config.points, config.oversample, config.importance),
            class_weight=config.class_weight,
            mask_weight=config.mask_weight,
            dice_weight=config.dice_weight,
            label_weights=(*[1.0] * num_classes, config.no_object_weight),
        )
        self.normalize = Normalize(backbone.pixels.mean, backbone.pixels.std, backbone.pixels.order)
        self.backbone = backbone
        self.pixel_decoder = PixelDecoder(backbone.channels, config)
        self.decoder = MaskedDecoder(num_classes, config)

    def forward(self, images: Images) -> SetOutputs:
        height, width = images.pixels.shape[-2:]
        sizes: Sizes = images.sizes
        if self.config.attend_padding:
            sizes = ((height, width),) * len(images) if isinstance(sizes, tuple) else whole_size(images.pixels)
        features = self.backbone(self.normalize(images))  # stride → (B, channels, h, w)
        levels, embeddings = self.pixel_decoder(features, sizes)  # 3 × (B, D, h, w), (B, D, h, w)
        logits, queries = self.decoder(levels, embeddings, sizes)  # (L, B, N, C + 1), (L, B, N, D)
        return SetOutputs(PixelMap(embeddings, MASK_STRIDE), logits=logits, embeddings=queries, sizes=images.sizes)

    @torch.no_grad()
    def assign(self, outputs: SetOutputs, targets: Sequence[Targets]) -> SetAssignment:
        costs = self.criterion.costs(outputs, targets, self._extents(outputs))
        return match_layers(costs, targets, self.num_classes)

    def _extents(self, outputs: SetOutputs) -> list[tuple[float, float]]:
        """Valid (height, width) of each image as fractions of the padded image."""
        if self.config.attend_padding:
            return [(1.0, 1.0)] * len(outputs.sizes)
        rows, columns = outputs.pixels.embeddings.shape[-2:]
        return [(height / (rows * MASK_STRIDE), width / (columns * MASK_STRIDE)) for height, width in outputs.sizes]

    def queries(self, outputs: SetOutputs, assignment: SetAssignment) -> Queries:
        return queries_with_targets(outputs.embeddings[-1], assignment.image, assignment.query, assignment.target)

    def layer_queries(self, outputs: SetOutputs, assignment: SetAssignment) -> list[Queries]:
        return queries_of_layers(outputs.embeddings, assignment)

    def mask_loss(self, logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> Tensor:
        return self.criterion.mask_loss(logits, queries, targets)

    def losses(self, outputs: SetOutputs, targets: Sequence[Targets], assignment: SetAssignment) -> dict[str, Tensor]:
        """Those of the last layer by name; `loss_auxiliary` is the sum of those of all layers before it."""
        return self.criterion.losses(outputs, targets, assignment, self._extents(outputs))

    @torch.no_grad()
    def predict(
        self, outputs: SetOutputs, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        threshold = self.config.mask_threshold if mask_threshold is None else mask_threshold
        logit_threshold = math.log(threshold / (1 - threshold))
        return [self._predict_one(outputs, i, size, logit_threshold) for i, size in enumerate(sizes)]

    def _predict_one(self, outputs: SetOutputs, i: int, size: tuple[int, int], logit_threshold: float) -> Instances:
        scores = at_least_float32(outputs.logits[-1, i]).softmax(dim=1)[:, :-1]  # (N, C)
        return best_instances(
            scores,
            lambda queries: self._masks(outputs, i, queries, size),
            size,
            max_detections=self.config.max_detections,
            logit_threshold=logit_threshold,
        )

    def _masks(
        self, outputs: SetOutputs, i: int, query: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(n, h, w) mask logits of some queries where the image is, and the matrices that resize them."""
        valid = outputs.sizes[i]
        pixels = at_least_float32(outputs.pixels.embeddings[i])
        if not self.config.attend_padding:
            pixels = pixels[:, : -(-valid[0] // MASK_STRIDE), : -(-valid[1] // MASK_STRIDE)]
        logits = (outputs.embeddings[-1, i, query].to(pixels.dtype) @ pixels.flatten(1)).unflatten(1, pixels.shape[1:])
        return logits, resize_matrices((logits.shape[1], logits.shape[2]), MASK_STRIDE, valid, size)

    @torch.no_grad()
    def predict_panoptic(
        self,
        outputs: SetOutputs,
        sizes: Sequence[tuple[int, int]],
        is_thing: Sequence[bool],
        *,
        object_threshold: float | None = None,
        overlap_threshold: float | None = None,
    ) -> list[PanopticSegments]:
        least_score = self.config.object_threshold if object_threshold is None else object_threshold
        least_share = self.config.overlap_threshold if overlap_threshold is None else overlap_threshold
        results = []
        for i, size in enumerate(sizes):
            scores, labels = at_least_float32(outputs.logits[-1, i]).softmax(dim=1).max(1)
            kept = ((labels < self.num_classes) & (scores > least_score)).nonzero().flatten()
            logits, matrices = self._masks(outputs, i, kept, size)
            results.append(
                panoptic_segments(logits, labels[kept].tolist(), scores[kept].tolist(), is_thing, matrices, least_share)
            )
        return results


class PixelDecoder(nn.Module):
    """Deformable attention between the tokens of three levels; the finest is then added to the features of stride 4."""

    def __init__(self, channels: dict[int, int], config: Mask2FormerConfig) -> None:
        super().__init__()
        d = config.channels
        self.projections = nn.ModuleList(nn.Conv2d(channels[stride], d, 1) for stride in LEVEL_STRIDES)
        self.norms = nn.ModuleList(GroupNorm(d) for _ in LEVEL_STRIDES)
        self.level_embedding = nn.Parameter(torch.randn(len(LEVEL_STRIDES), d))
        self.layers = nn.ModuleList(
            DeformableLayer(d, config.heads, len(LEVEL_STRIDES), config.encoder_width)
            for _ in range(config.encoder_layers)
        )
        self.lateral, self.lateral_norm = nn.Conv2d(channels[MASK_STRIDE], d, 1, bias=False), GroupNorm(d)
        self.merge, self.merge_norm = nn.Conv2d(d, d, 3, padding=1, bias=False), GroupNorm(d)
        self.embed = nn.Conv2d(d, d, 1)
        for module in self.projections:
            nn.init.xavier_uniform_(cast(nn.Conv2d, module).weight)
        for conv in (self.lateral, self.merge, self.embed):
            nn.init.kaiming_uniform_(conv.weight, a=1)
        for module in (*self.projections, self.embed):
            nn.init.zeros_(cast(Tensor, module.bias))

    def forward(self, features: dict[int, Tensor], sizes: Sizes) -> tuple[list[Tensor], Tensor]:
        """Stride → features, to maps (B, D, h, w) of strides 32, 16, 8, and the pixel embeddings (B, D, h, w)."""
        valid = {stride: valid_cells(sizes, stride, x) for stride, x in features.items()}
        levels = self.attend(features, valid, sizes)
        fine = self.lateral_norm(self.lateral(features[MASK_STRIDE]), valid[MASK_STRIDE])
        fine += upsample(levels[-1], fine.shape[-2:], valid[LEVEL_STRIDES[-1]])
        fine = self.merge(without_padding(fine, valid[MASK_STRIDE]))
        fine = F.relu_(self.merge_norm(fine, valid[MASK_STRIDE]))
        return levels, without_padding(self.embed(fine), valid[MASK_STRIDE])

    def attend(self, features: dict[int, Tensor], valid: dict[int, Tensor | None], sizes: Sizes) -> list[Tensor]:
        """The maps of strides 32, 16, 8, after deformable attention between all of their tokens."""
        maps = [
            norm(project(features[stride]), valid[stride])
            for stride, project, norm in zip(LEVEL_STRIDES, self.projections, self.norms, strict=True)
        ]
        shapes = [(x.shape[2], x.shape[3]) for x in maps]
        tokens = torch.cat([x.flatten(2).mT for x in maps], dim=1)  # (B, S, D)
        positions = torch.cat(
            [map_positions(x, s, sizes) + e for s, x, e in zip(LEVEL_STRIDES, maps, self.level_embedding, strict=True)],
            dim=1,
        )
        centers = token_centers(shapes, tokens.device, at_least_float32(tokens).dtype)
        inside = valid_tokens([valid[stride] for stride in LEVEL_STRIDES], maps)
        for layer in self.layers:
            tokens = layer(tokens, positions, centers, shapes, inside)
        return [
            x.mT.unflatten(2, shape)
            for x, shape in zip(tokens.split([h * w for h, w in shapes], dim=1), shapes, strict=True)
        ]


class MaskedDecoder(nn.Module):
    """Learned queries attend to the tokens inside their last mask, then to each other."""

    def __init__(self, num_classes: int, config: Mask2FormerConfig) -> None:
        super().__init__()
        d = config.channels
        self.query_features = nn.Parameter(torch.randn(config.queries, d))
        self.query_positions = nn.Parameter(torch.randn(config.queries, d))
        self.level_embedding = nn.Parameter(torch.randn(len(LEVEL_STRIDES), d))
        self.cross_attention = nn.ModuleList(Attention(d, config.heads) for _ in range(config.decoder_layers))
        self.self_attention = nn.ModuleList(Attention(d, config.heads) for _ in range(config.decoder_layers))
        self.feed_forward = nn.ModuleList(FeedForward(d, config.decoder_width) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(d)
        self.classes = nn.Linear(d, num_classes + 1)
        self.masks = MLP(d, 3)

    def forward(self, levels: Sequence[Tensor], embeddings: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Maps (B, D, h, w) and pixel embeddings, to (L, B, N, C + 1) class logits and (L, B, N, D) mask embeddings."""
        values = [x.flatten(2).mT + e for x, e in zip(levels, self.level_embedding, strict=True)]  # (B, S, D)
        keys = [v + map_positions(x, s, sizes) for v, s, x in zip(values, LEVEL_STRIDES, levels, strict=True)]
        inside = [valid_tokens([valid_cells(sizes, s, x)], [x]) for s, x in zip(LEVEL_STRIDES, levels, strict=True)]
        # A coarse token at the border may be interpolated from padding alone, where every mask logit is 0.
        extended = repeat_border(embeddings.detach(), sizes, MASK_STRIDE)
        resized = [
            F.interpolate(extended, size=x.shape[-2:], mode="bilinear", align_corners=False).flatten(2) for x in levels
        ]  # (B, D, S): the mask of a query at a level's size is its product with these
        queries = self.query_features.expand(embeddings.shape[0], -1, -1)  # (B, N, D)
        normalized = [self.norm(queries)]
        masks = [self.masks(normalized[0])]
        for i, (cross_attention, self_attention, feed_forward) in enumerate(
            zip(self.cross_attention, self.self_attention, self.feed_forward, strict=True)
        ):
            k = i % len(LEVEL_STRIDES)
            attend = attention_mask(masks[-1].detach() @ resized[k], inside[k])
            queries = cross_attention(queries, self.query_positions, keys[k], values[k], attend)
            queries = self_attention(queries, self.query_positions, queries + self.query_positions, queries)
            queries = feed_forward(queries)
            normalized.append(self.norm(queries))
            masks.append(self.masks(normalized[-1]))
        return self.classes(torch.stack(normalized)), torch.stack(masks)


def attention_mask(logits: Tensor, valid: Tensor | None) -> Tensor:
    """(B, N, S) bool: the tokens inside a query's mask, or all tokens if its mask is empty; never padding.

    Args:
        logits: (B, N, S) mask logits.
        valid: (B, S) bool, false for padding; None if all is valid.

    >>> attention_mask(torch.tensor([[[1.0, -1.0], [-1.0, -1.0]]]), None).tolist()
    [[[True, False], [True, True]]]
    """
    attend = logits >= 0
    if valid is not None:
        attend &= valid[:, None]
    is_empty = ~attend.any(2, keepdim=True)
    return attend | (is_empty if valid is None else is_empty & valid[:, None])
