"""The base classes of backbones: pixels in, one feature map per stride out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from uniquery.layers.checkpointing import checkpointed
from uniquery.layers.norm import freeze

STRIDES = (4, 8, 16, 32)


@dataclass(frozen=True)
class PixelFormat:
    """The normalization that a backbone's weights expect: (value − mean) / std, in this order of colors.

    Attributes:
        mean: per channel of `order`, on the scale 0..255.
        std: per channel of `order`, on the same scale.
        order: which color comes first.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    order: Literal["RGB", "BGR"]


class Backbone(nn.Module, ABC):
    """Pixels to features at four strides.

    The caller normalizes the pixels according to `pixels`. A side that is not a multiple of 32 is rounded up at each
    stride: height h gives ceil(h / stride) rows.

    Attributes:
        channels: stride → channels of its features.
        pixels: what the weights expect of the pixels.
    """

    channels: dict[int, int]
    pixels: PixelFormat

    @abstractmethod
    def forward(self, images: Tensor) -> dict[int, Tensor]:
        """Map normalized (B, 3, H, W) to stride → (B, channels[stride], H / stride, W / stride)."""

    def use_outputs(self, strides: Collection[int]) -> None:
        """Freeze the layers that only serve other outputs: without a gradient, DDP would wait for them forever."""


class StagedBackbone(Backbone):
    """A backbone of a stem and then one stage per stride, each applied to the output of the one before.

    Attributes:
        checkpoint_gradients: whether training keeps only the input of each block, and recomputes the activations in the
            backward pass.
    """

    checkpoint_gradients: bool = False

    @abstractmethod
    def stages(self) -> Sequence[nn.Module]:
        """The stem, and the stages that end at strides 4, 8, 16 and 32."""

    def blocks(self, stage: nn.Module) -> Iterable[nn.Module]:
        """The modules that the stem or a stage applies in order; none of them may change its input in place."""
        return stage if isinstance(stage, nn.Sequential) else (stage,)

    def output(self, stage: nn.Module, x: Tensor) -> Tensor:  # noqa: ARG002 — for subclasses
        """The feature map that is returned, from what `stage` passes on to the next one; by default the same."""
        return x

    def freeze(self, count: int) -> None:
        """Freeze the first `count` of the stem and the four stages, in place.

        Frozen stages come first, so no gradient passes through them: autograd keeps no activations of them.
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
        use_checkpoints = self.checkpoint_gradients and self.training and torch.is_grad_enabled()
        if not use_checkpoints or not any(parameter.requires_grad for parameter in stage.parameters()):
            out: Tensor = stage(x)
            return out
        for block in self.blocks(stage):
            x = checkpointed(block, x)
        return x
