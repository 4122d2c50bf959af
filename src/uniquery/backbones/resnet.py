"""Residual networks [He et al., CVPR 2016], in both conventions that weights are published for.

The original Caffe release halves the resolution in a bottleneck's first 1×1 convolution and reads BGR pixels of unit
scale; torchvision halves it in the 3×3 and reads RGB pixels of unit variance. The 3×3 of chosen stages may be
deformable, as in detectron2, whose names for these layers are ours.

Letters: B images, C channels in, O channels out, h × w a map.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from uniquery.backbones.base import STRIDES, PixelFormat, StagedBackbone
from uniquery.layers.deformable_conv import DeformableConvNorm
from uniquery.layers.norm import ConvNorm, NormKind

CAFFE_PIXELS = PixelFormat(mean=(103.53, 116.28, 123.675), std=(1.0, 1.0, 1.0), order="BGR")
TORCHVISION_PIXELS = PixelFormat(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375), order="RGB")

Stage = Literal["res2", "res3", "res4", "res5"]
STAGES: tuple[Stage, ...] = ("res2", "res3", "res4", "res5")
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
        out = self.conv3(F.relu_(self.spatial(F.relu_(self.conv1(x)))))
        return F.relu_(out.add_(x if self.shortcut is None else self.shortcut(x)))

    def spatial(self, x: Tensor) -> Tensor:
        """The 3×3 convolution."""
        return cast(Tensor, self.conv2(x))


class DeformableBottleneck(Bottleneck):
    """A bottleneck whose 3×3 convolution is deformable; the offsets of its taps are 0 at first.

    With `modulated`, each tap also has a factor, 0.5 at first.
    """

    conv2: DeformableConvNorm

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        norm: NormKind,
        *,
        width: int,
        stride_in_1x1: bool,
        modulated: bool,
    ) -> None:
        super().__init__(in_channels, out_channels, stride, norm, width=width, stride_in_1x1=stride_in_1x1)
        stride_3x3 = 1 if stride_in_1x1 else stride
        self.modulated = modulated
        self.conv2_offset = nn.Conv2d(width, 27 if modulated else 18, 3, stride=stride_3x3, padding=1)
        nn.init.zeros_(self.conv2_offset.weight)
        nn.init.zeros_(cast(Tensor, self.conv2_offset.bias))
        self.conv2 = DeformableConvNorm(width, width, 3, stride=stride_3x3, norm=norm)

    def spatial(self, x: Tensor) -> Tensor:
        """The 3×3 convolution."""
        offset = self.conv2_offset(x)
        if not self.modulated:
            return cast(Tensor, self.conv2(x, offset))
        return cast(Tensor, self.conv2(x, offset[:, :18], offset[:, 18:].sigmoid()))


def is_optional_in_resnet(key: str) -> bool:
    """Whether weights may lack a tensor: published ImageNet weights have no offsets, which then start at 0."""
    return ".conv2_offset." in key


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
        deformable_stages: stages whose bottlenecks have a deformable 3×3 convolution.
        modulated: whether each tap of those has a factor (version 2) in addition to an offset.

    Raises:
        ValueError: deformable stages without bottlenecks.

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
        deformable_stages: Collection[Stage] = (),
        modulated: bool = False,
    ) -> None:
        super().__init__()
        self.bottleneck = depth >= 50
        if deformable_stages and not self.bottleneck:
            raise ValueError(f"ResNet-{depth} has no bottlenecks; deformable stages need ResNet-50 or -101")
        self.stride_in_1x1 = stride_in_1x1
        self.deformable_stages, self.modulated = frozenset(deformable_stages), modulated
        self.norm: NormKind = norm
        self.pixels = CAFFE_PIXELS if stride_in_1x1 else TORCHVISION_PIXELS
        first = res2_channels or width * (4 if self.bottleneck else 1)
        self.channels = {stride: first << level for level, stride in enumerate(STRIDES)}

        inputs = (stem_channels, *self.channels.values())
        self.stem = Stem(stem_channels, norm)
        self.res2, self.res3, self.res4, self.res5 = (
            self._stage(level, count, inputs[level], inputs[level + 1], width << level)
            for level, count in enumerate(BLOCKS[depth])
        )

    def _stage(self, level: int, count: int, in_channels: int, out_channels: int, width: int) -> nn.Sequential:
        is_deformable = STAGES[level] in self.deformable_stages
        inputs, strides = [in_channels, *[out_channels] * (count - 1)], [1 if level == 0 else 2, *[1] * (count - 1)]
        return nn.Sequential(
            *(
                self._block(channels, out_channels, width, stride, is_deformable)
                for channels, stride in zip(inputs, strides, strict=True)
            )
        )

    def _block(self, in_channels: int, out_channels: int, width: int, stride: int, is_deformable: bool) -> nn.Module:
        if not self.bottleneck:
            return BasicBlock(in_channels, out_channels, stride, self.norm)
        shape, in_1x1 = (in_channels, out_channels, stride, self.norm), self.stride_in_1x1
        if is_deformable:
            return DeformableBottleneck(*shape, width=width, stride_in_1x1=in_1x1, modulated=self.modulated)
        return Bottleneck(*shape, width=width, stride_in_1x1=in_1x1)

    def stages(self) -> Sequence[nn.Module]:
        """The stem and res2..res5."""
        return self.stem, self.res2, self.res3, self.res4, self.res5


def _shortcut(in_channels: int, out_channels: int, stride: int, norm: NormKind) -> ConvNorm | None:
    """A 1×1 projection where the shape changes."""
    return ConvNorm(in_channels, out_channels, 1, stride=stride, norm=norm) if in_channels != out_channels else None
