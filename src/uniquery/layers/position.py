"""Sine position encodings (Vaswani et al., NeurIPS 2017) along both axes of an image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TEMPERATURE = 10_000.0


def sine_positions(shape: tuple[int, int], extents: Tensor, channels: int) -> Tensor:
    """(B, height · width, channels): half of the channels encode the row, half the column.

    Along each axis, positions inside the image are normalized to (0, 2π].

    Args:
        shape: (height, width) of the map.
        extents: (B, 2) rows and columns that hold the image; those beyond them are padding.
        channels: a multiple of 4: sines and cosines of each axis.

    >>> sine_positions((1, 2), torch.tensor([[1.0, 2.0]]), 4).round(decimals=2) + 0
    tensor([[[ 0.,  1.,  0., -1.],
             [ 0.,  1.,  0.,  1.]]])
    """
    rows, columns = (_encode_axis(size, extents[:, axis], channels // 2) for axis, size in enumerate(shape))
    height, width = shape
    both = rows[:, :, None].expand(-1, -1, width, -1), columns[:, None].expand(-1, height, -1, -1)
    return torch.cat(both, dim=3).flatten(1, 2)


def _encode_axis(size: int, extent: Tensor, channels: int) -> Tensor:
    """(B, size, channels): sine, cosine, sine, … of falling frequencies."""
    index = torch.arange(1, size + 1, device=extent.device, dtype=extent.dtype)
    angles = index / (extent[:, None] + 1e-6) * (2 * math.pi)  # (B, size)
    power = torch.arange(0, channels, 2, device=extent.device, dtype=extent.dtype) / channels
    scaled = angles[..., None] / _TEMPERATURE**power  # (B, size, channels / 2)
    return torch.stack([scaled.sin(), scaled.cos()], dim=3).flatten(2)
