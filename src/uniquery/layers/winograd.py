"""A 3×3 convolution shared by maps of several sizes, by Winograd's algorithm where that is faster.

Winograd's minimal filtering (Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", 2016), F(2×2, 3×3):
4 × 4 inputs give 2 × 2 outputs by 16 products instead of 36. Inputs, kernels and outputs are transformed linearly, and
each of the 16 elements of a tile is one matrix product over channels. With many channels these products take longer
than the transforms: on a CPU, 512 channels to 512 take 0.7 of the time of `nn.Conv2d` forward and backward; 128 to 128
take longer. On a GPU, cuDNN chooses the algorithm itself.

F(4×4, 3×3) needs 36 products instead of 144, but its float32 results are rounded five times as coarsely as those of
`nn.Conv2d`. Its interpolation points 0, ±√½, ±√2 halve the error of the usual 0, ±1, ±2.

Letters: B images, C channels in, O channels out, h × w a map, m × m outputs of a tile, T tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Tiles:
    """Tiles of m × m outputs, and the transforms of their inputs, kernels and outputs.

    Attributes:
        side: m.
        inputs: ((m + 2)², (m + 2)²).
        kernels: ((m + 2)², 3 · 3).
        outputs: (m², (m + 2)²).
        per_image: whether the tiles of all maps of an image are multiplied in one product.
    """

    side: int
    inputs: Tensor
    kernels: Tensor
    outputs: Tensor
    per_image: bool


_SMALL = _Tiles(
    2,
    inputs=_both_axes([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]),
    kernels=_both_axes([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]),
    outputs=_both_axes([[1, 1, 1, 0], [0, 1, -1, -1]]),
    per_image=False,
)
_R = 2**0.5
_LARGE = _Tiles(
    4,
    inputs=_both_axes(
        [
            [1, 0, -2.5, 0, 1, 0],
            [0, -_R, -2, _R / 2, 1, 0],
            [0, _R, -2, -_R / 2, 1, 0],
            [0, -_R / 2, -0.5, _R, 1, 0],
            [0, _R / 2, -0.5, -_R, 1, 0],
            [0, 1, 0, -2.5, 0, 1],
        ]
    ),
    kernels=_both_axes(
        [
            [1, 0, 0],
            [-2 / 3, -_R / 3, -1 / 3],
            [-2 / 3, _R / 3, -1 / 3],
            [1 / 6, _R / 6, 1 / 3],
            [1 / 6, -_R / 6, 1 / 3],
            [0, 0, 1],
        ]
    ),
    outputs=_both_axes(
        [
            [1, 1, 1, 1, 1, 0],
            [0, _R / 2, -_R / 2, _R, -_R, 0],
            [0, 0.5, 0.5, 2, 2, 0],
            [0, _R / 4, -_R / 4, 2 * _R, -2 * _R, 1],
        ]
    ),
    per_image=True,  # 36 kernels are a lot to read for the few tiles of a small map
)


class SharedConv3x3(nn.Conv2d):
    """`nn.Conv2d` with a 3×3 kernel, stride 1 and padding 1, of several maps in one call."""

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[override]
        """(B, C, h, w) of each size → (B, O, h, w)."""
        return shared_conv3x3(maps, self.weight, self.bias)


def shared_conv3x3(
    maps: Sequence[Tensor], kernel: Tensor, bias: Tensor | None = None, *, large_tiles: bool = False
) -> list[Tensor]:
    """The convolution of maps of several sizes with stride 1 and padding 1.

    Args:
        maps: (B, C, h, w) of each size.
        kernel: (O, C, 3, 3).
        bias: (O,).
        large_tiles: whether tiles are 4 × 4, which is faster and less precise (see above).

    Returns:
        (B, O, h, w) of each size.
    """
    if not _use_winograd(maps[0], kernel):
        return [F.conv2d(x, kernel, bias, padding=1) for x in maps]
    function = LargeTileWinograd if large_tiles else Winograd
    outputs = function.apply(kernel, *maps)  # type: ignore[no-untyped-call]
    return list(outputs) if bias is None else [y + bias[:, None, None] for y in outputs]


def _use_winograd(x: Tensor, kernel: Tensor) -> bool:
    is_full_precision = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
    if torch.onnx.is_in_onnx_export():  # runtimes choose the algorithm of a plain convolution themselves
        return False
    return x.device.type == "cpu" and is_full_precision and len(x) > 0 and min(kernel.shape[:2]) >= _MIN_CHANNELS


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
        return _convolve(maps, kernel, _SMALL)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, gradients, _SMALL)


class LargeTileWinograd(torch.autograd.Function):
    """`Winograd` with 4 × 4 outputs in a tile."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, *maps: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(kernel, *maps)
        return _convolve(maps, kernel, _LARGE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, gradients, _LARGE)


