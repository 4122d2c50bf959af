"""SOTR: segmenting objects with transformers (Guo et al., ICCV 2021).

Letters: B images, S × S cells of a level's grid, L cells of all levels, C channels, D channels of a kernel and of a
pixel, h × w a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from uniquery.backbones import Backbone
from uniquery.layers.fpn import FPN
from uniquery.layers.normalize import Normalize
from uniquery.layers.winograd import shared_conv3x3
from uniquery.segmenters.grid import MASK_STRIDE
from uniquery.segmenters.grid_segmenter import (
    GridOutputs,
    GridSegmenter,
    GridSettings,
    MaskHead,
    flatten_levels,
    grid_levels,
)
from uniquery.structures import Images, PixelMap


class SOTRConfig(GridSettings):
    """Settings of SOTR; the defaults are the original's."""

    name: Literal["sotr"] = "sotr"
    layers: int = Field(12, ge=1, description="layers of the transformer")
    heads: int = Field(8, ge=1, description="attention heads")

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.channels % self.heads:
            raise ValueError(f"'channels' ({self.channels}) must be a multiple of 'heads' ({self.heads})")
        return self


class SOTR(GridSegmenter):
    """A transformer over the cells of all grids classifies them and predicts the 1×1 kernels of their masks."""

    def __init__(self, backbone: Backbone, num_classes: int, config: SOTRConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or SOTRConfig()
        channels = config.channels
        self.normalize = Normalize(backbone.pixels.mean, backbone.pixels.std, backbone.pixels.order)
        self.backbone = backbone
        self.fpn = FPN(backbone.channels, channels)
        self.transformer = TwinTransformer(channels, config.heads, config.layers)
        self.classes = nn.Linear(channels, num_classes)
        self.kernels = nn.Linear(channels, config.kernel_channels)
        self.mask_head = MaskHead(channels, config.mask_channels, config.kernel_channels, with_coordinates=False)
        nn.init.constant_(self.classes.bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, images: Images) -> GridOutputs:
        p2, p3, p4, p5 = self.fpn(self.backbone(self.normalize(images))).values()  # (B, C, H/4, W/4) …
        grids = [
            F.interpolate(x, size=(side, side), mode="bilinear")
            for x, side in zip(grid_levels(p2, p3, p4, p5), self.config.grids, strict=False)
        ]
        *grids, p5 = self.transformer([*grids, p5])  # (B, C, S, S) of each level, (B, C, H/32, W/32)
        cells = flatten_levels(grids)  # (B, L, C)
        embeddings = self.mask_head((p2, p3, p4, p5))  # (B, D, h, w)
        return GridOutputs(
            PixelMap(embeddings, MASK_STRIDE),
            logits=self.classes(cells),
            kernels=self.kernels(cells),
            sizes=images.sizes,
        )


class TwinTransformer(nn.ModuleList):
    """Layers of column and row attention and of convolutions, without normalization or position encoding.

    As in the original, each map is laid out twice, side by side, and the result is the mean of both halves. The halves
    differ, as rows attend across both and convolutions reach over the border between them.
    """

    def __init__(self, channels: int, heads: int, layers: int) -> None:
        super().__init__(TwinLayer(channels, heads) for _ in range(layers))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """(B, C, h, w) of several sizes → the same shapes."""
        twins = [torch.cat([x, x], dim=3).permute(0, 2, 3, 1).contiguous() for x in maps]  # (B, h, 2 w, C)
        for layer in self:
            twins = layer(twins)
        widths = [x.shape[3] for x in maps]
        means = [(x[:, :, :width] + x[:, :, width:]) / 2 for x, width in zip(twins, widths, strict=True)]
        return [x.permute(0, 3, 1, 2) for x in means]


class TwinLayer(nn.Module):
    """x + columns(x) + rows(x), then x + convs(x)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.columns = AxialAttention(channels, heads, axis="columns")
        self.rows = AxialAttention(channels, heads, axis="rows")
        self.convs = ConvBranches(channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """(B, h, w, C) of several sizes → the same shapes."""
        maps = [x + self.columns(x) + self.rows(x) for x in maps]
        return [x + y for x, y in zip(maps, self.convs(maps), strict=True)]


class AxialAttention(nn.Module):
    """Attention among the cells of a column, or of a row; the result is scaled by a gate that starts at 0.

    Args:
        channels: channels of each cell.
        heads: number of heads that the channels are split into.
        axis: whether columns or rows attend to themselves.
    """

    def __init__(self, channels: int, heads: int, axis: Literal["columns", "rows"]) -> None:
        super().__init__()
        self.heads = heads
        self.axis = axis
        self.queries = nn.Linear(channels, channels, bias=False)
        self.keys_values = nn.Linear(channels, 2 * channels, bias=False)
        self.output = nn.Linear(channels, channels)
        self.gate = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, C) → (B, h, w, C)."""
        batch, height, width, _ = x.shape
        # These two orders are views: columns attend side by side like further heads, rows like further images.
        if self.axis == "columns":
            order = (batch, height, width * self.heads, -1)
        else:
            order = (batch * height, width, self.heads, -1)
        weights = (self.queries.weight, *self.keys_values.weight.chunk(2))
        q, k, v = (F.linear(x, weight).view(order).transpose(1, 2) for weight in weights)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return F.linear(attended, self.gate * self.output.weight, self.gate * self.output.bias)


class ConvBranches(nn.Module):
    """The sum of two branches: 3×3 convolution, leaky ReLU, 3×3 convolution, and a gate that starts at 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.second = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.gates = nn.ParameterList(torch.tensor(0.0) for _ in range(2))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """(B, h, w, C) of several sizes → the same shapes."""
        # Both branches are two convolutions: of C channels to 2 C, and of these to their sum.
        weight, bias = (torch.cat([getattr(conv, name) for conv in self.first]) for name in ("weight", "bias"))
        hidden = shared_conv3x3([x.permute(0, 3, 1, 2) for x in maps], weight, bias, large_tiles=True)
        hidden = [F.leaky_relu_(x) for x in hidden]
        gated = list(zip(self.gates, self.second, strict=True))
        weight = torch.cat([gate * conv.weight for gate, conv in gated], dim=1)
        bias = torch.stack([gate * conv.bias for gate, conv in gated]).sum(0)
        return [y.permute(0, 2, 3, 1) for y in shared_conv3x3(hidden, weight, bias, large_tiles=True)]
