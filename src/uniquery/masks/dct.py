"""Masks as vectors of DCT coefficients (Shen et al., CVPR 2021), as SOLQ predicts them.

A mask is cut out by its box, resized to a square and transformed by the orthonormal DCT-II; the vector is the first
coefficients in zig-zag order. All linear maps here are separable: a matrix along the rows, one along the columns.

Letters: K masks of H × W pixels, S × S the square, V coefficients of a vector, U frequencies along an axis that they
use, n masks computed together, h × w their window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from uniquery.masks import rle

_PIXELS_AT_ONCE = 2**22  # bounds the memory of images with hundreds of instances


@dataclass(frozen=True)
class MaskVectors:
    """Encodes masks as vectors and decodes vectors to masks.

    Attributes:
        size: S, side of the square that a mask is resized to.
        length: V, coefficients of a vector.
    """

    size: int = 128
    length: int = 256

    @torch.no_grad()
    def encode(self, masks: Tensor, boxes: Tensor) -> Tensor:
        """(K, V) float32 vectors of (K, H, W) bool masks, each cut out by its box (x0 y0 x1 y1 in pixels)."""
        vectors = torch.zeros(len(masks), self.length, device=masks.device)
        basis, index = self.basis(vectors)
        with torch.autocast(masks.device.type, enabled=False):
            for rows, crops in crop_and_resize(masks, boxes, self.size):
                coefficients = basis @ (crops >= 0.5).to(basis.dtype) @ basis.T  # (n, U, U)
                vectors[rows] = coefficients.flatten(1)[:, index]
        return vectors

    def decode(self, vectors: Tensor) -> Tensor:
        """(K, S, S) of (K, V) vectors: the values whose first coefficients these are, the others being zero."""
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
            basis, index = self.basis(vectors)
            coefficients = vectors.new_zeros(len(vectors), len(basis) ** 2)
            coefficients[:, index] = vectors
            return basis.T @ coefficients.view(-1, len(basis), len(basis)) @ basis

    def masks(self, vectors: Tensor, threshold: float) -> Tensor:
        """(K, S, S) bool of (K, V) vectors.

        As in the original, values are scaled to 0..1 from the square's smallest to its largest before the threshold. In
        a mask that fills its box, that would amplify noise: a square whose values are all above the threshold is full.
        """
        values = self.decode(vectors)
        low, high = values.flatten(1).amin(1), values.flatten(1).amax(1)
        level = torch.lerp(low, high, threshold)[:, None, None]
        return (values > level) | (low > threshold)[:, None, None]

    def basis(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(U, S) rows of the DCT matrix, and (V,) where in U × U coefficients those of a vector are."""
        row, column = zigzag(self.size, self.length)
        count = int(max(row.max(), column.max())) + 1
        basis = dct_matrix(self.size)[:count].to(like.device, like.dtype, non_blocking=True)
        return basis, (row * count + column).to(like.device, non_blocking=True)


def dct_matrix(size: int) -> Tensor:
    """(size, size) float64: the orthonormal DCT-II; frequency k is row k.

    >>> dct_matrix(2).round(decimals=3).tolist()
    [[0.707, 0.707], [0.707, -0.707]]
    """
    index = torch.arange(size, dtype=torch.float64)
    matrix = (math.pi * index[:, None] * (2 * index + 1) / (2 * size)).cos() * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def zigzag(size: int, length: int) -> tuple[Tensor, Tensor]:
    """Row and column of the first `length` cells of a square in zig-zag order: along its antidiagonals, as in JPEG.

    >>> list(zip(*(part.tolist() for part in zigzag(3, 5))))
    [(0, 0), (0, 1), (1, 0), (2, 0), (1, 1)]
    """
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    diagonal = row + column
    along = torch.where(diagonal % 2 == 1, row, column)  # down odd diagonals, up even ones
    order = (diagonal * size + along).flatten().argsort()[:length]
    return order // size, order % size


