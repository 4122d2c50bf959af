"""SOLQ: segmenting objects by learning queries (Dong et al., NeurIPS 2021).

Deformable DETR whose queries predict a class, a box, and the mask inside of that box as a vector of DCT coefficients.
SOLQ has no dense masks of its own. For the method, and in training only, a query's mask is its dot product with the
finest tokens of the encoder, divided by √D: both are layer-normalized, and unscaled logits would start saturated.

Letters: B images, N queries of an image, L decoder layers, C classes, D channels, G levels, S tokens of all levels, V
values of a mask vector, M matched pairs, K instances of an image, Q queries, h × w the finest map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from uniquery.backbones import Backbone
from uniquery.layers.attention import MLP, Attention, FeedForward
from uniquery.layers.deformable_attention import DeformableAttention, DeformableLayer, image_centers, token_centers
from uniquery.layers.normalize import Normalize
from uniquery.layers.padding import GroupNorm, Sizes, valid_cells, valid_extents, valid_tokens, without_padding
from uniquery.layers.position import map_positions
from uniquery.masks import rle
from uniquery.masks.dct import MaskVectors, paste_masks
from uniquery.masks.losses import dice, sigmoid_focal
from uniquery.parallel import loss_normalizer
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.box_set import BoxCriterion, BoxOutputs, to_corners
from uniquery.segmenters.set_prediction import SetAssignment, match_layers, queries_of_layers, queries_with_targets
from uniquery.segmenters.settings import SegmenterSettings
from uniquery.structures import Images, Instances, PixelMap, Queries, Targets, at_least_float32, index_in_batch

FINEST_STRIDE = 8
LEVEL_STRIDES = (8, 16, 32, 64)  # the last is made from the backbone's coarsest features


class SOLQConfig(SegmenterSettings):
    """Settings of SOLQ; the defaults are the original's."""

    name: Literal["solq"] = "solq"
    queries: int = Field(300, gt=0, description="most instances that an image can have")
    channels: int = Field(384, gt=0, multiple_of=32, description="channels of tokens and queries")
    heads: int = Field(8, gt=0, description="attention heads; must divide the channels")
    encoder_layers: int = Field(6, ge=1, description="deformable layers that tokens read each other in")
    decoder_layers: int = Field(6, ge=1, description="layers that queries read tokens in; each refines the boxes")
    width: int = Field(1024, gt=0, description="hidden channels of the layers' feed-forward networks")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout of encoder and decoder")
    mask_size: int = Field(128, gt=0, description="side of the square that masks are resized to before the DCT")
    vector_length: int = Field(256, gt=0, description="DCT coefficients that describe a mask, lowest frequencies first")
    vector_width: int = Field(1024, gt=0, description="hidden channels of the network that predicts them")
    class_weight: float = Field(2.0, ge=0, description="weight of the class loss, also in matching")
    box_weight: float = Field(5.0, ge=0, description="weight of the boxes' L1 loss, also in matching")
    giou_weight: float = Field(2.0, ge=0, description="weight of the boxes' GIoU loss, also in matching")
    vector_weight: float = Field(3.0, ge=0, description="weight of the mask vectors' L1 loss")
    dense_masks: bool = Field(
        False, description="add loss_mask, focal + dice loss of the matched queries' dense masks, to the base losses"
    )
    dense_weight: float = Field(1.0, ge=0, description="weight of that loss, there and in the equivariance loss")

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
    def _check_sizes(self) -> Self:
        if self.channels % self.heads:
            raise ValueError(f"'heads' must divide 'channels'; {self.heads} does not divide {self.channels}")
        if self.vector_length > self.mask_size**2:
            raise ValueError(
                f"'vector_length' must be at most mask_size², {self.mask_size**2}; it is {self.vector_length}"
            )
        return self