def _gradients(ctx: Any, gradients: Sequence[Tensor], tiles: _Tiles) -> tuple[Tensor | None, ...]:
    """The gradients of the kernel and of each map."""
    kernel, *maps = ctx.saved_tensors
    map_grads: Sequence[Tensor | None] = [None] * len(maps)
    if any(ctx.needs_input_grad[1:]):
        map_grads = _convolve(gradients, kernel.flip(2, 3).transpose(0, 1), tiles)
    return _kernel_gradient(maps, gradients, tiles) if ctx.needs_input_grad[0] else None, *map_grads


def _convolve(maps: Sequence[Tensor], kernel: Tensor, tiles: _Tiles) -> tuple[Tensor, ...]:
    transformed = _apply(tiles.kernels, kernel.permute(2, 3, 1, 0).flatten(0, 1))  # (n, C, O)
    images: list[list[Tensor]] = [[] for _ in maps]
    for group in _groups(maps, tiles):
        inputs = [_transform_input(maps[which][image], tiles) for which, image in group]
        outputs = _apply(tiles.outputs, _cat(inputs) @ transformed)  # (m · m, T, O)
        for (which, _), of_map in zip(group, outputs.split([x.shape[1] for x in inputs], dim=1), strict=True):
            images[which].append(_join_tiles(of_map, maps[which].shape, tiles.side))
    return tuple(torch.cat(of_map) for of_map in images)


def _kernel_gradient(maps: Sequence[Tensor], gradients: Sequence[Tensor], tiles: _Tiles) -> Tensor:
    """(O, C, 3, 3)."""
    inputs, outputs = maps[0].shape[1], gradients[0].shape[1]
    transformed = maps[0].new_zeros(len(tiles.inputs), inputs, outputs)
    for group in _groups(maps, tiles):
        x = _cat([_transform_input(maps[which][image], tiles) for which, image in group])
        split = _cat([_split_tiles(gradients[which][image], tiles.side) for which, image in group])
        transformed.baddbmm_(x.mT, _apply(tiles.outputs.T, split))
    return _apply(tiles.kernels.T, transformed).view(3, 3, inputs, outputs).permute(3, 2, 0, 1)


def _groups(maps: Sequence[Tensor], tiles: _Tiles) -> list[list[tuple[int, slice]]]:
    """What is multiplied at once, as (map, image).

    One image at a time: the transformed tensors are several times as large as a map, and should stay in the cache.
    """
    images = [slice(i, i + 1) for i in range(len(maps[0]))]
    if tiles.per_image:
        return [[(which, image) for which in range(len(maps))] for image in images]
    return [[(which, image)] for which in range(len(maps)) for image in images]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """(n, T, C) of all tiles."""
    return torch.cat(list(tensors), dim=1) if len(tensors) > 1 else tensors[0]


def _apply(linear: Tensor, x: Tensor) -> Tensor:
    """(m, n) on the first dimension of (n, a, b)."""
    return (linear.to(x) @ x.flatten(1)).view(len(linear), *x.shape[1:])


def _transform_input(x: Tensor, tiles: _Tiles) -> Tensor:
    """(1, C, h, w) → (n, T, C)."""
    m = tiles.side
    rest_h, rest_w = (-side % m for side in x.shape[2:])
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1 + rest_w, 1, 1 + rest_h))
    patches = padded.unfold(1, m + 2, m).unfold(2, m + 2, m)  # (1, h / m, w / m, C, m + 2, m + 2)
    return _apply(tiles.inputs, patches.permute(4, 5, 0, 1, 2, 3).reshape((m + 2) ** 2, -1, x.shape[1]))


def _split_tiles(y: Tensor, m: int) -> Tensor:
    """(1, O, h, w) → (m · m, T, O), with zeros beyond a side that m does not divide."""
    rest_h, rest_w = (-side % m for side in y.shape[2:])
    whole = F.pad(y.permute(0, 2, 3, 1), (0, 0, 0, rest_w, 0, rest_h))
    rows, columns = (side // m for side in whole.shape[1:3])
    return whole.reshape(rows, m, columns, m, -1).permute(1, 3, 0, 2, 4).reshape(m * m, rows * columns, -1)


def _join_tiles(tiles: Tensor, like: torch.Size, m: int) -> Tensor:
    """(m · m, T, O) → (1, O, h, w), channels-last."""
    height, width = like[2:]
    rows, columns = -(-height // m), -(-width // m)
    y = tiles.view(m, m, rows, columns, -1).permute(2, 0, 3, 1, 4).reshape(1, m * rows, m * columns, -1)
    return y[:, :height, :width].permute(0, 3, 1, 2)
