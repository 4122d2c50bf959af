"""Deformable convolution (Dai et al., ICCV 2017), and with modulation (Zhu et al., CVPR 2019), in plain torch.

Each tap of the kernel reads the map at a place of its own, bilinearly, zero outside. The four cells around such a
place are rows of a table, as in deformable attention; the values of all taps then meet the kernel in one matrix
product, as in any convolution. Values are computed a few output pixels at a time, and again in the backward pass, so
that memory does not grow with the kernel.

Letters: B images, C channels in, O channels out, k kernel side, T = k² taps, h × w the map, h' × w' the output,
n output pixels at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from uniquery.layers.deformable_sampling import TableIndex, corner_weights, pad_levels, unpad_levels
from uniquery.layers.norm import ConvNorm, FrozenBatchNorm2d
from uniquery.layers.sparse_products import gathered_products, scatter_sum

_PIXELS_AT_ONCE = 1024


def deformable_conv2d(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
) -> Tensor:
    """`torchvision.ops.deform_conv2d` with one group of channels.

    Args:
        x: (B, C, h, w).
        offset: (B, 2 · T, h', w') in cells: how far each tap is moved down and right, tap after tap, row by row.
        weight: (O, C, k, k).
        bias: (O,).
        mask: (B, T, h', w') factor of each tap; None means 1.
        stride: cells between output pixels.
        padding: rows and columns of zeros around the map.

    Returns:
        (B, O, h', w') in the type of x, in channels-last memory format.

    >>> x, weight = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    >>> torch.allclose(deformable_conv2d(x, torch.zeros(1, 18, 3, 3), weight), F.conv2d(x, weight), atol=1e-5)
    True
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if mask is None:
        mask = offset.new_ones(()).expand(len(x), offset.shape[1] // 2, *offset.shape[2:])
    arguments = (tensor.to(dtype) for tensor in (x, offset, mask, weight))
    with torch.autocast(x.device.type, enabled=False):
        y = cast(Tensor, DeformableConv2d.apply(*arguments, stride, padding))  # type: ignore[no-untyped-call]
    return (y if bias is None else y + bias.to(dtype)[:, None, None]).to(x.dtype)


class DeformableConvNorm(ConvNorm):
    """A deformable convolution without bias and the normalization after it, which is folded in if it is frozen."""

    def forward(self, x: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(B, C, h, w) → (B, O, h', w'); see `deformable_conv2d`."""
        (stride, _), (padding, _) = self.stride, cast(tuple[int, int], self.padding)
        if not isinstance(self.norm, FrozenBatchNorm2d):
            y = deformable_conv2d(x, offset, self.weight, mask=mask, stride=stride, padding=padding)
            return cast(Tensor, self.norm(y))
        scale, shift = self.norm.scale_and_shift()
        kernel = self.weight * scale[:, None, None, None]
        return deformable_conv2d(x, offset, kernel, shift, mask=mask, stride=stride, padding=padding)


class DeformableConv2d(torch.autograd.Function):
    """See `deformable_conv2d`; all tensors are of one type, float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, offset, mask, weight)
        ctx.stride, ctx.padding = stride, padding
        kernel = _kernel_matrix(weight)
        y = x.new_empty(len(x), *offset.shape[2:], len(weight))
        for image, image_x, image_offset, image_mask in zip(y, x, offset, mask, strict=True):
            taps = Taps(image_x, image_offset, image_mask, weight.shape[2], stride, padding)
            for pixels, chunk in taps.chunks():
                torch.mm(chunk.columns(), kernel, out=image.flatten(0, 1)[pixels])
        return y.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, offset, mask, weight = ctx.saved_tensors
        kernel = _kernel_matrix(weight)
        kernel_grad = torch.zeros_like(kernel)
        x_grad = torch.empty_like(x, memory_format=torch.channels_last)
        offset_grad, mask_grad = torch.empty_like(offset), mask.new_empty(mask.shape)
        for i, output_grad in enumerate(grad_output.permute(0, 2, 3, 1)):
            taps = Taps(x[i], offset[i], mask[i], weight.shape[2], ctx.stride, ctx.padding)
            table_grad = torch.zeros_like(taps.table)
            point_grads = taps.points.new_empty(3, *taps.points.shape[1:])
            for pixels, chunk in taps.chunks():
                gradient = output_grad.reshape(-1, kernel.shape[1])[pixels]
                kernel_grad.addmm_(chunk.columns().T, gradient)
                columns_grad = (gradient @ kernel.T).view(-1, x.shape[1])
                table_grad += chunk.table_gradient(columns_grad)
                point_grads[:, pixels] = chunk.point_gradients(columns_grad).view(3, -1, point_grads.shape[2])
            x_grad[i] = taps.unpad(table_grad)
            y_grad, column_grad, factor_grad = point_grads.mT.unflatten(2, offset.shape[2:])
            offset_grad[i] = torch.stack([y_grad, column_grad], dim=1).flatten(0, 1)
            mask_grad[i] = factor_grad
        weight_grad = kernel_grad.view(*weight.shape[2:], -1, len(weight)).permute(3, 2, 0, 1)
        return x_grad, offset_grad, mask_grad, weight_grad, None, None


def _kernel_matrix(weight: Tensor) -> Tensor:
    """(O, C, k, k) → (T · C, O)."""
    return weight.permute(2, 3, 1, 0).reshape(-1, len(weight))


class Taps:
    """Where the taps of all output pixels of one image read its map.

    Attributes:
        table: (cells, C) the map inside a border of zeros.
        points: (3, h' · w', T): row, column and factor of each tap.
    """

    def __init__(self, x: Tensor, offset: Tensor, mask: Tensor, side: int, stride: int, padding: int) -> None:
        self.shape = (x.shape[1], x.shape[2])
        self.values = x.permute(1, 2, 0).reshape(1, 1, -1, len(x))
        self.table = pad_levels(self.values, [self.shape])
        self.index = TableIndex(self.values, [self.shape], 1)
        height, width = offset.shape[1:]
        tap = torch.arange(side, device=x.device, dtype=x.dtype) - padding
        y, column = (stride * torch.arange(n, device=x.device, dtype=x.dtype) for n in (height, width))
        moved = offset.unflatten(0, (-1, 2)).permute(1, 2, 3, 0).unflatten(3, (side, side))  # (2, h', w', k, k)
        rows = moved[0] + y[:, None, None, None] + tap[:, None]
        columns = moved[1] + column[:, None, None] + tap
        self.points = torch.stack([rows, columns, mask.permute(1, 2, 0).view_as(rows)]).flatten(3).flatten(1, 2)

    def chunks(self) -> Iterator[tuple[slice, TapChunk]]:
        """The output pixels in order, some at a time, and their taps."""
        for start in range(0, self.points.shape[1], _PIXELS_AT_ONCE):
            pixels = slice(start, start + _PIXELS_AT_ONCE)
            yield pixels, TapChunk(self.table, self.index, self.points[:, pixels])

    def unpad(self, table: Tensor) -> Tensor:
        """(cells, C) → (C, h, w)."""
        x: Tensor = unpad_levels(table, self.values, [self.shape])[0, 0].T.unflatten(1, self.shape)
        return x


class TapChunk:
    """The taps of n output pixels."""

    def __init__(self, table: Tensor, index: TableIndex, points: Tensor) -> None:
        self.table = table
        y, x, self.factor = points.flatten(1)[..., None]  # (n · T, 1) each
        self.fractions = index.fractions(x, y)
        self.rows = index.corner_rows(x, y, torch.zeros((), dtype=torch.int32, device=x.device))  # (n · T, 4)
        self.weights = corner_weights(*self.fractions, self.factor)
        self.taps = points.shape[2]

    def columns(self) -> Tensor:
        """(n, T · C): the values that each output pixel reads, tap after tap."""
        values = F.embedding_bag(self.rows, self.table, mode="sum", per_sample_weights=self.weights)
        return values.view(-1, self.taps * self.table.shape[1])

    def table_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the table, from that of (n · T, C) values."""
        if gradient.device.type == "cpu":
            return scatter_sum(gradient, self.rows, self.weights, len(self.table))
        result = torch.zeros_like(self.table)
        for rows, weights in zip(self.rows.T, self.weights.T, strict=True):
            result.index_add_(0, rows, gradient * weights[:, None])
        return result

    def point_gradients(self, gradient: Tensor) -> Tensor:
        """(3, n · T): the gradients of rows, columns and factors, from that of (n · T, C) values."""
        if gradient.device.type == "cpu":
            products = gathered_products(gradient, self.table, self.rows, out=torch.zeros_like(self.weights))
        else:
            products = torch.stack([(gradient * self.table[rows]).sum(1) for rows in self.rows.T], dim=1)
        g00, g01, g10, g11 = products.T
        fraction_x, fraction_y = (fraction.squeeze(1) for fraction in self.fractions)
        factor = self.factor.squeeze(1)
        top, bottom = torch.lerp(g00, g01, fraction_x), torch.lerp(g10, g11, fraction_x)
        column_grad = torch.lerp(g01 - g00, g11 - g10, fraction_y) * factor
        return torch.stack([(bottom - top) * factor, column_grad, torch.lerp(top, bottom, fraction_y)])
