"""Mask2Former: masked-attention mask transformer (Cheng et al., CVPR 2022).

A mask is a dot product of a query and the pixel embeddings, and resizing and point sampling are linear: both are done
to the embeddings, once, and never to the masks of all queries and layers.

Letters: B images, N queries of an image, L predictions (one per decoder layer, and one before the first), C classes,
D channels, S tokens, M matched pairs, K instances of an image, P points, h × w a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from uniquery.backbones import Backbone
from uniquery.layers.attention import MLP, Attention, FeedForward
from uniquery.layers.deformable_attention import DeformableLayer, reference_points
from uniquery.layers.normalize import Normalize
from uniquery.layers.padding import GroupNorm, repeat_border, upsample, valid_cells, valid_tokens, without_padding
from uniquery.layers.position import sine_positions
from uniquery.layers.sampling import sample_map, sample_products
from uniquery.masks.losses import PointSampling, PointTargets, draw_points, point_losses
from uniquery.masks.panoptic import PanopticSegments, panoptic_segments
from uniquery.masks.paste import encode_scored_masks, resize_matrices, rle_boxes
from uniquery.matching import mask_costs, match_all
from uniquery.parallel import all_reduce_mean, normalizer
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.settings import SegmenterSettings
from uniquery.structures import (
    Assignment,
    Images,
    Instances,
    Outputs,
    PixelMap,
    Queries,
    Targets,
    at_least_float32,
    index_in_batch,
    rows_by_image,
)

STRIDE = 4
LEVELS = (32, 16, 8)  # strides of the tokens, in the order that decoder layers read them


class Mask2FormerConfig(SegmenterSettings):
    """Settings of Mask2Former; the defaults are the original's, but for the padding."""

    name: Literal["mask2former"] = "mask2former"
    queries: int = Field(100, gt=0, description="most instances that an image can have")
    channels: int = Field(256, gt=0, multiple_of=32, description="of tokens, queries and pixel embeddings")
    heads: int = Field(8, gt=0, description="of every attention; divides the channels")
    encoder_layers: int = Field(6, ge=1, description="deformable layers of the pixel decoder")
    encoder_width: int = Field(1024, gt=0, description="hidden channels of their feed-forward part")
    decoder_layers: int = Field(9, ge=1, description="masked layers; they read strides 32, 16, 8 in turn")
    decoder_width: int = Field(2048, gt=0, description="hidden channels of their feed-forward part")
    attend_padding: bool = Field(
        False, description="True: padding counts as image, as in the original; for published weights"
    )
    class_weight: float = Field(2.0, ge=0, description="of the class loss, also in matching")
    mask_weight: float = Field(5.0, ge=0, description="of the masks' cross-entropy, also in matching")
    dice_weight: float = Field(5.0, ge=0, description="of the dice loss, also in matching")
    no_object_weight: float = Field(0.1, gt=0, description="in the class loss, of queries that own nothing")
    points: int = Field(12544, gt=0, description="that a mask is compared on")
    oversample: float = Field(3.0, ge=1, description="candidates for each point")
    importance: float = Field(0.75, ge=0, le=1, description="share of points that are the most uncertain candidates")
    object_threshold: float = Field(0.8, ge=0, le=1, description="panoptic: least class score of a segment")
    overlap_threshold: float = Field(0.8, ge=0, le=1, description="panoptic: least share of its area that it keeps")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.channels % self.heads:
            raise ValueError(f"'heads' must divide 'channels'; {self.heads} does not divide {self.channels}")
        return self

    @property
    def instance_limit(self) -> tuple[str, int]:
        return "model.queries", self.queries

    @property
    def memory_advice(self) -> str:
        return "fewer queries: a smaller model.queries"


