"""Multi-scale deformable attention (Zhu et al., ICLR 2021): each query reads a few points of every level, bilinearly.

Letters: B images, S tokens of all levels, Q queries, A heads, L levels, P points of a level, J = L · P, D channels of a
head.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uniquery.layers.attention import FeedForward
from uniquery.layers.deformable_attention_cpu import DeformableSum
from uniquery.layers.deformable_sampling import Shapes, sum_by_autograd, sum_by_grid_sample


def deformable_sum(values: Tensor, x: Tensor, y: Tensor, logits: Tensor, shapes: Shapes) -> Tensor:
    """Σ over points of softmax(logits) × the value at (x, y), bilinear, zero outside of the level.

    On a CPU it takes a tenth of the time of `F.grid_sample`.

    Args:
        values: (B, A, S, D) tokens of all levels, row by row, level after level.
        x: (B, A, Q, J) columns in cells of the point's level; a cell's center is a whole number. The points of the
            first level come first.
        y: (B, A, Q, J) rows.
        logits: (B, A, Q, J) attention logits.
        shapes: (height, width) of each level.

    Returns:
        (B, A, Q, D), in float32 or wider.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, x, y, logits = (tensor.to(dtype) for tensor in (values, x, y, logits))
    if torch.onnx.is_in_onnx_export():
        return sum_by_grid_sample(values, x, y, logits, shapes)
    if values.device.type == "cpu":
        result: Tensor = DeformableSum.apply(values, x, y, logits, shapes)  # type: ignore[no-untyped-call]
        return result
    return sum_by_autograd(values, x, y, logits, shapes)


