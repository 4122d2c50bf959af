"""Sine position encodings (Vaswani et al., NeurIPS 2017) along both axes of an image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from uniquery.layers.padding import Sizes, valid_extents

_TEMPERATURE = 10_000.0


def map_positions(x: Tensor, stride: int, sizes: Sizes, place: float = 1.0) -> Tensor:
    """`sine_positions` of the cells of a (B, C, h, w) map: (B, h · w, C), or (1, h · w, C) if images are of one size.

    Args:
        x: the map.
        stride: how many input pixels one cell spans.
        sizes: valid (height, width) of each image.
        place: see `sine_positions`.
    """
    height, width = x.shape[-2:]
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(sizes, Tensor):
        extent = valid_extents(sizes, stride, (height, width)).to(dtype)
        return sine_positions((height, width), extent, x.shape[1], place).to(x.dtype)
    distinct = sizes if len(set(sizes)) > 1 else sizes[:1]
    extents = [(min(height, -(-h // stride)), min(width, -(-w // stride))) for h, w in distinct]
    extent = torch.tensor(extents, dtype=dtype).to(x.device, non_blocking=True)
    return sine_positions((height, width), extent, x.shape[1], place).to(x.dtype)


def sine_positions(shape: tuple[int, int], extents: Tensor, channels: int, place: float = 1.0) -> Tensor:
    """(B, height · width, channels): half of the channels encode the row, half the column.

    Along each axis, positions inside the image are normalized to (0, 2π].

    Args:
        shape: (height, width) of the map.
        extents: (B, 2) rows and columns that hold the image; those beyond them are padding.
        channels: a multiple of 4: sines and cosines of each axis.
        place: where in a cell its position is: 1 is its end, as in DETR, 0.5 its center, as in Deformable DETR.

    >>> sine_positions((1, 2), torch.tensor([[1.0, 2.0]]), 4).round(decimals=2) + 0
    tensor([[[ 0.,  1.,  0., -1.],
             [ 0.,  1.,  0.,  1.]]])
    """
    rows, columns = (_encode_axis(size, extents[:, axis], channels // 2, place) for axis, size in enumerate(shape))
    height, width = shape
    both = rows[:, :, None].expand(-1, -1, width, -1), columns[:, None].expand(-1, height, -1, -1)
    return torch.cat(both, dim=3).flatten(1, 2)


def _encode_axis(size: int, extent: Tensor, channels: int, place: float) -> Tensor:
    """(B, size, channels): sine, cosine, sine, … of falling frequencies."""
    position = torch.arange(size, device=extent.device, dtype=extent.dtype) + place
    angles = position / (extent[:, None] + 1e-6) * (2 * math.pi)  # (B, size)
    power = torch.arange(0, channels, 2, device=extent.device, dtype=extent.dtype) / channels
    scaled = angles[..., None] / _TEMPERATURE**power  # (B, size, channels / 2)
    return torch.stack([scaled.sin(), scaled.cos()], dim=3).flatten(2)
