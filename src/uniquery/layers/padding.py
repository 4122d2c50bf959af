"""Layers that ignore the padding of a batch.

Letters: B images, C channels, h × w a map. `valid` is (B, 1, h, w) bool, or None if no image is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sizes = Sequence[tuple[int, int]] | Tensor
"""Valid (height, width) of each image; while a model is exported, a (B, 2) int64 tensor."""


def valid_extents(sizes: Tensor, stride: int, shape: tuple[int, int]) -> Tensor:
    """(B, 2) rows and columns of an (h, w) map that lie at least partly on each image."""
    limit = torch.stack([torch.full((), n, device=sizes.device) for n in shape])  # the shape may be symbolic
    return torch.minimum((sizes + (stride - 1)) // stride, limit)


def whole_size(pixels: Tensor) -> Tensor:
    """(1, 2) height and width of (B, C, H, W), which may be symbolic."""
    return torch.stack([torch.full((1,), n, device=pixels.device) for n in pixels.shape[-2:]], dim=1)


def valid_cells(sizes: Sizes, stride: int, features: Tensor) -> Tensor | None:
    """(B, 1, h, w) bool: which cells of a map lie at least partly on their image; None if all do.

    >>> valid_cells([(8, 9)], 8, torch.zeros(1, 1, 1, 3)).tolist()
    [[[[True, True, False]]]]
    >>> valid_cells([(8, 17)], 8, torch.zeros(1, 1, 1, 3)) is None
    True
    """
    height, width = features.shape[-2:]
    if isinstance(sizes, Tensor):
        cells = valid_extents(sizes, stride, (height, width))
    else:
        extents = [(-(-h // stride), -(-w // stride)) for h, w in sizes]
        if all(rows >= height and columns >= width for rows, columns in extents):
            return None
        cells = torch.tensor(extents).to(features.device, non_blocking=True)
    rows, columns = cells.T[..., None]  # (B, 1) each
    y, x = (torch.arange(n, device=features.device) for n in (height, width))
    inside: Tensor = (y < rows)[:, :, None] & (x < columns)[:, None]
    return inside[:, None]


def valid_tokens(valid: Sequence[Tensor | None], maps: Sequence[Tensor]) -> Tensor | None:
    """(B, S) bool of the cells of several (B, C, h, w) maps, one after the other; None if all are valid."""
    if all(map_valid is None for map_valid in valid):
        return None
    filled = [
        x.new_ones(len(x), x.shape[2] * x.shape[3], dtype=torch.bool) if map_valid is None else map_valid.flatten(1)
        for map_valid, x in zip(valid, maps, strict=True)
    ]
    return torch.cat(filled, dim=1)


def without_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """(B, C, h, w) with zeros in the padding."""
    return x if valid is None else x.masked_fill(~valid, 0)


def repeat_border(x: Tensor, sizes: Sizes, stride: int) -> Tensor:
    """(B, C, h, w) with each image's last row and column repeated into its padding."""
    height, width = x.shape[-2:]
    if isinstance(sizes, Tensor):
        last = valid_extents(sizes, stride, (height, width)) - 1  # (B, 2)
        row, column = (torch.arange(n, device=x.device).minimum(last[:, i, None]) for i, n in enumerate(x.shape[-2:]))
        x = x.gather(2, row[:, None, :, None].expand_as(x))
        return x.gather(3, column[:, None, None].expand_as(x))
    if valid_cells(sizes, stride, x) is None:
        return x
    filled = []
    for i, size in enumerate(sizes):
        rows, columns = (min(n, -(-side // stride)) for n, side in zip((height, width), size, strict=True))
        image = x[i : i + 1, :, :rows, :columns]
        filled.append(F.pad(image, (0, width - columns, 0, height - rows), mode="replicate"))
    return torch.cat(filled)


def upsample(x: Tensor, size: tuple[int, int], valid: Tensor | None) -> Tensor:
    """Bilinear resizing of (B, C, h, w), as if each image ended where it is valid."""
    if valid is None:
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    weight = F.interpolate(valid.to(x.dtype), size=size, mode="bilinear", align_corners=False)
    total = F.interpolate(without_padding(x, valid), size=size, mode="bilinear", align_corners=False)
    return total / weight.clamp(min=1e-3)


class GroupNorm(nn.GroupNorm):
    """Group normalization with the statistics of valid cells only.

    32 groups, or fewer so that a group has at least two channels: one channel of one cell has no variance.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(min(32, channels // 2), channels)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, C, h, w) → (B, C, h, w); padding becomes zero."""
        if valid is None:
            return super().forward(x)
        groups = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (self.num_groups, -1))
        inside = valid[:, None].to(groups.dtype)  # (B, 1, 1, h, w)
        count = inside.sum((2, 3, 4), keepdim=True) * groups.shape[2]
        mean = (groups * inside).sum((2, 3, 4), keepdim=True) / count
        centered = (groups - mean) * inside
        scale = (centered.square().sum((2, 3, 4), keepdim=True) / count + self.eps).rsqrt()
        y = (centered * scale).flatten(1, 2) * self.weight[:, None, None] + self.bias[:, None, None]
        return without_padding(y, valid)
