"""Multi-scale deformable attention (Zhu et al., ICLR 2021): each query reads a few points of every level, bilinearly.

The sum over points and their four corners is a sum over rows of a table, with weights. `F.embedding_bag` is that sum,
without ever holding a sampled value: on a CPU it takes a tenth of the time of `F.grid_sample`. Its own backward is slow
there, so the two products behind it, both sparse, are called directly.

Letters: B images, S tokens of all levels, Q queries, A heads, L levels, P points of a level, J = L · P, D channels of a
head, R = B · A · Q sums, one for each image, head and query.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, cast

import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uniquery.layers.attention import FeedForward

Shapes = Sequence[tuple[int, int]]

_BORDER = 2  # cells of zeros around a level
_SUMS_AT_ONCE = 8192  # what their rows are made of stays in the cache of a CPU

with warnings.catch_warnings():  # torch says once that sparse tensors are young; nothing a user could act on
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def deformable_sum(values: Tensor, x: Tensor, y: Tensor, logits: Tensor, shapes: Shapes) -> Tensor:
    """Σ over points of softmax(logits) × the value at (x, y), bilinear, zero outside of the level.

    Args:
        values: (B, A, S, D) tokens of all levels, row by row, level after level.
        x: (B, A, Q, J) columns in cells of the point's level; a cell's center is a whole number. The points of the
            first level come first.
        y: (B, A, Q, J) rows.
        logits: (B, A, Q, J) of the attention.
        shapes: (height, width) of each level.

    Returns:
        (B, A, Q, D), in float32 or wider.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, x, y, logits = (tensor.to(dtype) for tensor in (values, x, y, logits))
    if values.device.type == "cpu":
        result: Tensor = _DeformableSum.apply(values, x, y, logits, shapes)  # type: ignore[no-untyped-call]
        return result
    return _sum_by_autograd(values, x, y, logits, shapes)


