"""Bilinear sums over a table of values: what deformable attention computes, for autograd on any device.

The values of all levels become the rows of one table, each level inside a border of zeros. A sum over points and their
four corners is then a weighted sum over rows, which `F.embedding_bag` computes without a tensor of sampled values.

Letters: B images, S tokens of all levels, Q queries, A heads, L levels, P points of a level, J = L · P, D channels of a
head, R = B · A · Q sums, one for each image, head and query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = Sequence[tuple[int, int]]

_BORDER = 2  # cells of zeros around a level


def sum_by_autograd(values: Tensor, x: Tensor, y: Tensor, logits: Tensor, shapes: Shapes) -> Tensor:
    """`deformable_sum` on any device."""
    index = TableIndex(values, shapes, x.shape[3] // len(shapes))
    flat_x, flat_y, attention = x.flatten(0, 2), y.flatten(0, 2), logits.softmax(dim=3).flatten(0, 2)
    rows = index.corner_rows(flat_x, flat_y, index.first_rows(x))
    weights = corner_weights(*index.fractions(flat_x, flat_y), attention)
    table = pad_levels(values, shapes)
    return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights).view(*x.shape[:3], values.shape[3])


def sum_by_grid_sample(values: Tensor, x: Tensor, y: Tensor, logits: Tensor, shapes: Shapes) -> Tensor:
    """`deformable_sum` by operators that ONNX has; the shapes may be symbolic."""
    points, levels = x.shape[3] // len(shapes), values.split([height * width for height, width in shapes], dim=2)
    attention = logits.softmax(dim=3).flatten(0, 1)[:, None]  # (B · A, 1, Q, J)
    total = values.new_zeros(())
    for i, (level, (height, width)) in enumerate(zip(levels, shapes, strict=True)):
        chosen = slice(i * points, (i + 1) * points)
        grid = torch.stack([(x[..., chosen] + 0.5) * 2 / width - 1, (y[..., chosen] + 0.5) * 2 / height - 1], dim=4)
        cells = level.mT.flatten(0, 1).unflatten(2, (height, width))  # (B · A, D, h, w)
        sampled = F.grid_sample(cells, grid.flatten(0, 1), align_corners=False)  # (B · A, D, Q, P)
        total = total + (sampled * attention[..., chosen]).sum(3)
    result: Tensor = total.mT.unflatten(0, values.shape[:2])
    return result


class TableIndex:
    """Row numbers of the cells of each level in the table of `pad_levels`.

    A point outside of a level is clamped to its border, so it needs no special case: it reads zeros.
    """

    def __init__(self, values: Tensor, shapes: Shapes, points: int) -> None:
        sizes = [_padded_size(shape) for shape in shapes]
        rows = [(*shape, sum(sizes[:level])) for level, shape in enumerate(shapes)]
        table = torch.tensor(rows, dtype=values.dtype, device=values.device).T.repeat_interleave(points, dim=1)
        self.height, self.width = table[:2]  # (J,) each
        self.padded_width = self.width + _BORDER
        self.origin = (table[2] + _BORDER * self.padded_width + _BORDER).to(torch.int32)
        ones = torch.ones_like(self.padded_width)
        self.corners = torch.stack([0 * ones, ones, self.padded_width, self.padded_width + 1]).to(torch.int32)  # (4, J)
        self.cells = sum(sizes)

    def first_rows(self, x: Tensor) -> Tensor:
        """(R, 1): the first row of each sum's image and head, for (B, A, Q, J) points."""
        tables = torch.arange(x.shape[0] * x.shape[1], device=x.device, dtype=torch.int32)
        return (tables * self.cells).repeat_interleave(x.shape[2])[:, None]

    def fractions(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """How far right of and below the upper left of its four corners a point lies, in 0..1."""
        x, y = self._clamp(x, self.width), self._clamp(y, self.height)
        return x - x.detach().floor(), y - y.detach().floor()

    def corner_rows(self, x: Tensor, y: Tensor, first_row: Tensor) -> Tensor:
        """(n, 4 · J) int32 of n × J points: the table's rows of their corners."""
        left, top = self._clamp(x.detach(), self.width).floor_(), self._clamp(y.detach(), self.height).floor_()
        cell = torch.addcmul(left, top, self.padded_width).to(torch.int32).add_(self.origin)
        cell.clamp_(min=0)  # NaN positions would give invalid indices
        return (cell.add_(first_row)[:, None] + self.corners).flatten(1)

    @staticmethod
    def _clamp(position: Tensor, size: Tensor) -> Tensor:
        return torch.minimum(position.clamp(min=-_BORDER), size)


def corner_weights(fraction_x: Tensor, fraction_y: Tensor, attention: Tensor) -> Tensor:
    """(n, 4 · J): attention times the bilinear weights of a point's corners."""
    lower = attention * fraction_y
    upper = attention - lower
    upper_right, lower_right = upper * fraction_x, lower * fraction_x
    return torch.stack([upper - upper_right, upper_right, lower - lower_right, lower_right], dim=1).flatten(1)


def _padded_size(shape: tuple[int, int]) -> int:
    """Cells of a level with its border; the right border of a row is the left border of the next, so one row more."""
    return (shape[0] + 2 * _BORDER + 1) * (shape[1] + _BORDER)


def pad_levels(values: Tensor, shapes: Shapes) -> Tensor:
    """(B, A, S, D) → (B · A · cells, D), each level inside its border of zeros."""
    border = (0, 0, _BORDER, 0, _BORDER, _BORDER + 1)
    levels = values.split([h * w for h, w in shapes], dim=2)
    padded = [
        F.pad(level.unflatten(2, shape), border).flatten(2, 3) for level, shape in zip(levels, shapes, strict=True)
    ]
    return torch.cat(padded, dim=2).flatten(0, 2)


def unpad_levels(table: Tensor, values: Tensor, shapes: Shapes) -> Tensor:
    """The inverse of `pad_levels`; `values` gives the shape."""
    images, heads, _, channels = values.shape
    levels = table.view(images, heads, -1, channels).split([_padded_size(shape) for shape in shapes], dim=2)
    inner = [
        level.unflatten(2, (-1, w + _BORDER))[:, :, _BORDER : _BORDER + h, _BORDER:].flatten(2, 3)
        for level, (h, w) in zip(levels, shapes, strict=True)
    ]
    return torch.cat(inner, dim=2)
