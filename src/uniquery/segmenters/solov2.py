"""SOLOv2: dynamic and fast instance segmentation (Wang et al., NeurIPS 2020).

Letters: B images, S × S cells of a level's grid, L cells of all levels, C classes, D channels of a kernel and of a
pixel, h × w the mask map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from uniquery.backbones import Backbone
from uniquery.layers.fpn import FPN
from uniquery.layers.normalize import Normalize
from uniquery.layers.padding import GroupNorm
from uniquery.layers.winograd import SharedConv3x3, SharedSequential
from uniquery.segmenters.grid import MASK_STRIDE, coordinates
from uniquery.segmenters.grid_segmenter import (
    GridOutputs,
    GridSegmenter,
    GridSettings,
    MaskHead,
    flatten_levels,
    grid_levels,
)
from uniquery.structures import Images, PixelMap


class SOLOv2Config(GridSettings):
    """Settings of SOLOv2; the defaults are the original's."""

    name: Literal["solov2"] = "solov2"
    head_channels: int = Field(512, gt=0, multiple_of=32, description="channels of the two head towers")
    head_convs: int = Field(4, ge=1, description="convolutions of each head tower")


class SOLOv2(GridSegmenter):
    """Each cell of a grid classifies the instance centered on it, and predicts the 1×1 kernel of its mask."""

    def __init__(self, backbone: Backbone, num_classes: int, config: SOLOv2Config | None = None) -> None:
        super().__init__()
        self.config = config = config or SOLOv2Config()
        self.normalize = Normalize(backbone.pixels.mean, backbone.pixels.std, backbone.pixels.order)
        self.backbone = backbone
        self.fpn = FPN(backbone.channels, config.channels)
        self.head = GridHead(
            config.channels, config.head_channels, config.head_convs, num_classes, config.kernel_channels
        )
        self.mask_head = MaskHead(config.channels, config.mask_channels, config.kernel_channels, with_coordinates=True)

    def forward(self, images: Images) -> GridOutputs:
        p2, p3, p4, p5 = self.fpn(self.backbone(self.normalize(images))).values()  # (B, channels, H/4, W/4) …
        embeddings = self.mask_head((p2, p3, p4, p5))  # (B, D, h, w)
        logits, kernels = self.head(grid_levels(p2, p3, p4, p5), self.config.grids)  # (B, L, C), (B, L, D)
        return GridOutputs(PixelMap(embeddings, MASK_STRIDE), logits=logits, kernels=kernels, sizes=images.sizes)


class GridHead(nn.Module):
    """Two towers shared by all levels, on features resized to a grid: classes, and kernels, which get coordinates."""

    def __init__(self, in_channels: int, channels: int, convs: int, num_classes: int, kernel_channels: int) -> None:
        super().__init__()
        self.class_tower = Tower(in_channels, channels, convs)
        self.kernel_tower = Tower(in_channels + 2, channels, convs)
        self.classes = SharedConv3x3(channels, num_classes)
        self.kernels = SharedConv3x3(channels, kernel_channels)
        for predictor in (self.classes, self.kernels):
            nn.init.normal_(predictor.weight, std=0.01)
            nn.init.zeros_(cast(Tensor, predictor.bias))
        nn.init.constant_(cast(Tensor, self.classes.bias), -math.log((1 - 0.01) / 0.01))

    def forward(self, levels: Sequence[Tensor], grids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(B, in_channels, h, w) of each level → (B, L, C) class logits and (B, L, D) kernels."""
        resized, with_coordinates = [], []
        for features, side in zip(levels, grids, strict=False):
            x, xy = (F.interpolate(m, size=(side, side), mode="bilinear") for m in (features, coordinates(features)))
            resized.append(x)
            with_coordinates.append(torch.cat([x, xy], dim=1))
        logits, kernels = self.classes(self.class_tower(resized)), self.kernels(self.kernel_tower(with_coordinates))
        return flatten_levels(logits), flatten_levels(kernels)


class Tower(SharedSequential):
    """Convolutions with group normalization and ReLU, the same on maps of several sizes."""

    def __init__(self, inputs: int, channels: int, convs: int) -> None:
        super().__init__()
        for i in range(convs):
            conv = SharedConv3x3(inputs if i == 0 else channels, channels, bias=False)
            nn.init.normal_(conv.weight, std=0.01)
            self.extend((conv, GroupNorm(channels), nn.ReLU(inplace=True)))
