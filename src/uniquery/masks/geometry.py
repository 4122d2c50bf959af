"""Boxes, centroids and areas of masks.

Letters: K masks, H × W pixels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_PIXELS_AT_ONCE = 2**22


def mask_boxes(masks: Tensor) -> Tensor:
    """(K, 4) x0 y0 x1 y1 of non-empty (K, H, W) masks, the far edge exclusive.

    >>> mask_boxes(torch.eye(3, dtype=torch.bool)[None, :2]).tolist()
    [[0.0, 0.0, 2.0, 2.0]]
    """
    columns, rows = masks.any(1).to(torch.uint8), masks.any(2).to(torch.uint8)  # (K, W), (K, H)
    if not len(masks):
        return torch.zeros(0, 4, device=masks.device)
    x0, y0 = columns.argmax(1), rows.argmax(1)
    x1, y1 = masks.shape[2] - columns.flip(1).argmax(1), masks.shape[1] - rows.flip(1).argmax(1)
    return torch.stack([x0, y0, x1, y1], dim=1).float()


def mask_centroids(masks: Tensor) -> Tensor:
    """(K, 2): mean x, y of the pixel indices of each (H, W) mask; 0 for an empty one.

    >>> mask_centroids(torch.tensor([[[False, True], [False, True]]])).tolist()
    [[1.0, 0.5]]
    """
    height, width = masks.shape[-2:]
    columns, rows = _counts(masks, 1).float(), _counts(masks, 2).float()  # (K, W), (K, H)
    area = columns.sum(1).clamp(min=1)
    x = columns @ torch.arange(width, device=masks.device, dtype=torch.float32) / area
    y = rows @ torch.arange(height, device=masks.device, dtype=torch.float32) / area
    return torch.stack([x, y], dim=1)


def mask_areas(masks: Tensor) -> Tensor:
    """(K,): how many pixels each (H, W) mask has.

    >>> mask_areas(torch.tensor([[[False, True], [False, True]]])).tolist()
    [2]
    """
    return _counts(masks, (1, 2))


def _counts(masks: Tensor, dim: Literal[1, 2] | tuple[Literal[1], Literal[2]]) -> Tensor:
    """The sum of (K, H, W) masks over one or both of their sides, int64.

    On a CPU, torch widens bool to int64 before it sums, eight times the memory: so this sums a few masks at a time. The
    result is allocated first, so that all chunks can reuse the same memory.
    """
    if masks.device.type != "cpu":
        return masks.sum(dim)
    sides = {1: masks.shape[2:], 2: masks.shape[1:2], (1, 2): ()}[dim]
    counts = torch.empty(len(masks), *sides, dtype=torch.int64)
    at_once = max(1, _PIXELS_AT_ONCE // max(masks.shape[1:].numel(), 1))
    for start in range(0, len(masks), at_once):
        counts[start : start + at_once] = masks[start : start + at_once].sum(dim)
    return counts
