"""Swin Transformers [Liu et al., ICCV 2021]: attention inside windows that every other block shifts by half.

As in the published detection backbones, images may have any size: after its normalization, a map is padded with zeros
at the right and the bottom to whole windows. These zeros take part in attention (the weights were trained with that)
and are removed after it.

Letters: B images, C channels, h × w a map, N windows of a map, M window side, L = M² cells of a window, d channels of a
head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uniquery.backbones.base import STRIDES, PixelFormat, StagedBackbone

PIXELS = PixelFormat(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375), order="RGB")

# Channels at stride 4, doubled at each later stride, and blocks of each stage.
SIZES = {
    "tiny": (96, (2, 2, 6, 2)),
    "small": (96, (2, 2, 18, 2)),
    "base": (128, (2, 2, 18, 2)),
    "large": (192, (2, 2, 18, 2)),
}
PATCH = 4
HEAD_CHANNELS = 32
EXPANSION = 4
DROP_PATH = 0.3  # Mask2Former's, for all four sizes


def relative_positions(window: int) -> Tensor:
    """(L, L) which row of a table of (2M − 1)² offsets belongs to each pair of cells of a window.

    >>> relative_positions(2).tolist()
    [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    """
    side = torch.arange(window)
    cells = torch.cartesian_prod(side, side)  # (L, 2) row, column
    offsets = cells[:, None] - cells + window - 1  # (L, L, 2), from 0 to 2M − 2
    return offsets[..., 0] * (2 * window - 1) + offsets[..., 1]


def to_windows(x: Tensor, window: int) -> Tensor:
    """(B, h, w, C), where h and w are multiples of the window, to (B, N, L, C).

    >>> to_windows(torch.arange(8).view(1, 2, 4, 1), 2).squeeze().tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    tiles: Tensor = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))  # (B, h / M, M, w / M, M, C)
    return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def from_windows(windows: Tensor, window: int, height: int) -> Tensor:
    """The inverse of `to_windows` for a map of `height` rows: (B, N, L, C) to (B, h, w, C)."""
    tiles: Tensor = windows.unflatten(2, (window, window)).unflatten(1, (height // window, -1))
    return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def shifted_window_mask(height: int, width: int, window: int, shift: int, device: torch.device | None = None) -> Tensor:
    """(N, L, L) bool: which cells share a window only because the map was rolled by `shift`, up and to the left.

    Attention between them is masked out.

    >>> shifted_window_mask(2, 2, window=2, shift=1).int().tolist()
    [[[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]]
    """
    rows, columns = (
        (index >= len(index) - window).int() + (index >= len(index) - shift).int()
        for index in (torch.arange(height, device=device), torch.arange(width, device=device))
    )
    regions = (3 * rows[:, None] + columns)[None, :, :, None]
    cell_regions = to_windows(regions, window)[0, :, :, 0]  # (N, L)
    return cell_regions[:, :, None] != cell_regions[:, None, :]


class WindowAttention(nn.Module):
    """Self-attention inside each window, with a bias by relative position: (B, h, w, C) to (B, h, w, C).

    Args:
        channels: C.
        heads: number of heads.
        window: side of a window, in cells.
        shift: by how many cells the windows are moved down and to the right.
    """

    relative_position_index: Tensor

    def __init__(self, channels: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.register_buffer("relative_position_index", relative_positions(window), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -width % self.window, 0, -height % self.window))
        rows, columns = x.shape[1:3]
        x = x.roll((-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = from_windows(self._attend(to_windows(x, self.window), self._bias(rows, columns)), self.window, rows)
        x = x.roll((self.shift, self.shift), (1, 2)) if self.shift else x
        return x[:, :height, :width]

    def _attend(self, windows: Tensor, bias: Tensor) -> Tensor:
        """(B, N, L, C) to (B, N, L, C), with the `_bias` of the map."""
        batch, count = windows.shape[:2]
        qkv = self.qkv(windows).unflatten(3, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)  # (3, B, N, heads, L, d)
        # The fused kernels need two axes before L. The bias is the same for all windows, or with a shift for all
        # images: the axis that it does not depend on comes first, so that it broadcasts.
        q, k, v = qkv.flatten(2, 3) if self.shift else qkv.flatten(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        out = out.reshape(batch, count, self.heads, *out.shape[-2:]).transpose(2, 3).flatten(3)
        projected: Tensor = self.proj(out)
        return projected

    def _bias(self, height: int, width: int) -> Tensor:
        """What is added to the logits: (1, heads, L, L), or with a shift (1, N · heads, L, L)."""
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)  # (heads, L, L)
        if not self.shift:
            return bias[None]
        masked = shifted_window_mask(height, width, self.window, self.shift, bias.device)[:, None]
        # The original adds −100. That leaves weights of e⁻¹⁰⁰, denormal numbers in float32: where all other cells are
        # zeros they reach the projection, and a CPU takes thirty times as long for it.
        return bias.masked_fill(masked, -torch.inf).flatten(0, 1)[None]


class DropPath(nn.Module):
    """Stochastic depth: in training, the branch is zero for a random share `rate` of the images, and scaled up else."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to (B, ...)."""
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        kept = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(keep)
        return x * (kept / keep)


class MLP(nn.Module):
    """Two linear layers around a GELU: (..., C) to (..., C)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, EXPANSION * channels)
        self.fc2 = nn.Linear(EXPANSION * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """Attention in windows, then an MLP, each on normalized input and around a shortcut: (B, h, w, C) to the same."""

    def __init__(self, channels: int, heads: int, window: int, shift: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attn = WindowAttention(channels, heads, window, shift)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = MLP(channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        out: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return out


class PatchEmbedding(nn.Module):
    """Patches of 4 × 4 pixels to cells: (B, 3, H, W) to (B, H / 4, W / 4, C)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, channels, PATCH, PATCH)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        height, width = x.shape[2:]
        x = F.pad(x, (0, -width % PATCH, 0, -height % PATCH))
        out: Tensor = self.norm(self.proj(x).permute(0, 2, 3, 1))
        return out


class PatchMerging(nn.Module):
    """Every 2 × 2 cells to one of twice the channels: (B, h, w, C) to (B, h / 2, w / 2, 2C)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        cells = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, h / 2, 2, w / 2, 2, C)
        out: Tensor = self.reduction(self.norm(cells.permute(0, 1, 3, 4, 2, 5).flatten(3)))
        return out


class Stage(nn.Module):
    """Patch merging, except in the first, and blocks of which every other is shifted.

    Attributes:
        norm: normalizes the feature map that the backbone returns; the next stage gets the map without it.
    """

    def __init__(self, merge: nn.Module, blocks: Iterable[Block], norm: nn.LayerNorm) -> None:
        super().__init__()
        self.merge = merge
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, C) to (B, h, w, C), or from the second on to (B, h / 2, w / 2, 2C)."""
        x = self.merge(x)
        for block in self.blocks:
            x = block(x)
        return x


class Swin(StagedBackbone):
    """A Swin Transformer as a stem, the embedding of patches, and the stages 1..4, at strides 4..32.

    Inside, maps are (B, h, w, C). The original trains its tables of position biases without weight decay; the same is
    `optim.layers: {relative_position_bias_table: {weight_decay: 0}}` in a config.

    Args:
        channels: channels at stride 4, doubled at each later stride.
        depths: how many blocks the stages have.
        window: side of an attention window, in cells.
        drop_path: probability that the last block is skipped in training; it falls linearly to 0 for the first block.
        head_channels: channels of one attention head.

    >>> Swin(*SIZES["tiny"]).channels
    {4: 96, 8: 192, 16: 384, 32: 768}
    """

    def __init__(
        self,
        channels: int,
        depths: Sequence[int],
        *,
        window: int = 7,
        drop_path: float = DROP_PATH,
        head_channels: int = HEAD_CHANNELS,
    ) -> None:
        super().__init__()
        self.pixels = PIXELS
        self.channels = {stride: channels << level for level, stride in enumerate(STRIDES)}
        last = max(sum(depths) - 1, 1)
        rates = iter([drop_path * i / last for i in range(sum(depths))])
        self.stem = PatchEmbedding(channels)
        self.stage1, self.stage2, self.stage3, self.stage4 = (
            Stage(
                nn.Identity() if level == 0 else PatchMerging(width // 2),
                [
                    Block(width, width // head_channels, window, shift=window // 2 * (i % 2), drop_path=next(rates))
                    for i in range(depths[level])
                ],
                nn.LayerNorm(width),
            )
            for level, width in enumerate(self.channels.values())
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def stages(self) -> Sequence[nn.Module]:
        """The stem and stages 1..4."""
        return self.stem, self.stage1, self.stage2, self.stage3, self.stage4

    def blocks(self, stage: nn.Module) -> Iterable[nn.Module]:
        """Patch merging, then the blocks."""
        return (stage.merge, *stage.blocks) if isinstance(stage, Stage) else (stage,)

    def output(self, stage: nn.Module, x: Tensor) -> Tensor:
        """Normalized, and (B, h, w, C) as (B, C, h, w) in channels-last memory format."""
        assert isinstance(stage, Stage)
        out: Tensor = stage.norm(x)
        return out.permute(0, 3, 1, 2)

    def use_outputs(self, strides: Collection[int]) -> None:
        """See the base; each output has a normalization of its own."""
        for stride, stage in zip(STRIDES, self.stages()[1:], strict=True):
            if stride not in strides:
                cast(Stage, stage).norm.requires_grad_(False)

    def freeze(self, count: int) -> None:
        """As in the base class; frozen blocks are never skipped."""
        super().freeze(count)
        for stage in self.stages()[:count]:
            for module in stage.modules():
                if isinstance(module, DropPath):
                    module.rate = 0.0
