"""Residual networks [He et al., CVPR 2016], in both conventions that weights are published for.

The original Caffe release halves the resolution in a bottleneck's first 1×1 convolution and reads BGR pixels of unit
scale; torchvision halves it in the 3×3 and reads RGB pixels of unit variance.

Letters: B images, C channels in, O channels out, h × w a map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from uniquery.backbones.base import STRIDES, PixelFormat, StagedBackbone
from uniquery.layers.norm import ConvNorm, NormKind

CAFFE_PIXELS = PixelFormat(mean=(103.53, 116.28, 123.675), std=(1.0, 1.0, 1.0), order="BGR")
TORCHVISION_PIXELS = PixelFormat(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375), order="RGB")

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class Stem(nn.Module):
    """7×7 convolution and maximum, each of stride 2: (B, 3, H, W) to (B, O, H / 4, W / 4)."""

    def __init__(self, out_channels: int, norm: NormKind) -> None:
        super().__init__()
        self.conv1 = ConvNorm(3, out_channels, 7, stride=2, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.max_pool2d(F.relu_(self.conv1(x)), 3, stride=2, padding=1)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut: (B, C, h, w) to (B, O, h / stride, w / stride)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: NormKind) -> None:
        super().__init__()
        self.shortcut = _shortcut(in_channels, out_channels, stride, norm)
        self.conv1 = ConvNorm(in_channels, out_channels, 3, stride=stride, norm=norm)
        self.conv2 = ConvNorm(out_channels, out_channels, 3, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out = self.conv2(F.relu_(self.conv1(x)))
        return F.relu_(out.add_(x if self.shortcut is None else self.shortcut(x)))


class Bottleneck(nn.Module):
    """1×1 to `width` channels, 3×3, 1×1 back, around a shortcut: (B, C, h, w) to (B, O, h / stride, w / stride)."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, norm: NormKind, *, width: int, stride_in_1x1: bool
    ) -> None:
        super().__init__()
        stride_1x1, stride_3x3 = (stride, 1) if stride_in_1x1 else (1, stride)
        self.shortcut = _shortcut(in_channels, out_channels, stride, norm)
        self.conv1 = ConvNorm(in_channels, width, 1, stride=stride_1x1, norm=norm)
        self.conv2 = ConvNorm(width, width, 3, stride=stride_3x3, norm=norm)
        self.conv3 = ConvNorm(width, out_channels, 1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out = self.conv3(F.relu_(self.conv2(F.relu_(self.conv1(x)))))
        return F.relu_(out.add_(x if self.shortcut is None else self.shortcut(x)))


class ResNet(StagedBackbone):
    """ResNet-18, -50 or -101 as a stem and the stages res2..res5, at strides 4..32.

    Args:
        depth: 18 (basic blocks), 50 or 101 (bottlenecks).
        norm: "frozen" keeps the statistics and affine parameters of the pretrained weights; "batch" learns them.
        stride_in_1x1: where a bottleneck halves the resolution, as in the Caffe release (True) or torchvision (False).
            `pixels` follows.
        stem_channels: channels of the stem.
        width: channels inside the bottlenecks of res2, doubled at each later stage.
        res2_channels: channels of res2, doubled at each later stage; by default `width`, times 4 with bottlenecks.

    >>> ResNet(50, norm="frozen").channels
    {4: 256, 8: 512, 16: 1024, 32: 2048}
    """

    def __init__(
        self,
        depth: int,
        *,
        norm: NormKind,
        stride_in_1x1: bool = False,
        stem_channels: int = 64,
        width: int = 64,
        res2_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.bottleneck = depth >= 50
        self.stride_in_1x1 = stride_in_1x1
        self.norm: NormKind = norm
        self.pixels = CAFFE_PIXELS if stride_in_1x1 else TORCHVISION_PIXELS
        first = res2_channels or width * (4 if self.bottleneck else 1)
        self.channels = {stride: first << level for level, stride in enumerate(STRIDES)}

        inputs = (stem_channels, *self.channels.values())
        self.stem = Stem(stem_channels, norm)
        self.res2, self.res3, self.res4, self.res5 = (
            self._stage(count, inputs[level], inputs[level + 1], width << level, stride=1 if level == 0 else 2)
            for level, count in enumerate(BLOCKS[depth])
        )

    def _stage(self, count: int, in_channels: int, out_channels: int, width: int, stride: int) -> nn.Sequential:
        first = self._block(in_channels, out_channels, width, stride)
        return nn.Sequential(first, *(self._block(out_channels, out_channels, width, 1) for _ in range(count - 1)))

    def _block(self, in_channels: int, out_channels: int, width: int, stride: int) -> nn.Module:
        if not self.bottleneck:
            return BasicBlock(in_channels, out_channels, stride, self.norm)
        return Bottleneck(in_channels, out_channels, stride, self.norm, width=width, stride_in_1x1=self.stride_in_1x1)

    def stages(self) -> Sequence[nn.Module]:
        """The stem and res2..res5."""
        return self.stem, self.res2, self.res3, self.res4, self.res5


def _shortcut(in_channels: int, out_channels: int, stride: int, norm: NormKind) -> ConvNorm | None:
    """A 1×1 projection where the shape changes."""
    return ConvNorm(in_channels, out_channels, 1, stride=stride, norm=norm) if in_channels != out_channels else None
