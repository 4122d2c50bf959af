"""What every backbone is: pixels in, one feature map per stride out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from uniquery.layers.norm import freeze

STRIDES = (4, 8, 16, 32)


@dataclass(frozen=True)
class PixelFormat:
    """How pixels must look to a backbone's weights: (value − mean) / std, in this order of colours.

    Attributes:
        mean: per channel of `order`, on the scale 0..255.
        std: likewise.
        order: which colour comes first.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    order: Literal["RGB", "BGR"]


class Backbone(nn.Module, ABC):
    """Pixels to features at four strides.

    The caller normalises the pixels as `pixels` says. A side that is no multiple of 32 is rounded up at each stride:
    height h gives ceil(h / stride) rows.

    Attributes:
        channels: stride → channels of its features.
        pixels: what the weights expect of the pixels.
    """

    channels: dict[int, int]
    pixels: PixelFormat

    @abstractmethod
    def forward(self, images: Tensor) -> dict[int, Tensor]:
        """Map normalised (B, 3, H, W) to stride → (B, channels[stride], H / stride, W / stride)."""


class StagedBackbone(Backbone):
    """A backbone that is a stem and then one stage per stride, each fed by the one before."""

    @abstractmethod
    def stages(self) -> Sequence[nn.Module]:
        """The stem, and the stages that end at strides 4, 8, 16 and 32."""

    def freeze(self, count: int) -> None:
        """Stop the first `count` of the stem and the four stages from learning, for good.

        Frozen stages come first and so need no gradient of their input: autograd keeps nothing of them.
        """
        for stage in self.stages()[:count]:
            freeze(stage)

    def forward(self, images: Tensor) -> dict[int, Tensor]:
        """Map normalised (B, 3, H, W) to stride → features."""
        stem, *stages = self.stages()
        x = stem(images)
        features = {}
        for stride, stage in zip(STRIDES, stages, strict=True):
            x = stage(x)
            features[stride] = x
        return features