class SOLQ(Segmenter[BoxOutputs, SetAssignment, Queries]):
    """Queries read the tokens of four levels around their boxes, and refine these layer by layer."""

    def __init__(self, backbone: Backbone, num_classes: int, config: SOLQConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or SOLQConfig()
        self.num_classes = num_classes
        self.dot_product_scale = config.channels**-0.5
        self.mask_vectors = MaskVectors(config.mask_size, config.vector_length)
        self.criterion = BoxCriterion(config.class_weight, config.box_weight, config.giou_weight, config.vector_weight)
        self.normalize = Normalize(backbone.pixels.mean, backbone.pixels.std, backbone.pixels.order)
        self.backbone = backbone
        backbone.use_outputs(LEVEL_STRIDES)
        self.encoder = Encoder(backbone.channels, config)
        self.decoder = Decoder(num_classes, config)
        self.vectors = MLP(config.channels, 3, config.vector_width, config.vector_length)
        _start_at_zero(self.vectors)

    def forward(self, images: Images) -> BoxOutputs:
        features = self.backbone(self.normalize(images))  # stride → (B, channels, h, w)
        tokens = self.encoder(features, images.sizes)
        logits, boxes, queries = self.decoder(tokens)  # (L, B, N, C), (L, B, N, 4), (L, B, N, D)
        finest = tokens.finest()  # (B, D, h, w)
        embeddings = without_padding(finest, valid_cells(images.sizes, FINEST_STRIDE, finest))
        return BoxOutputs(
            PixelMap(embeddings, FINEST_STRIDE), logits=logits, boxes=boxes, embeddings=queries, sizes=images.sizes
        )

    @torch.no_grad()
    def assign(self, outputs: BoxOutputs, targets: Sequence[Targets]) -> SetAssignment:
        return match_layers(self.criterion.costs(outputs, targets), targets, self.num_classes)

    def queries(self, outputs: BoxOutputs, assignment: SetAssignment) -> Queries:
        return queries_with_targets(outputs.embeddings[-1], assignment.image, assignment.query, assignment.target)

    def layer_queries(self, outputs: BoxOutputs, assignment: SetAssignment) -> list[Queries]:
        return queries_of_layers(outputs.embeddings, assignment)

    def mask_loss(self, logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> Tensor:
        """Focal + dice loss of dense masks, against the share of each cell that the instance covers."""
        logits = at_least_float32(logits)  # (Q, h, w)
        owned = index_in_batch(targets, queries.image, queries.target)
        masks = torch.cat([covered_share(t.masks, FINEST_STRIDE) for t in targets])[owned].to(logits.dtype)
        weight = torch.ones_like(logits)
        if any(t.valid is not None for t in targets):
            valid = torch.stack([_whole_cells(t, FINEST_STRIDE) for t in targets])[queries.image]
            weight, masks = valid.to(logits.dtype), masks * valid
        focal = (sigmoid_focal(logits, masks) * weight).sum((1, 2)) / weight.sum((1, 2)).clamp(min=1)
        losses = focal + dice(logits.sigmoid() * weight, masks)
        return self.config.dense_weight * losses.sum() / loss_normalizer(losses.new_tensor(len(queries)))

    def losses(self, outputs: BoxOutputs, targets: Sequence[Targets], assignment: SetAssignment) -> dict[str, Tensor]:
        """Those of the last layer by name; `loss_auxiliary` is the sum of those of all layers before it.

        `loss_mask`, only with `dense_masks`, is the `mask_loss` of the last layer's matched queries.
        """
        layer = torch.arange(len(outputs.logits), device=assignment.image.device)
        matched = outputs.embeddings[layer, assignment.image[:, None], assignment.layer_query]  # (M, L, D)
        target_vectors = torch.cat([self.mask_vectors.encode(t.masks, t.boxes) for t in targets])  # (ΣK, V)
        losses = self.criterion.losses(outputs, targets, assignment, self.vectors(matched), target_vectors)
        if self.config.dense_masks:
            queries = self.queries(outputs, assignment)
            queries = queries[queries.target >= 0]
            inside = [_inside_image(t, size) for t, size in zip(targets, outputs.sizes, strict=True)]
            losses["loss_mask"] = self.mask_loss(self.decode(queries, outputs.pixels), queries, inside)
        return losses

    @torch.no_grad()
    def predict(
        self, outputs: BoxOutputs, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        threshold = self.config.mask_threshold if mask_threshold is None else mask_threshold
        return [self._predict_one(outputs, i, size, threshold) for i, size in enumerate(sizes)]

    def _predict_one(self, outputs: BoxOutputs, i: int, size: tuple[int, int], threshold: float) -> Instances:
        scores = at_least_float32(outputs.logits[-1, i]).sigmoid()  # (N, C)
        best, pairs = scores.flatten().topk(min(self.config.max_detections, scores.numel()))
        query, labels = pairs // scores.shape[1], pairs % scores.shape[1]
        distinct, mask = query.unique(return_inverse=True)  # a query may be taken for several classes
        masks = self.mask_vectors.masks(self.vectors(outputs.embeddings[-1, i, distinct]), threshold)  # (n, S, S)
        boxes = to_corners(outputs.boxes[-1, i, distinct]) * outputs.boxes.new_tensor([size[1], size[0]] * 2)
        rles = paste_masks(masks, boxes, size)
        mask = mask.cpu()
        kept = torch.tensor([rle.area(each) > 0 for each in rles])[mask]
        mask = mask[kept]
        inside = torch.minimum(boxes.float().cpu().clamp(min=0), torch.tensor([size[1], size[0]] * 2))
        return Instances(
            best.float().cpu()[kept], labels.cpu()[kept], inside[mask], [rles[k] for k in mask.tolist()], size
        )


@dataclass(frozen=True)
class Tokens:
    """What the encoder gives to the decoder.

    Attributes:
        values: (B, S, D), row by row, level after level, finest first.
        shapes: (height, width) of each level.
        valid: (B, S) bool, false for padding; None if all is valid.
        extents: (B, G, 2) share of each level's width and height that its image takes; None if all of it.
    """

    values: Tensor
    shapes: Sequence[tuple[int, int]]
    valid: Tensor | None
    extents: Tensor | None

    def finest(self) -> Tensor:
        """(B, D, h, w): the tokens of the first level."""
        height, width = self.shapes[0]
        finest: Tensor = self.values[:, : height * width].mT.unflatten(2, (height, width))
        return finest


class Encoder(nn.Module):
    """Features of three strides, and a fourth level from the coarsest; then their tokens read each other."""

    def __init__(self, channels: dict[int, int], config: SOLQConfig) -> None:
        super().__init__()
        d = config.channels
        self.projections = nn.ModuleList(nn.Conv2d(channels[stride], d, 1) for stride in LEVEL_STRIDES[:-1])
        self.projections.append(nn.Conv2d(channels[LEVEL_STRIDES[-2]], d, 3, stride=2, padding=1))
        self.norms = nn.ModuleList(GroupNorm(d) for _ in LEVEL_STRIDES)
        self.level_embedding = nn.Parameter(torch.randn(len(LEVEL_STRIDES), d))
        self.layers = nn.ModuleList(
            DeformableLayer(d, config.heads, len(LEVEL_STRIDES), config.width, config.dropout)
            for _ in range(config.encoder_layers)
        )
        for module in self.projections:
            nn.init.xavier_uniform_(cast(nn.Conv2d, module).weight)
            nn.init.zeros_(cast(Tensor, module.bias))

    def forward(self, features: dict[int, Tensor], sizes: Sizes) -> Tokens:
        """Stride → features, to the tokens of all levels."""
        inputs = [features[min(stride, max(features))] for stride in LEVEL_STRIDES]
        # As in the original, padding takes part in the group normalization.
        maps = [
            norm(project(x)) for x, project, norm in zip(inputs, self.projections, self.norms, strict=True)
        ]  # (B, D, h, w)
        shapes = [(x.shape[2], x.shape[3]) for x in maps]
        values = torch.cat([x.flatten(2).mT for x in maps], dim=1)  # (B, S, D)
        positions = torch.cat(
            [
                map_positions(x, stride, sizes, place=0.5) + embedding
                for stride, x, embedding in zip(LEVEL_STRIDES, maps, self.level_embedding, strict=True)
            ],
            dim=1,
        )
        valid = valid_tokens([valid_cells(sizes, s, x) for s, x in zip(LEVEL_STRIDES, maps, strict=True)], maps)
        extents = _extents(sizes, shapes, at_least_float32(values))
        if extents is None:
            centers = token_centers(shapes, values.device, at_least_float32(values).dtype)
        else:
            centers = image_centers(shapes, extents)
        for layer in self.layers:
            values = layer(values, positions, centers, shapes, valid)
        return Tokens(values, shapes, valid, extents)


class Decoder(nn.Module):
    """Learned queries attend to each other and to the tokens around their boxes, which each layer refines."""

    def __init__(self, num_classes: int, config: SOLQConfig) -> None:
        super().__init__()
        d, layers = config.channels, config.decoder_layers
        self.queries = nn.Parameter(torch.randn(config.queries, 2 * d))  # positions, and features that layers update
        self.reference_points = nn.Linear(d, 2)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(layers))
        self.classes = nn.ModuleList(nn.Linear(d, num_classes) for _ in range(layers))
        self.boxes = nn.ModuleList(MLP(d, 3, outputs=4) for _ in range(layers))
        nn.init.xavier_uniform_(self.reference_points.weight)
        nn.init.zeros_(self.reference_points.bias)
        for classes, boxes in zip(self.classes, self.boxes, strict=True):
            nn.init.constant_(cast(Tensor, classes.bias), -math.log((1 - 0.01) / 0.01))
            _start_at_zero(cast(MLP, boxes))
        first = cast(nn.Linear, cast(MLP, self.boxes[0])[-1])
        nn.init.constant_(first.bias[2:], -2.0)  # boxes start at an eighth of the image

    def forward(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """(L, B, N, C) class logits, (L, B, N, 4) boxes and (L, B, N, D) queries of all layers."""
        positions, start = self.queries.chunk(2, dim=1)
        queries = start.expand(tokens.values.shape[0], -1, -1)  # (B, N, D)
        points = at_least_float32(self.reference_points(positions)).sigmoid()
        reference = points.expand(queries.shape[0], -1, -1)  # (B, N, 2) at first, then boxes (B, N, 4)
        all_queries, all_boxes = [], []
        for layer, box_head in zip(self.layers, self.boxes, strict=True):
            queries = layer(queries, positions, reference, tokens)
            boxes = refined_boxes(box_head(queries), reference)
            reference = boxes.detach()
            all_queries.append(queries)
            all_boxes.append(boxes)
        logits = [head(queries) for head, queries in zip(self.classes, all_queries, strict=True)]
        return torch.stack(logits), torch.stack(all_boxes), torch.stack(all_queries)


class DecoderLayer(nn.Module):
    """Queries attend to each other, then read the tokens around their reference points or boxes."""

    def __init__(self, config: SOLQConfig) -> None:
        super().__init__()
        self.self_attention = Attention(config.channels, config.heads, config.dropout)
        self.cross_attention = DeformableAttention(config.channels, config.heads, len(LEVEL_STRIDES))
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.channels)
        self.feed_forward = FeedForward(config.channels, config.width, config.dropout)

    def forward(self, queries: Tensor, positions: Tensor, reference: Tensor, tokens: Tokens) -> Tensor:
        """(B, N, D) queries, (N, D) positions and (B, N, 2 or 4) references as shares of the image, to (B, N, D)."""
        queries = self.self_attention(queries, positions, queries + positions, queries)
        on_levels = reference[:, :, None].expand(-1, -1, len(tokens.shapes), -1)  # (B, N, G, 2 or 4)
        if tokens.extents is not None:
            on_levels = on_levels * tokens.extents.repeat(1, 1, reference.shape[2] // 2)[:, None]
        read = self.cross_attention(queries, positions, on_levels, tokens.values, tokens.shapes, tokens.valid)
        return cast(Tensor, self.feed_forward(self.norm(queries + self.dropout(read))))


def _start_at_zero(mlp: MLP) -> None:
    last = cast(nn.Linear, mlp[-1])
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)


def refined_boxes(offsets: Tensor, reference: Tensor) -> Tensor:
    """(..., 4) boxes in 0..1, float32 or wider: offsets added to the logits of what they refine.

    Args:
        offsets: (..., 4).
        reference: (..., 4) boxes in 0..1, or (..., 2) points; the size then comes from the offsets alone.

    >>> refined_boxes(torch.zeros(1, 4), torch.tensor([[0.25, 0.5]])).tolist()
    [[0.25, 0.5, 0.5, 0.5]]
    """
    offsets = at_least_float32(offsets)
    logits = reference.clamp(1e-5, 1.0).log() - (1 - reference).clamp(1e-5, 1.0).log()
    return torch.cat([offsets[..., : logits.shape[-1]] + logits, offsets[..., logits.shape[-1] :]], dim=-1).sigmoid()


def covered_share(masks: Tensor, stride: int) -> Tensor:
    """(K, H / stride, W / stride) float32: the share of each cell that (K, H, W) bool masks cover.

    >>> covered_share(torch.tensor([[[True, True, True, False]]]).expand(1, 2, 4), 2).tolist()
    [[[1.0, 0.5]]]
    """
    cells: Tensor = masks.contiguous().view(torch.uint8).unflatten(2, (-1, stride)).unflatten(1, (-1, stride))
    return cells.sum((2, 4), dtype=torch.int32) / stride**2


def _whole_cells(target: Targets, stride: int) -> Tensor:
    """(H / stride, W / stride) bool: the cells whose pixels are all valid."""
    height, width = target.masks.shape[1:]
    if target.valid is None:
        return torch.ones(height // stride, width // stride, dtype=torch.bool, device=target.masks.device)
    cells: Tensor = target.valid.unflatten(1, (-1, stride)).unflatten(0, (-1, stride))
    return cells.all(3).all(1)


def _inside_image(target: Targets, size: tuple[int, int]) -> Targets:
    """The same targets, with padding marked as invalid too."""
    if target.masks.shape[1:] == size:
        return target
    inside = torch.zeros(target.masks.shape[1:], dtype=torch.bool, device=target.masks.device)
    inside[: size[0], : size[1]] = True if target.valid is None else target.valid[: size[0], : size[1]]
    return replace(target, valid=inside)


def _extents(sizes: Sizes, shapes: Sequence[tuple[int, int]], like: Tensor) -> Tensor | None:
    """(B, G, 2) share of each level's width and height that an image takes; None if all take all of it."""
    if isinstance(sizes, Tensor):
        per_level = [
            valid_extents(sizes, stride, shape) / torch.stack([torch.full((), n) for n in shape])
            for stride, shape in zip(LEVEL_STRIDES, shapes, strict=True)
        ]
        return torch.stack(per_level, dim=1).flip(2).to(like)
    shares = [
        [
            (min(1.0, -(-width // stride) / columns), min(1.0, -(-height // stride) / rows))
            for stride, (rows, columns) in zip(LEVEL_STRIDES, shapes, strict=True)
        ]
        for height, width in sizes
    ]
    if all(share == (1.0, 1.0) for image in shares for share in image):
        return None
    return torch.tensor(shares, dtype=like.dtype).to(like.device, non_blocking=True)
