"""Masks whose score depends on what they look like at the size of the caller's image.

Letters: N predictions, h × w the map of a mask, H × W its output size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from uniquery import rle
from uniquery.postprocess import resize_matrix, resized_patches


def resize_matrices(
    cells: tuple[int, int], stride: int, valid: tuple[int, int], size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """(h, H) and (w, W): from cells to input pixels, cut to the valid image, and on to the output; bilinear twice."""
    rows, columns = (
        resize_matrix(resize_matrix(torch.eye(n), n * stride)[:, :inside], length)
        for n, inside, length in zip(cells, valid, size, strict=True)
    )
    return rows, columns


def encode_scored_masks(
    logits: Tensor, rows: Tensor, columns: Tensor, threshold: float
) -> tuple[list[rle.Rle], Tensor]:
    """Resizes, thresholds and encodes masks one by one, and rates them: the mean probability inside of each.

    Args:
        logits: (N, h, w).
        rows: (h, H) resizing matrix, its columns non-negative with sum 1.
        columns: (w, W) resizing matrix.
        threshold: pixels whose resized logit is above it belong to the mask.

    Returns:
        N compressed run-length masks of size (H, W), and (N,) scores, 0 for an empty mask.
    """
    masks, scores = [], []
    for window, patch in resized_patches(logits, rows, columns, threshold):
        inside = patch > threshold
        canvas = np.zeros((columns.shape[1], rows.shape[1]), dtype=np.uint8)  # (W, H): run lengths go down the columns
        canvas[window] = inside.numpy()
        masks.append(rle.encode(canvas.T))
        scores.append((patch.sigmoid() * inside).sum() / inside.sum().clamp(min=1))
    return masks, torch.stack(scores) if scores else torch.zeros(0)
