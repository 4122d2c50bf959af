"""What every backbone is: pixels in, one feature map per stride out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from uniquery.layers.checkpointing import checkpointed
from uniquery.layers.norm import freeze

STRIDES = (4, 8, 16, 32)


@dataclass(frozen=True)
class PixelFormat:
    """How pixels must look to a backbone's weights: (value − mean) / std, in this order of colors.

    Attributes:
        mean: per channel of `order`, on the scale 0..255.
        std: likewise.
        order: which color comes first.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    order: Literal["RGB", "BGR"]


class Backbone(nn.Module, ABC):
    """Pixels to features at four strides.

    The caller normalizes the pixels as `pixels` says. A side that is no multiple of 32 is rounded up at each stride:
    height h gives ceil(h / stride) rows.

    Attributes:
        channels: stride → channels of its features.
        pixels: what the weights expect of the pixels.
    """

    channels: dict[int, int]
    pixels: PixelFormat

    @abstractmethod
    def forward(self, images: Tensor) -> dict[int, Tensor]:
        """Map normalized (B, 3, H, W) to stride → (B, channels[stride], H / stride, W / stride)."""


class StagedBackbone(Backbone):
    """A backbone that is a stem and then one stage per stride, each fed by the one before.

    Attributes:
        checkpoint_gradients: whether training keeps the input of each block only, and computes the rest again in the
            backward pass.
    """

    checkpoint_gradients: bool = False

    @abstractmethod
    def stages(self) -> Sequence[nn.Module]:
        """The stem, and the stages that end at strides 4, 8, 16 and 32."""

    def blocks(self, stage: nn.Module) -> Iterable[nn.Module]:
        """What the stem or a stage applies one after the other, none of it changing its input in place."""
        return stage if isinstance(stage, nn.Sequential) else (stage,)

    def output(self, stage: nn.Module, x: Tensor) -> Tensor:  # noqa: ARG002 — a backbone that differs looks at it
        """What is seen from outside of what `stage` hands to the next one: the same, unless a backbone differs."""
        return x

    def freeze(self, count: int) -> None:
        """Stop the first `count` of the stem and the four stages from learning, for good.

        Frozen stages come first and so need no gradient of their input: autograd keeps nothing of them.
        """
        for stage in self.stages()[:count]:
            freeze(stage)

    def forward(self, images: Tensor) -> dict[int, Tensor]:
        """Map normalized (B, 3, H, W) to stride → features."""
        stem, *stages = self.stages()
        x = self._run(stem, images)
        features = {}
        for stride, stage in zip(STRIDES, stages, strict=True):
            x = self._run(stage, x)
            features[stride] = self.output(stage, x)
        return features

    def _run(self, stage: nn.Module, x: Tensor) -> Tensor:
        wanted = self.checkpoint_gradients and self.training and torch.is_grad_enabled()
        if not wanted or not any(parameter.requires_grad for parameter in stage.parameters()):
            out: Tensor = stage(x)
            return out
        for block in self.blocks(stage):
            x = checkpointed(block, x)
        return x
