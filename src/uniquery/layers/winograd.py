"""A 3×3 convolution shared by maps of several sizes, with fewer products where that is faster.

Winograd's minimal filtering (Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2016), F(2×2, 3×3):
4 × 4 inputs give 2 × 2 outputs by 16 products instead of 36. Inputs, kernels and outputs are mapped linearly to and
from the 16 places where they meet, and the many products of each place are one matrix product. With many channels
the products outweigh the maps: on a CPU, 512 channels to 512 take 0.7 of the time forward and backward; 128 to 128
take longer. On a GPU the vendor's convolutions choose for themselves.

Letters: B images, C channels in, O channels out, h × w a map, T tiles of 2 × 2 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_LEAST_CHANNELS = 256  # in and out, for fewer products to pay


def _both_axes(along_one: list[list[float]]) -> Tensor:
    """The linear map of a square patch, row by row, that does `along_one` on its rows and on its columns."""
    one = torch.tensor(along_one, dtype=torch.float64)
    return torch.kron(one, one)


_OF_INPUT = _both_axes([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])  # (16, 4 · 4)
_OF_KERNEL = _both_axes([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # (16, 3 · 3)
_TO_OUTPUT = _both_axes([[1, 1, 1, 0], [0, 1, -1, -1]])  # (2 · 2, 16)


class SharedConv3x3(nn.Conv2d):
    """`nn.Conv2d` with a 3×3 kernel, stride 1 and padding 1, of several maps in one call."""

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[override]
        """(B, C, h, w) of each size → (B, O, h, w)."""
        if not self._is_faster_with_fewer_products(maps[0]):
            return [super(SharedConv3x3, self).forward(x) for x in maps]
        outputs = Winograd.apply(self.weight, *maps)  # type: ignore[no-untyped-call]
        return list(outputs) if self.bias is None else [y + self.bias[:, None, None] for y in outputs]

    def _is_faster_with_fewer_products(self, x: Tensor) -> bool:
        is_wide = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
        return (
            x.device.type == "cpu"
            and is_wide
            and len(x) > 0
            and min(self.in_channels, self.out_channels) >= _LEAST_CHANNELS
        )


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
        of_maps: Sequence[Tensor | None] = [None] * len(maps)
        if any(ctx.needs_input_grad[1:]):
            of_maps = _convolve(gradients, kernel.flip(2, 3).transpose(0, 1))
        return _kernel_gradient(maps, gradients) if ctx.needs_input_grad[0] else None, *of_maps


def _convolve(maps: Sequence[Tensor], kernel: Tensor) -> tuple[Tensor, ...]:
    spectrum = _apply(_OF_KERNEL, kernel.permute(2, 3, 1, 0).flatten(0, 1))  # (16, C, O)
    # An image at a time: what lies between the matrix products is four times a map, and should stay in the cache.
    return tuple(
        torch.cat([_join_tiles(_apply(_TO_OUTPUT, _input_spectrum(x) @ spectrum), x.shape) for x in images.split(1)])
        for images in maps
    )


def _kernel_gradient(maps: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """(O, C, 3, 3)."""
    inputs, outputs = maps[0].shape[1], gradients[0].shape[1]
    spectrum = maps[0].new_zeros(16, inputs, outputs)
    for images, of_images in zip(maps, gradients, strict=True):
        for x, gradient in zip(images.split(1), of_images.split(1), strict=True):
            spectrum.baddbmm_(_input_spectrum(x).mT, _apply(_TO_OUTPUT.T, _split_tiles(gradient)))
    return _apply(_OF_KERNEL.T, spectrum).view(3, 3, inputs, outputs).permute(3, 2, 0, 1)


def _apply(linear: Tensor, x: Tensor) -> Tensor:
    """(m, n) on the first dimension of (n, a, b)."""
    return (linear.to(x) @ x.flatten(1)).view(len(linear), *x.shape[1:])


def _input_spectrum(x: Tensor) -> Tensor:
    """(1, C, h, w) → (16, T, C)."""
    odd_h, odd_w = (side % 2 for side in x.shape[2:])
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1 + odd_w, 1, 1 + odd_h))
    patches = padded.unfold(1, 4, 2).unfold(2, 4, 2)  # (1, h / 2, w / 2, C, 4, 4)
    return _apply(_OF_INPUT, patches.permute(4, 5, 0, 1, 2, 3).reshape(16, -1, x.shape[1]))


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
