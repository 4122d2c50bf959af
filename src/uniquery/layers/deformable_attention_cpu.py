"""The sum of deformable attention on a CPU, with a hand-written backward.

The backward of `F.embedding_bag` is slow on a CPU. The two products behind it, both sparse, are called directly.

Letters as in `deformable_sampling`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from uniquery.layers.deformable_sampling import Shapes, TableIndex, corner_weights, pad_levels, unpad_levels
from uniquery.layers.sparse_products import gathered_products, scatter_sum

_SUMS_AT_ONCE = 8192  # chunk size that fits the CPU cache


class DeformableSum(torch.autograd.Function):
    """`deformable_sum` on a CPU. Rows and weights are recomputed in the backward, as they would take most memory."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, y: Tensor, logits: Tensor, shapes: Shapes) -> Tensor:
        attention = (logits - logits.amax(dim=3, keepdim=True)).exp_()  # F.softmax is slow over a dozen elements
        attention /= attention.sum(dim=3, keepdim=True)
        ctx.save_for_backward(values, x, y, attention)
        ctx.shapes = shapes
        table = pad_levels(values, shapes)
        rows, weights = _rows_and_weights(TableIndex(values, shapes, x.shape[3] // len(shapes)), x, y, attention)
        return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights).view(*x.shape[:3], values.shape[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        values, x, y, attention = ctx.saved_tensors
        shapes: Shapes = ctx.shapes
        index = TableIndex(values, shapes, x.shape[3] // len(shapes))
        table = pad_levels(values, shapes)
        rows, weights = _rows_and_weights(index, x, y, attention)
        grad_output = grad_output.flatten(0, 2)  # (R, D)
        table_grad = scatter_sum(grad_output, rows, weights, len(table))
        weights_grad = gathered_products(grad_output, table, rows, out=weights).unflatten(1, (4, -1))
        point_grads = torch.empty(3, *x.shape, dtype=x.dtype)
        flat_grads = point_grads.flatten(1, 3)
        for chunk in _chunks(flat_grads.shape[1]):
            points = (tensor.flatten(0, 2)[chunk] for tensor in (x, y, attention))
            flat_grads[:, chunk] = torch.stack(_point_gradients(index, weights_grad[chunk], *points))
        x_grad, y_grad, logits_grad = point_grads
        return unpad_levels(table_grad, values, shapes), x_grad, y_grad, logits_grad, None


def _rows_and_weights(index: TableIndex, x: Tensor, y: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    """(R, 4 · J) each: the rows of the table that each sum reads, and their weights."""
    first_rows = index.first_rows(x)
    x, y, attention = (tensor.flatten(0, 2) for tensor in (x, y, attention))
    weights = x.new_empty(len(x), 4 * x.shape[1])
    rows = torch.empty_like(weights, dtype=torch.int32)
    for chunk in _chunks(len(x)):
        rows[chunk] = index.corner_rows(x[chunk], y[chunk], first_rows[chunk])
        weights[chunk] = corner_weights(*index.fractions(x[chunk], y[chunk]), attention[chunk])
    return rows, weights


def _point_gradients(
    index: TableIndex, weights_grad: Tensor, x: Tensor, y: Tensor, attention: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and the attention's logits, from those of (n, 4, J) weights."""
    fraction_x, fraction_y = index.fractions(x, y)
    g00, g01, g10, g11 = weights_grad.unbind(1)
    top, bottom = torch.lerp(g00, g01, fraction_x), torch.lerp(g10, g11, fraction_x)
    x_grad = torch.lerp(g01 - g00, g11 - g10, fraction_y) * attention
    weighted = torch.lerp(top, bottom, fraction_y) * attention
    logits_grad = torch.addcmul(weighted, attention, weighted.sum(1, keepdim=True), value=-1)
    return x_grad, (bottom - top) * attention, logits_grad


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + _SUMS_AT_ONCE) for start in range(0, count, _SUMS_AT_ONCE)]
