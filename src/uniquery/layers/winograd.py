"""A 3×3 convolution shared by maps of several sizes, by Winograd's algorithm where that is faster.

Winograd's minimal filtering (Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2016), F(2×2, 3×3):
4 × 4 inputs give 2 × 2 outputs by 16 products instead of 36. Inputs, kernels and outputs are transformed linearly, and
each of the 16 elements of a tile is one matrix product over channels. With many channels these products take longer
than the transforms: on a CPU, 512 channels to 512 take 0.7 of the time of `nn.Conv2d` forward and backward; 128 to 128
take longer. On a GPU, cuDNN chooses the algorithm itself.

Letters: B images, C channels in, O channels out, h × w a map, T tiles of 2 × 2 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_MIN_CHANNELS = 256  # in and out, for the transforms to pay off


def _both_axes(matrix: list[list[float]]) -> Tensor:
    """The matrix for a flattened square patch that applies `matrix` to its rows and to its columns."""
    one_axis = torch.tensor(matrix, dtype=torch.float64)
    return torch.kron(one_axis, one_axis)


_INPUT_TRANSFORM = _both_axes([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])  # (16, 4 · 4)
_KERNEL_TRANSFORM = _both_axes([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # (16, 3 · 3)
_OUTPUT_TRANSFORM = _both_axes([[1, 1, 1, 0], [0, 1, -1, -1]])  # (2 · 2, 16)


class SharedConv3x3(nn.Conv2d):
    """`nn.Conv2d` with a 3×3 kernel, stride 1 and padding 1, of several maps in one call."""

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[override]
        """(B, C, h, w) of each size → (B, O, h, w)."""
        if not self._use_winograd(maps[0]):
            return [super(SharedConv3x3, self).forward(x) for x in maps]
        outputs = Winograd.apply(self.weight, *maps)  # type: ignore[no-untyped-call]
        return list(outputs) if self.bias is None else [y + self.bias[:, None, None] for y in outputs]

    def _use_winograd(self, x: Tensor) -> bool:
        is_full_precision = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
        return (
            x.device.type == "cpu"
            and is_full_precision
            and len(x) > 0
            and min(self.in_channels, self.out_channels) >= _MIN_CHANNELS
        )


class SharedSequential(nn.Sequential):
    """Layers that are applied to maps of several sizes, a `SharedConv3x3` to all of them in one call."""

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """(B, C, h, w) of each size → (B, O, h, w)."""
        for layer in self:
            maps = layer(maps) if isinstance(layer, SharedConv3x3) else [layer(x) for x in maps]
        return list(maps)


class Winograd(torch.autograd.Function):
    """(O, C, 3, 3) kernel, (B, C, h, w) of several sizes → (B, O, h, w) of each; zeros around the maps."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(kernel, *maps)
        return _convolve(maps, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kernel, *maps = ctx.saved_tensors
        map_grads: Sequence[Tensor | None] = [None] * len(maps)
        if any(ctx.needs_input_grad[1:]):
            map_grads = _convolve(gradients, kernel.flip(2, 3).transpose(0, 1))
        return _kernel_gradient(maps, gradients) if ctx.needs_input_grad[0] else None, *map_grads


def _convolve(maps: Sequence[Tensor], kernel: Tensor) -> tuple[Tensor, ...]:
    transformed = _apply(_KERNEL_TRANSFORM, kernel.permute(2, 3, 1, 0).flatten(0, 1))  # (16, C, O)
    # One image at a time: the transformed tensors are four times as large as a map, and should stay in the cache.
    return tuple(
        torch.cat(
            [
                _join_tiles(_apply(_OUTPUT_TRANSFORM, _transform_input(x) @ transformed), x.shape)
                for x in images.split(1)
            ]
        )
        for images in maps
    )


def _kernel_gradient(maps: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """(O, C, 3, 3)."""
    inputs, outputs = maps[0].shape[1], gradients[0].shape[1]
    transformed = maps[0].new_zeros(16, inputs, outputs)
    for images, image_grads in zip(maps, gradients, strict=True):
        for x, gradient in zip(images.split(1), image_grads.split(1), strict=True):
            transformed.baddbmm_(_transform_input(x).mT, _apply(_OUTPUT_TRANSFORM.T, _split_tiles(gradient)))
    return _apply(_KERNEL_TRANSFORM.T, transformed).view(3, 3, inputs, outputs).permute(3, 2, 0, 1)


def _apply(linear: Tensor, x: Tensor) -> Tensor:
    """(m, n) on the first dimension of (n, a, b)."""
    return (linear.to(x) @ x.flatten(1)).view(len(linear), *x.shape[1:])


def _transform_input(x: Tensor) -> Tensor:
    """(1, C, h, w) → (16, T, C)."""
    odd_h, odd_w = (side % 2 for side in x.shape[2:])
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1 + odd_w, 1, 1 + odd_h))
    patches = padded.unfold(1, 4, 2).unfold(2, 4, 2)  # (1, h / 2, w / 2, C, 4, 4)
    return _apply(_INPUT_TRANSFORM, patches.permute(4, 5, 0, 1, 2, 3).reshape(16, -1, x.shape[1]))


def _split_tiles(y: Tensor) -> Tensor:
    """(1, O, h, w) → (4, T, O), with zeros beyond an odd side."""
    odd_h, odd_w = (side % 2 for side in y.shape[2:])
    even = F.pad(y.permute(0, 2, 3, 1), (0, 0, 0, odd_w, 0, odd_h))
    rows, columns = (side // 2 for side in even.shape[1:3])
    return even.reshape(rows, 2, columns, 2, -1).permute(1, 3, 0, 2, 4).reshape(4, rows * columns, -1)


def _join_tiles(tiles: Tensor, like: torch.Size) -> Tensor:
    """(4, T, O) → (1, O, h, w), channels-last."""
    height, width = like[2:]
    rows, columns = (height + 1) // 2, (width + 1) // 2
    y = tiles.view(2, 2, rows, columns, -1).permute(2, 0, 3, 1, 4).reshape(1, 2 * rows, 2 * columns, -1)
    return y[:, :height, :width].permute(0, 3, 1, 2)