def _sum_by_autograd(values: Tensor, x: Tensor, y: Tensor, logits: Tensor, shapes: Shapes) -> Tensor:
    """`deformable_sum` on any device."""
    places = _Places(values, shapes, x.shape[3] // len(shapes))
    flat_x, flat_y, attention = x.flatten(0, 2), y.flatten(0, 2), logits.softmax(dim=3).flatten(0, 2)
    index = places.rows(flat_x, flat_y, places.first(x))
    weights = _corner_weights(*places.within(flat_x, flat_y), attention)
    table = _bordered(values, shapes)
    return F.embedding_bag(index, table, mode="sum", per_sample_weights=weights).view(*x.shape[:3], -1)


class _DeformableSum(torch.autograd.Function):
    """`deformable_sum` on a CPU. Rows and weights are made again in the backward: they are what memory would go to."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, y: Tensor, logits: Tensor, shapes: Shapes) -> Tensor:
        attention = (logits - logits.amax(dim=3, keepdim=True)).exp_()  # F.softmax is slow over a dozen elements
        attention /= attention.sum(dim=3, keepdim=True)
        ctx.save_for_backward(values, x, y, attention)
        ctx.shapes = shapes
        table = _bordered(values, shapes)
        index, weights = _rows_and_weights(_Places(values, shapes, x.shape[3] // len(shapes)), x, y, attention)
        return F.embedding_bag(index, table, mode="sum", per_sample_weights=weights).view(*x.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        values, x, y, attention = ctx.saved_tensors
        shapes: Shapes = ctx.shapes
        places = _Places(values, shapes, x.shape[3] // len(shapes))
        table = _bordered(values, shapes)
        index, weights = _rows_and_weights(places, x, y, attention)
        upstream = upstream.flatten(0, 2)  # (R, D)
        of_table = _transposed_sum(upstream, index, weights, len(table))
        of_weights = _products(upstream, table, index, out=weights).unflatten(1, (4, -1))
        of_points = torch.empty(3, *x.shape, dtype=x.dtype)
        flat = of_points.flatten(1, 3)
        for part in _chunks(flat.shape[1]):
            here = (tensor.flatten(0, 2)[part] for tensor in (x, y, attention))
            flat[:, part] = torch.stack(_point_gradients(places, of_weights[part], *here))
        of_x, of_y, of_logits = of_points
        return _without_borders(of_table, values, shapes), of_x, of_y, of_logits, None


class _Places:
    """Where the cells of each level lie in the table of `_bordered`.

    A point outside of a level is held at its border, so it needs no case of its own: it reads zeros.
    """

    def __init__(self, values: Tensor, shapes: Shapes, points: int) -> None:
        sizes = [_bordered_size(shape) for shape in shapes]
        rows = [(*shape, sum(sizes[:level])) for level, shape in enumerate(shapes)]
        table = torch.tensor(rows, dtype=values.dtype, device=values.device).T.repeat_interleave(points, dim=1)
        self.height, self.width = table[:2]  # (J,) each
        self.across = self.width + _BORDER  # cells of a bordered row
        self.origin = (table[2] + _BORDER * self.across + _BORDER).to(torch.int32)
        ones = torch.ones_like(self.across)
        self.corners = torch.stack([0 * ones, ones, self.across, self.across + 1]).to(torch.int32)  # (4, J)
        self.cells = sum(sizes)

    def first(self, x: Tensor) -> Tensor:
        """(R, 1): the first row of each sum's image and head."""
        tables = torch.arange(x.shape[0] * x.shape[1], device=x.device, dtype=torch.int32)
        return (tables * self.cells).repeat_interleave(x.shape[2])[:, None]

    def within(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """How far right of and below the upper left of its four cells a point lies."""
        x, y = self._held(x, self.width), self._held(y, self.height)
        return x - x.detach().floor(), y - y.detach().floor()

    def rows(self, x: Tensor, y: Tensor, first: Tensor) -> Tensor:
        """(n, 4 · J) int32 of n × J points: the table's rows of their corners."""
        left, top = self._held(x.detach(), self.width).floor_(), self._held(y.detach(), self.height).floor_()
        cell = torch.addcmul(left, top, self.across).to(torch.int32).add_(self.origin)
        cell.clamp_(min=0)  # a diverged network asks for cell NaN
        return (cell.add_(first)[:, None] + self.corners).flatten(1)

    @staticmethod
    def _held(position: Tensor, size: Tensor) -> Tensor:
        return torch.minimum(position.clamp(min=-_BORDER), size)


def _corner_weights(fx: Tensor, fy: Tensor, attention: Tensor) -> Tensor:
    """(n, 4 · J): attention times the bilinear weights of a point's corners."""
    lower = attention * fy
    upper = attention - lower
    right_above, right_below = upper * fx, lower * fx
    return torch.stack([upper - right_above, right_above, lower - right_below, right_below], dim=1).flatten(1)


def _rows_and_weights(places: _Places, x: Tensor, y: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    """(R, 4 · J) each: the rows of the table that each sum reads, and their weights."""
    first = places.first(x)
    x, y, attention = (tensor.flatten(0, 2) for tensor in (x, y, attention))
    weights = x.new_empty(len(x), 4 * x.shape[1])
    index = torch.empty_like(weights, dtype=torch.int32)
    for part in _chunks(len(x)):
        index[part] = places.rows(x[part], y[part], first[part])
        weights[part] = _corner_weights(*places.within(x[part], y[part]), attention[part])
    return index, weights


def _point_gradients(
    places: _Places, of_weights: Tensor, x: Tensor, y: Tensor, attention: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, y and the attention's logits, from those of (n, 4, J) weights."""
    fx, fy = places.within(x, y)
    g00, g01, g10, g11 = of_weights.unbind(1)
    top, bottom = torch.lerp(g00, g01, fx), torch.lerp(g10, g11, fx)
    of_x = torch.lerp(g01 - g00, g11 - g10, fy) * attention
    weighted = torch.lerp(top, bottom, fy) * attention
    of_logits = torch.addcmul(weighted, attention, weighted.sum(1, keepdim=True), value=-1)
    return of_x, (bottom - top) * attention, of_logits


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + _SUMS_AT_ONCE) for start in range(0, count, _SUMS_AT_ONCE)]


def _bordered_size(shape: tuple[int, int]) -> int:
    """Cells of a level with its border; a row more than the border asks for, as each row ends in the next one's."""
    return (shape[0] + 2 * _BORDER + 1) * (shape[1] + _BORDER)


def _bordered(values: Tensor, shapes: Shapes) -> Tensor:
    """(B, A, S, D) → (B · A · cells, D), each level inside its border of zeros."""
    border = (0, 0, _BORDER, 0, _BORDER, _BORDER + 1)
    levels = values.split([h * w for h, w in shapes], dim=2)
    bordered = [
        F.pad(of_level.unflatten(2, shape), border).flatten(2, 3)
        for of_level, shape in zip(levels, shapes, strict=True)
    ]
    return torch.cat(bordered, dim=2).flatten(0, 2)


def _without_borders(table: Tensor, values: Tensor, shapes: Shapes) -> Tensor:
    """The inverse of `_bordered`."""
    images, heads, _, channels = values.shape
    levels = table.view(images, heads, -1, channels).split([_bordered_size(shape) for shape in shapes], dim=2)
    inner = [
        of_level.unflatten(2, (-1, w + _BORDER))[:, :, _BORDER : _BORDER + h, _BORDER:].flatten(2, 3)
        for of_level, (h, w) in zip(levels, shapes, strict=True)
    ]
    return torch.cat(inner, dim=2)


def _products(upstream: Tensor, table: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """(R, n): upstream row r times each of the table's rows that it read; `out` is overwritten."""
    pattern = torch.sparse_csr_tensor(
        _offsets(index), index.flatten(), out.flatten(), (len(index), len(table)), check_invariants=False
    )
    torch.sparse.sampled_addmm(pattern, upstream.contiguous(), table.T, beta=0.0, out=pattern)
    return pattern.values().view(index.shape)


def _transposed_sum(upstream: Tensor, index: Tensor, weights: Tensor, rows: int) -> Tensor:
    """(rows, D): each upstream row, weighted, added to the table's rows that it read."""
    matrix = scipy.sparse.csr_matrix(
        (weights.flatten().numpy(), index.flatten().numpy(), _offsets(index).numpy()), shape=(len(index), rows)
    )
    result: Tensor = torch.from_numpy(matrix.T @ upstream.contiguous().numpy())
    return result


def _offsets(index: Tensor) -> Tensor:
    """(R + 1,): where each row of a table of row numbers starts."""
    return torch.arange(0, index.numel() + 1, index.shape[1], dtype=torch.int32)


class DeformableAttention(nn.Module):
    """Tokens of several levels read each other at learned offsets.

    Args:
        channels: of a token.
        heads: parts of the channels that look at places of their own.
        levels: of the pyramid.
        points: that a head reads on each level.
    """

    def __init__(self, channels: int, heads: int, levels: int, points: int = 4) -> None:
        super().__init__()
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(channels, heads * levels * points * 2)
        self.attention = nn.Linear(channels, heads * levels * points)
        self.values = nn.Linear(channels, channels)
        self.output = nn.Linear(channels, channels)
        for zero in (self.offsets.weight, self.attention.weight, *(m.bias for m in (self.attention, self.values))):
            nn.init.zeros_(zero)
        nn.init.zeros_(self.output.bias)
        nn.init.xavier_uniform_(self.values.weight)
        nn.init.xavier_uniform_(self.output.weight)
        self._init_offsets()

    @torch.no_grad()
    def _init_offsets(self) -> None:
        """Each head starts in a direction of its own, point p at distance p + 1."""
        angles = torch.arange(self.heads, dtype=torch.float32) * (2 * math.pi / self.heads)
        direction = torch.stack([angles.cos(), angles.sin()], dim=1)
        direction = direction / direction.abs().amax(1, keepdim=True)
        steps = torch.arange(1, self.points + 1, dtype=torch.float32)[:, None]
        start = (direction[:, None, None] * steps).expand(-1, self.levels, -1, -1)  # (A, L, P, 2)
        self.offsets.bias.copy_(start.flatten())

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Tensor, shapes: Shapes, valid: Tensor | None = None
    ) -> Tensor:
        """What each token reads.

        Args:
            tokens: (B, S, channels).
            positions: broadcastable to the tokens; added where places and attention are decided.
            places: (2, S, L) x and y of each token in cells of each level.
            shapes: (height, width) of each level.
            valid: (B, S) bool, false for padding, which reads as zero; None if all is valid.

        Returns:
            (B, S, channels).
        """
        values = self.values(tokens)
        if valid is not None:
            values = values.masked_fill(~valid[..., None], 0)
        values = values.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, A, S, D)
        decided = self._project(tokens + positions).unflatten(2, (3, self.heads, -1))
        x, y, logits = decided.permute(2, 0, 3, 1, 4).contiguous()  # (B, A, S, J) each
        at_x, at_y = places.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(self.points, dim=2)
        read = deformable_sum(values, x + at_x, y + at_y, logits, shapes)
        return self.output(read.transpose(1, 2).flatten(2).to(values.dtype))  # type: ignore[no-any-return]

    def _project(self, queries: Tensor) -> Tensor:
        """Offsets in x, in y, and attention logits, from one product: (B, S, 3 · A · J)."""
        weight, bias = (
            torch.cat([offset.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1), attention])
            for offset, attention in (
                (self.offsets.weight, self.attention.weight),
                (self.offsets.bias, self.attention.bias),
            )
        )
        return F.linear(queries, weight, bias)