@dataclass(frozen=True)
class Mask2FormerOutputs(Outputs):
    """What all decoder layers predict, the last one last.

    Attributes:
        logits: (L, B, N, C + 1) class logits, the last class is no object.
        embeddings: (L, B, N, D) mask embeddings.
        sizes: valid (height, width) of each image.
    """

    logits: Tensor
    embeddings: Tensor
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Mask2FormerAssignment(Assignment):
    """The last layer's matching, and that of each layer: every layer matches as many pairs of an image.

    Attributes:
        layer_query: (M, L).
        layer_target: (M, L).
    """

    layer_query: Tensor
    layer_target: Tensor


class Mask2Former(Segmenter[Mask2FormerOutputs, Mask2FormerAssignment, Queries]):
    """Deformable attention makes tokens and pixel embeddings; learned queries read the tokens where their masks are."""

    dot_product_scale = 1.0
    class_weights: Tensor

    def __init__(self, backbone: Backbone, num_classes: int, config: Mask2FormerConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or Mask2FormerConfig()
        self.num_classes = num_classes
        self.sampling = PointSampling(config.points, config.oversample, config.importance)
        self.normalize = Normalize(backbone.pixels.mean, backbone.pixels.std, backbone.pixels.order)
        self.backbone = backbone
        self.pixel_decoder = PixelDecoder(backbone.channels, config)
        self.decoder = MaskedDecoder(num_classes, config)
        weights = torch.tensor([1.0] * num_classes + [config.no_object_weight])
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, images: Images) -> Mask2FormerOutputs:
        height, width = images.pixels.shape[-2:]
        seen = ((height, width),) * len(images) if self.config.attend_padding else images.sizes
        features = self.backbone(self.normalize(images))  # stride → (B, channels, h, w)
        levels, embeddings = self.pixel_decoder(features, seen)  # 3 × (B, D, h, w), (B, D, h, w)
        logits, queries = self.decoder(levels, embeddings, seen)  # (L, B, N, C + 1), (L, B, N, D)
        return Mask2FormerOutputs(PixelMap(embeddings, STRIDE), logits=logits, embeddings=queries, sizes=images.sizes)

    @torch.no_grad()
    def assign(self, outputs: Mask2FormerOutputs, targets: Sequence[Targets]) -> Mask2FormerAssignment:
        device = outputs.logits.device
        costs = self._costs(outputs, targets).split([len(t) for t in targets], dim=2)  # (L, N, K) of each image
        matched = [match_all(of_image.numpy()) for of_image in costs]  # (2, L, M of the image) each
        query, target = torch.cat(matched, dim=2).mT.to(device)  # (M, L) each
        image = torch.arange(len(targets)).repeat_interleave(torch.tensor([m.shape[2] for m in matched])).to(device)
        return Mask2FormerAssignment(query[:, -1], image, target[:, -1], layer_query=query, layer_target=target)

    def _costs(self, outputs: Mask2FormerOutputs, targets: Sequence[Targets]) -> Tensor:
        """(L, N, ΣK) on the CPU: what it would cost each query to own each instance of its image; one transfer."""
        labels = torch.cat([t.labels for t in targets])
        per_image = [self._image_costs(outputs, i, t) for i, t in enumerate(targets)]
        costs = torch.cat(per_image, dim=2)
        table = torch.cat([costs.flatten(0, 1), labels[None].to(costs.dtype)]).cpu()
        if len(labels) and not 0 <= table[-1].min() <= table[-1].max() < self.num_classes:
            raise ValueError(
                f"Labels must be from 0 to {self.num_classes - 1}, as the model has {self.num_classes} classes; "
                f"got {int(table[-1].min())} to {int(table[-1].max())}."
            )
        return table[:-1].view(costs.shape)

    def _image_costs(self, outputs: Mask2FormerOutputs, i: int, target: Targets) -> Tensor:
        """(L, N, K)."""
        embeddings = outputs.pixels.embeddings[i]
        points = draw_points(self.config.points, self._extent(outputs, i), embeddings)
        wanted = PointTargets.sampled(target, points)
        labels = target.labels.clamp(0, self.num_classes - 1)
        with torch.autocast(embeddings.device.type, enabled=False):
            pixels = sample_map(embeddings, points)  # (P, D)
            costs = []
            for logits, queries in zip(outputs.logits[:, i], outputs.embeddings[:, i], strict=True):
                cross_entropy, dice = mask_costs(queries.to(pixels.dtype) @ pixels.T, wanted.values, wanted.known)
                of_class = -at_least_float32(logits).softmax(dim=1)[:, labels]
                costs.append(
                    self.config.class_weight * of_class
                    + self.config.mask_weight * cross_entropy
                    + self.config.dice_weight * dice
                )
        return torch.stack(costs)

    def _extent(self, outputs: Mask2FormerOutputs, i: int) -> tuple[float, float]:
        """The share of the padded height and width that points are drawn from: the image."""
        if self.config.attend_padding:
            return 1.0, 1.0
        (rows, columns), (height, width) = outputs.pixels.embeddings.shape[-2:], outputs.sizes[i]
        return height / (rows * STRIDE), width / (columns * STRIDE)

    def queries(self, outputs: Mask2FormerOutputs, assignment: Mask2FormerAssignment) -> Queries:
        return self._queries_of(outputs.embeddings[-1], assignment.image, assignment.query, assignment.target)

    def layer_queries(self, outputs: Mask2FormerOutputs, assignment: Mask2FormerAssignment) -> list[Queries]:
        matching = zip(outputs.embeddings, assignment.layer_query.T, assignment.layer_target.T, strict=True)
        return [self._queries_of(embeddings, assignment.image, *pairs) for embeddings, *pairs in matching]

    @staticmethod
    def _queries_of(embeddings: Tensor, image: Tensor, query: Tensor, target: Tensor) -> Queries:
        images, count, _ = embeddings.shape
        owned = torch.full((images, count), -1, dtype=torch.int64, device=image.device)
        owned[image, query] = target
        of_image = torch.arange(images, device=image.device).repeat_interleave(count)
        return Queries(embeddings.flatten(0, 1), of_image, owned.flatten())

    def mask_loss(self, logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> Tensor:
        total = logits.sum() * 0
        for target, rows in zip(targets, rows_by_image(queries.image, len(targets))[1], strict=True):
            if len(rows):
                points = draw_points(self.sampling.candidates, (1.0, 1.0), logits)
                wanted = PointTargets.sampled(target, points)
                sampled = sample_map(logits[rows], points).T  # (R, P)
                total = total + self._weigh(point_losses(sampled, queries.target[rows], wanted, self.sampling)).sum()
        return total / normalizer(total.new_tensor(len(queries)))

    def _weigh(self, terms: Tensor) -> Tensor:
        """(2, ...) cross-entropy and dice, each with its weight."""
        return torch.stack([self.config.mask_weight * terms[0], self.config.dice_weight * terms[1]])

    def losses(
        self, outputs: Mask2FormerOutputs, targets: Sequence[Targets], assignment: Mask2FormerAssignment
    ) -> dict[str, Tensor]:
        """Those of the last layer by name; `loss_deep` is the sum of those of all layers before it."""
        of_class = self.config.class_weight * self._class_losses(outputs, targets, assignment)  # (L,)
        of_mask, of_dice = self._weigh(self._mask_losses(outputs, targets, assignment))  # (L,) each
        return {
            "loss_class": of_class[-1],
            "loss_mask": of_mask[-1],
            "loss_dice": of_dice[-1],
            "loss_deep": (of_class + of_mask + of_dice)[:-1].sum(),
        }

    def _class_losses(
        self, outputs: Mask2FormerOutputs, targets: Sequence[Targets], assignment: Mask2FormerAssignment
    ) -> Tensor:
        """(L,): cross-entropy over classes and no object."""
        logits = at_least_float32(outputs.logits)
        owned = index_in_batch(targets, assignment.image[:, None], assignment.layer_target)
        labels = torch.cat([t.labels for t in targets])[owned]
        wanted = torch.full(logits.shape[:3], self.num_classes, device=logits.device)  # (L, B, N)
        layer = torch.arange(len(logits), device=logits.device)
        wanted[layer, assignment.image[:, None], assignment.layer_query] = labels
        weights = self.class_weights[wanted]
        losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(weights)
        return (losses * weights).sum((1, 2)) / all_reduce_mean(weights.sum((1, 2)))

    def _mask_losses(
        self, outputs: Mask2FormerOutputs, targets: Sequence[Targets], assignment: Mask2FormerAssignment
    ) -> Tensor:
        """(2, L): cross-entropy and dice of the masks at sampled points, summed over matched queries, per instance."""
        count = normalizer(at_least_float32(outputs.logits).new_tensor(sum(len(t) for t in targets)))
        if not len(assignment):  # every parameter takes part, whatever the batch
            return (outputs.pixels.embeddings.sum() + outputs.embeddings.sum()).mul(0).expand(2, len(outputs.logits))
        layer = torch.arange(len(outputs.logits), device=assignment.image.device)[:, None]
        total: Tensor | float = 0.0
        maps = outputs.pixels.embeddings.unbind()
        for i, rows in enumerate(rows_by_image(assignment.image, len(targets))[1]):
            if len(rows):
                points = draw_points(self.sampling.candidates, self._extent(outputs, i), maps[i])
                wanted = PointTargets.sampled(targets[i], points)
                queries = outputs.embeddings[layer, i, assignment.layer_query[rows].T]  # (L, R, D)
                logits = sample_products(queries, maps[i], points)
                owned = assignment.layer_target[rows].T
                per_layer = [point_losses(x, t, wanted, self.sampling) for x, t in zip(logits, owned, strict=True)]
                total = total + torch.stack(per_layer, dim=1).sum(2)  # (2, L)
        return total / count

    @torch.no_grad()
    def predict(
        self, outputs: Mask2FormerOutputs, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        threshold = self.config.mask_threshold if mask_threshold is None else mask_threshold
        level = math.log(threshold / (1 - threshold))  # masks are resized and cut as logits
        return [self._predict_one(outputs, i, size, level) for i, size in enumerate(sizes)]

    def _predict_one(self, outputs: Mask2FormerOutputs, i: int, size: tuple[int, int], level: float) -> Instances:
        """The best pairs of query and class; a score is that of the class times the mask's mean probability."""
        scores = at_least_float32(outputs.logits[-1, i]).softmax(dim=1)[:, :-1]  # (N, C)
        best, pairs = scores.flatten().topk(min(self.config.max_detections, scores.numel()))
        query, labels = pairs // scores.shape[1], pairs % scores.shape[1]
        kept, mask = query.unique(return_inverse=True)  # a query may be taken for several classes
        logits, matrices = self._masks(outputs, i, kept, size)
        rles, ratings = encode_scored_masks(logits, *matrices, level)
        mask = mask.cpu()
        scores = best.cpu() * ratings[mask]
        order = scores.argsort(descending=True, stable=True)
        order = order[ratings[mask[order]] > 0]  # nothing is left of an empty mask
        found = [rles[k] for k in mask[order].tolist()]
        return Instances(scores[order], labels.cpu()[order], rle_boxes(found), found, size)

    def _masks(
        self, outputs: Mask2FormerOutputs, i: int, query: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(n, h, w) mask logits of some queries where the image is, and the matrices that resize them."""
        valid = outputs.sizes[i]
        pixels = at_least_float32(outputs.pixels.embeddings[i])
        if not self.config.attend_padding:
            pixels = pixels[:, : -(-valid[0] // STRIDE), : -(-valid[1] // STRIDE)]
        logits = (outputs.embeddings[-1, i, query].to(pixels.dtype) @ pixels.flatten(1)).unflatten(1, pixels.shape[1:])
        return logits, resize_matrices((logits.shape[1], logits.shape[2]), STRIDE, valid, size)

    @torch.no_grad()
    def predict_panoptic(
        self, outputs: Mask2FormerOutputs, sizes: Sequence[tuple[int, int]], is_thing: Sequence[bool]
    ) -> list[PanopticSegments]:
        """Segments of things and stuff of each image, at the given (height, width); `is_thing` speaks of each class."""
        results = []
        for i, size in enumerate(sizes):
            scores, labels = at_least_float32(outputs.logits[-1, i]).softmax(dim=1).max(1)
            kept = ((labels < self.num_classes) & (scores > self.config.object_threshold)).nonzero().flatten()
            logits, matrices = self._masks(outputs, i, kept, size)
            results.append(
                panoptic_segments(
                    logits,
                    labels[kept].tolist(),
                    scores[kept].tolist(),
                    is_thing,
                    matrices,
                    self.config.overlap_threshold,
                )
            )
        return results


class PixelDecoder(nn.Module):
    """Three levels exchange what they know by deformable attention; the finest then meets the features of stride 4."""

    def __init__(self, channels: dict[int, int], config: Mask2FormerConfig) -> None:
        super().__init__()
        d = config.channels
        self.projections = nn.ModuleList(nn.Conv2d(channels[stride], d, 1) for stride in LEVELS)
        self.norms = nn.ModuleList(GroupNorm(d) for _ in LEVELS)
        self.level_embedding = nn.Parameter(torch.randn(len(LEVELS), d))
        self.layers = nn.ModuleList(
            DeformableLayer(d, config.heads, len(LEVELS), config.encoder_width) for _ in range(config.encoder_layers)
        )
        self.lateral, self.lateral_norm = nn.Conv2d(channels[STRIDE], d, 1, bias=False), GroupNorm(d)
        self.merge, self.merge_norm = nn.Conv2d(d, d, 3, padding=1, bias=False), GroupNorm(d)
        self.embed = nn.Conv2d(d, d, 1)
        for module in self.projections:
            nn.init.xavier_uniform_(cast(nn.Conv2d, module).weight)
        for conv in (self.lateral, self.merge, self.embed):
            nn.init.kaiming_uniform_(conv.weight, a=1)
        for module in (*self.projections, self.embed):
            nn.init.zeros_(cast(Tensor, module.bias))

    def forward(self, features: dict[int, Tensor], sizes: Sequence[tuple[int, int]]) -> tuple[list[Tensor], Tensor]:
        """Stride → features, to maps (B, D, h, w) of strides 32, 16, 8, and the pixel embeddings (B, D, h, w)."""
        valid = {stride: valid_cells(sizes, stride, x) for stride, x in features.items()}
        maps = [
            norm(project(features[stride]), valid[stride])
            for stride, project, norm in zip(LEVELS, self.projections, self.norms, strict=True)
        ]
        shapes = [(x.shape[2], x.shape[3]) for x in maps]
        tokens = torch.cat([x.flatten(2).mT for x in maps], dim=1)  # (B, S, D)
        positions = torch.cat(
            [_positions(x, s, sizes) + e for s, x, e in zip(LEVELS, maps, self.level_embedding, strict=True)], dim=1
        )
        places = reference_points(shapes, tokens.device, at_least_float32(tokens).dtype)
        inside = valid_tokens([valid[stride] for stride in LEVELS], maps)
        for layer in self.layers:
            tokens = layer(tokens, positions, places, shapes, inside)
        levels = [
            x.mT.unflatten(2, shape)
            for x, shape in zip(tokens.split([h * w for h, w in shapes], dim=1), shapes, strict=True)
        ]
        fine = self.lateral_norm(self.lateral(features[STRIDE]), valid[STRIDE])
        fine = fine + upsample(levels[-1], fine.shape[-2:], valid[LEVELS[-1]])
        fine = F.relu_(self.merge_norm(self.merge(without_padding(fine, valid[STRIDE])), valid[STRIDE]))
        return levels, without_padding(self.embed(fine), valid[STRIDE])


class MaskedDecoder(nn.Module):
    """Learned queries read the tokens where their last mask is, then each other."""

    def __init__(self, num_classes: int, config: Mask2FormerConfig) -> None:
        super().__init__()
        d = config.channels
        self.query_features = nn.Parameter(torch.randn(config.queries, d))
        self.query_positions = nn.Parameter(torch.randn(config.queries, d))
        self.level_embedding = nn.Parameter(torch.randn(len(LEVELS), d))
        self.cross_attention = nn.ModuleList(Attention(d, config.heads) for _ in range(config.decoder_layers))
        self.self_attention = nn.ModuleList(Attention(d, config.heads) for _ in range(config.decoder_layers))
        self.feed_forward = nn.ModuleList(FeedForward(d, config.decoder_width) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(d)
        self.classes = nn.Linear(d, num_classes + 1)
        self.masks = MLP(d, 3)

    def forward(
        self, levels: Sequence[Tensor], embeddings: Tensor, sizes: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Maps (B, D, h, w) and pixel embeddings, to (L, B, N, C + 1) class logits and (L, B, N, D) mask embeddings."""
        values = [x.flatten(2).mT + e for x, e in zip(levels, self.level_embedding, strict=True)]  # (B, S, D)
        keys = [v + _positions(x, s, sizes) for v, s, x in zip(values, LEVELS, levels, strict=True)]
        inside = [valid_tokens([valid_cells(sizes, s, x)], [x]) for s, x in zip(LEVELS, levels, strict=True)]
        # A coarse token at the border may look at nothing but padding, which would say that every mask is there.
        whole = repeat_border(embeddings.detach(), sizes, STRIDE)
        small = [
            F.interpolate(whole, size=x.shape[-2:], mode="bilinear", align_corners=False).flatten(2) for x in levels
        ]  # (B, D, S): the mask of a query at a level's size is its product with these
        queries = self.query_features.expand(len(embeddings), -1, -1)  # (B, N, D)
        seen = [self.norm(queries)]
        masks = [self.masks(seen[0])]
        for i, (cross_attention, self_attention, feed_forward) in enumerate(
            zip(self.cross_attention, self.self_attention, self.feed_forward, strict=True)
        ):
            k = i % len(LEVELS)
            attend = attention_mask(masks[-1].detach() @ small[k], inside[k])
            queries = cross_attention(queries, self.query_positions, keys[k], values[k], attend)
            queries = self_attention(queries, self.query_positions, queries + self.query_positions, queries)
            queries = feed_forward(queries)
            seen.append(self.norm(queries))
            masks.append(self.masks(seen[-1]))
        return self.classes(torch.stack(seen)), torch.stack(masks)


def attention_mask(logits: Tensor, valid: Tensor | None) -> Tensor:
    """(B, N, S) bool: where the mask of a query is, or everywhere if it is nowhere; never at padding.

    Args:
        logits: (B, N, S) of the masks.
        valid: (B, S) bool, false for padding; None if all is valid.

    >>> attention_mask(torch.tensor([[[1.0, -1.0], [-1.0, -1.0]]]), None).tolist()
    [[[True, False], [True, True]]]
    """
    attend = logits >= 0
    if valid is not None:
        attend &= valid[:, None]
    nowhere = ~attend.any(2, keepdim=True)
    return attend | (nowhere if valid is None else nowhere & valid[:, None])


def _positions(x: Tensor, stride: int, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """(B, S, D), or (1, S, D) if all images are of one size: where the tokens of a (B, D, h, w) map are."""
    height, width = x.shape[-2:]
    different = sizes if len(set(sizes)) > 1 else sizes[:1]
    extents = [(min(height, -(-h // stride)), min(width, -(-w // stride))) for h, w in different]
    dtype = torch.promote_types(x.dtype, torch.float32)
    extent = torch.tensor(extents, dtype=dtype).to(x.device, non_blocking=True)
    return sine_positions((height, width), extent, x.shape[1]).to(x.dtype)