@torch.no_grad()
def crop_and_resize(masks: Tensor, boxes: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """ROIAlign (He et al., ICCV 2017) of each mask at its own box, with half-pixel alignment, in float32.

    A cell of the square is the mean of bilinear samples on a regular grid, about one per pixel that it spans. Masks
    with windows of similar size are computed together.

    Args:
        masks: (K, H, W) bool.
        boxes: (K, 4) x0 y0 x1 y1 in pixels.
        size: S.

    Yields:
        (n,) indices of masks, and their (n, S, S) values in 0..1; together, each mask once.
    """
    axes = [_Axis(boxes[:, 0::2].float(), masks.shape[2], size), _Axis(boxes[:, 1::2].float(), masks.shape[1], size)]
    known = torch.stack([part for axis in axes for part in (axis.length, axis.samples)], dim=1).cpu()  # one transfer
    for chunk in _similar(known[:, 0::2]):
        width, samples_x, height, samples_y = known[chunk].amax(0).tolist()
        rows = chunk.to(masks.device, non_blocking=True)
        x, y = axes[0].pixels_of(rows, width), axes[1].pixels_of(rows, height)  # (n, w), (n, h)
        window = masks[rows[:, None, None], y[:, :, None], x[:, None]].float()
        across, down = axes[0].matrix(rows, width, samples_x), axes[1].matrix(rows, height, samples_y)
        yield rows, down @ window @ across.mT


def _similar(sizes: Tensor) -> Iterator[Tensor]:
    """Indices of (K, 2) windows, small ones first, in chunks that stay small with all padded to the largest."""
    order = sizes.amax(1).argsort()
    start = 0
    while start < len(order):
        areas = sizes[order[start:]].cummax(0).values.prod(1) * torch.arange(1, len(order) - start + 1)
        count = max(1, int((areas <= _PIXELS_AT_ONCE).sum()))  # the areas grow
        yield order[start : start + count]
        start += count


class _Axis:
    """Along one axis: the window of pixels that each box's samples read, and how they become the cells of the square.

    Attributes:
        length: (K,) pixels of the window.
        samples: (K,) samples of a cell.
    """

    def __init__(self, bounds: Tensor, limit: int, size: int) -> None:
        self.bounds, self.limit, self.size = bounds - 0.5, limit, size  # a pixel's center is a whole number
        first, last = self.bounds.floor().long().unbind(1)
        self.first = first.clamp(0, limit - 1)
        self.length = (last + 1).clamp(0, limit - 1) - self.first + 1
        self.samples = ((bounds[:, 1] - bounds[:, 0]) / size).ceil().long().clamp(min=1)

    def pixels_of(self, rows: Tensor, length: int) -> Tensor:
        """(n, length) pixels from the first of each window on."""
        pixels = self.first[rows, None] + torch.arange(length, device=rows.device)
        return pixels.clamp(max=self.limit - 1)

    def matrix(self, rows: Tensor, length: int, most_samples: int) -> Tensor:
        """(n, S, length): the weight of each pixel of the window in each cell."""
        (low, high), count = self.bounds[rows].T[..., None, None], self.samples[rows, None, None]  # (n, 1, 1) each
        cell = (high - low) / self.size
        sample = torch.arange(most_samples, device=rows.device)
        start = low + torch.arange(self.size, device=rows.device)[:, None] * cell  # (n, S, 1)
        at = start + (sample + 0.5) * cell / count  # (n, S, most_samples)
        weight = ((sample < count) & (at >= -1) & (at <= self.limit)) / count
        at = at.clamp(0, self.limit - 1)
        before = at.floor()
        share = at - before
        pixel = (before.long() - self.first[rows, None, None]).clamp(0, length - 1)
        total: Tensor = at.new_zeros(*at.shape[:2], length)
        total.scatter_add_(2, pixel, (1 - share) * weight)
        return total.scatter_add_(2, (pixel + 1).clamp(max=length - 1), share * weight)


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> list[rle.Rle]:
    """Run-length masks of (height, width) `size`: each (S, S) mask resized to its box, one by one.

    A pixel belongs to the mask if the bilinear value at its center is at least one half; outside of the square, the
    value falls to zero within half a cell.

    Args:
        masks: (K, S, S) bool.
        boxes: (K, 4) x0 y0 x1 y1 in pixels of the output; they may exceed it.
        size: of the output.
    """
    height, width = size
    pasted = []
    for mask, (x0, y0, x1, y1) in zip(masks.float().cpu(), boxes.double().cpu().tolist(), strict=True):
        (columns, across), (rows, down) = (
            _pasting_matrix(*bounds, limit, len(mask)) for bounds, limit in (((x0, x1), width), ((y0, y1), height))
        )
        canvas = np.zeros((width, height), dtype=np.uint8)  # transposed, as run lengths go down the columns
        canvas[columns, rows] = (across @ mask.T @ down.T >= 0.5).numpy()
        pasted.append(rle.encode(canvas.T))
    return pasted


def _pasting_matrix(low: float, high: float, limit: int, size: int) -> tuple[slice, Tensor]:
    """The pixels of an axis that a box overlaps, and the (pixels, S) weight of each cell of the square in them."""
    cells = size / max(high - low, 1e-6)
    first, last = (min(max(side, 0), limit) for side in (math.floor(low - 1 / cells), math.ceil(high + 1 / cells)))
    at = (torch.arange(first, last) + 0.5 - low) * cells - 0.5
    weights = (1 - (at[:, None] - torch.arange(size)).abs()).clamp(min=0)
    return slice(first, last), weights.float()
