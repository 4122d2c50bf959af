"""A backbone of 0.2 M parameters, for tests and first experiments. It has no pretrained weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from uniquery.backbones.base import STRIDES, PixelFormat, StagedBackbone

STEM_CHANNELS = 8
CHANNELS = (16, 32, 64, 96)
GROUPS = 8


class Tiny(StagedBackbone):
    """Two 3×3 convolutions per stride, group normalization, ReLU.

    >>> Tiny().channels
    {4: 16, 8: 32, 16: 64, 32: 96}
    """

    def __init__(self) -> None:
        super().__init__()
        self.pixels = PixelFormat(mean=(127.5, 127.5, 127.5), std=(127.5, 127.5, 127.5), order="RGB")
        self.channels = dict(zip(STRIDES, CHANNELS, strict=True))
        inputs = (STEM_CHANNELS, *CHANNELS)
        self.stem = nn.Sequential(*_layer(3, STEM_CHANNELS, stride=2))
        self.stage1, self.stage2, self.stage3, self.stage4 = (
            nn.Sequential(*_layer(inputs[level], channels, stride=2), *_layer(channels, channels, stride=1))
            for level, channels in enumerate(CHANNELS)
        )

    def stages(self) -> Sequence[nn.Module]:
        """The stem and stages 1..4."""
        return self.stem, self.stage1, self.stage2, self.stage3, self.stage4

    def blocks(self, stage: nn.Module) -> Iterable[nn.Module]:
        """Each stage as a whole, as its ReLUs are in-place."""
        return (stage,)


def _layer(in_channels: int, out_channels: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.GroupNorm(GROUPS, out_channels), nn.ReLU(inplace=True)