class DeformableAttention(nn.Module):
    """Queries read tokens of several levels at learned offsets from their reference points.

    Args:
        channels: channels of a query and of a token.
        heads: number of heads, each with its own points.
        levels: number of feature levels.
        points: sampling points per head and level.
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
        """Each head starts in another direction, point p at distance p + 1."""
        angles = torch.arange(self.heads, dtype=torch.float32) * (2 * math.pi / self.heads)
        direction = torch.stack([angles.cos(), angles.sin()], dim=1)
        direction = direction / direction.abs().amax(1, keepdim=True)
        steps = torch.arange(1, self.points + 1, dtype=torch.float32)[:, None]
        start = (direction[:, None, None] * steps).expand(-1, self.levels, -1, -1)  # (A, L, P, 2)
        self.offsets.bias.copy_(start.flatten())

    def forward(
        self,
        queries: Tensor,
        positions: Tensor,
        reference_points: Tensor,
        tokens: Tensor,
        shapes: Shapes,
        valid: Tensor | None = None,
    ) -> Tensor:
        """What each query reads.

        Args:
            queries: (B, Q, channels).
            positions: broadcastable to the queries; added to them where offsets and attention are predicted.
            reference_points: (Q, L, 2) or (B, Q, L, 2) x, y as shares of the width and height of each level; offsets
                are then in cells. Or (..., 4) boxes, center and size; an offset of `points` is then half the box.
            tokens: (B, S, channels) of all levels, row by row, level after level.
            shapes: (height, width) of each level.
            valid: (B, S) bool, false for padding, which reads as zero; None if all is valid.

        Returns:
            (B, Q, channels).
        """
        values = self.values(tokens)
        if valid is not None:
            values = values.masked_fill(~valid[..., None], 0)
        values = values.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, A, S, D)
        projected = self._project(queries + positions).unflatten(2, (3, self.heads, -1))
        x, y, logits = projected.permute(2, 0, 3, 1, 4).contiguous()  # (B, A, Q, J) each
        x, y = (
            self._sampling_positions(offset, reference_points[..., axis::2], [shape[1 - axis] for shape in shapes])
            for axis, offset in enumerate((x, y))
        )
        read = deformable_sum(values, x, y, logits, shapes)
        return self.output(read.transpose(1, 2).flatten(2).to(values.dtype))  # type: ignore[no-any-return]

    def _project(self, queries: Tensor) -> Tensor:
        """Offsets in x, in y, and attention logits, from one product: (B, Q, 3 · A · J)."""
        weight, bias = (
            torch.cat([offset.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1), attention])
            for offset, attention in (
                (self.offsets.weight, self.attention.weight),
                (self.offsets.bias, self.attention.bias),
            )
        )
        return F.linear(queries, weight, bias)

    def _sampling_positions(self, offsets: Tensor, reference: Tensor, cells: list[int]) -> Tensor:
        """(B, A, Q, J) along one axis, in cells of each level.

        Args:
            offsets: (B, A, Q, J).
            reference: (..., Q, L, 1) the point, or (..., Q, L, 2) center and size of the box.
            cells: number of cells of each level along this axis.
        """
        if torch.onnx.is_in_onnx_export():  # the counts are symbolic
            count = torch.stack([torch.full((), n, dtype=reference.dtype) for n in cells])
        else:
            count = torch.tensor(cells, dtype=reference.dtype).to(reference.device, non_blocking=True)  # (L,)
        dtype = torch.promote_types(offsets.dtype, torch.float32)
        center = self._per_point(reference[..., 0] * count - 0.5, dtype)
        if reference.shape[-1] == 2:
            offsets = offsets * self._per_point(reference[..., 1] * count * (0.5 / self.points), dtype)
        return offsets + center

    def _per_point(self, per_level: Tensor, dtype: torch.dtype) -> Tensor:
        """(Q, L) or (B, Q, L) → (Q, J) or (B, 1, Q, J), for all heads."""
        repeated = per_level.to(dtype).repeat_interleave(self.points, dim=-1)
        return repeated if repeated.ndim == 2 else repeated[:, None]


class DeformableLayer(nn.Module):
    """An encoder layer: tokens read each other by deformable attention, then a feed-forward network.

    Args:
        channels: channels of a token.
        heads: number of attention heads.
        levels: number of feature levels.
        width: hidden channels of the feed-forward network.
        dropout: probability, in training, that an element of the attention's output is set to zero; see `FeedForward`.
    """

    def __init__(self, channels: int, heads: int, levels: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = DeformableAttention(channels, heads, levels)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(channels)
        self.feed_forward = FeedForward(channels, width, dropout)

    def forward(
        self, tokens: Tensor, positions: Tensor, reference_points: Tensor, shapes: Shapes, valid: Tensor | None = None
    ) -> Tensor:
        """(B, S, channels); the arguments are those of the attention."""
        read = self.attention(tokens, positions, reference_points, tokens, shapes, valid)
        tokens = self.norm(tokens + self.dropout(read))
        return cast(Tensor, self.feed_forward(tokens))


def token_centers(shapes: Shapes, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """(S, L, 2): x, y of the center of every token, as shares of the width and height, the same for each level.

    These are the reference points of tokens that read each other.

    >>> token_centers([(1, 2), (1, 1)])[:, 0].tolist()
    [[0.25, 0.5], [0.75, 0.5], [0.5, 0.5]]
    """
    centers = []
    for height, width in shapes:
        rows, columns = (torch.arange(n, device=device, dtype=dtype or torch.float32) for n in (height, width))
        y, x = torch.meshgrid((rows + 0.5) / height, (columns + 0.5) / width, indexing="ij")
        centers.append(torch.stack([x.flatten(), y.flatten()], dim=1))
    return torch.cat(centers)[:, None].expand(-1, len(shapes), -1)


def image_centers(shapes: Shapes, extents: Tensor) -> Tensor:
    """(B, S, L, 2): `token_centers` of padded images; a token lies at the same share of the image on each level.

    Args:
        shapes: (height, width) of each level.
        extents: (B, L, 2) share of each level's width and height that its image takes.

    >>> image_centers([(1, 4), (1, 2)], torch.tensor([[[0.5, 1.0], [1.0, 1.0]]]))[0, 0].tolist()
    [[0.125, 0.5], [0.25, 0.5]]
    """
    per_level = zip(extents.unbind(1), shapes, strict=True)
    own = torch.cat([x[:, None].expand(-1, height * width, -1) for x, (height, width) in per_level], dim=1)  # (B, S, 2)
    share_of_image = token_centers(shapes, extents.device, extents.dtype)[:, 0] / own
    return share_of_image[:, :, None] * extents[:, None]