class DeformableLayer(nn.Module):
    """Deformable attention and a feed-forward part, each with residual and normalization.

    Args:
        channels: of a token.
        heads: of the attention.
        levels: of the pyramid.
        width: hidden channels of the feed-forward part.
    """

    def __init__(self, channels: int, heads: int, levels: int, width: int) -> None:
        super().__init__()
        self.attention = DeformableAttention(channels, heads, levels)
        self.norm = nn.LayerNorm(channels)
        self.feed_forward = FeedForward(channels, width)

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Tensor, shapes: Shapes, valid: Tensor | None = None
    ) -> Tensor:
        """(B, S, channels); the arguments are those of the attention."""
        tokens = self.norm(tokens + self.attention(tokens, positions, places, shapes, valid))
        return cast(Tensor, self.feed_forward(tokens))


def reference_points(shapes: Shapes, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """(2, S, L): x and y of the center of every token of every level, in cells of each level.

    >>> reference_points([(1, 2), (1, 1)])[0]
    tensor([[ 0.0000, -0.2500],
            [ 1.0000,  0.2500],
            [ 0.5000,  0.0000]])
    """
    sizes = torch.tensor(shapes, device=device, dtype=dtype or torch.float32)  # (L, 2)
    levels = []
    for height, width in shapes:
        rows, columns = (torch.arange(n, device=device, dtype=sizes.dtype) for n in (height, width))
        y, x = torch.meshgrid((rows + 0.5) / height, (columns + 0.5) / width, indexing="ij")
        levels.append(torch.stack([x.flatten()[:, None] * sizes[:, 1], y.flatten()[:, None] * sizes[:, 0]]) - 0.5)
    return torch.cat(levels, dim=1)
