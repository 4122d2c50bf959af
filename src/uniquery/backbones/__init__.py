"""Backbones: pixels to features at strides 4, 8, 16 and 32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from uniquery.backbones.base import Backbone, PixelFormat, StagedBackbone
from uniquery.backbones.efficientnet_lite import EfficientNetLite
from uniquery.backbones.key_maps import (
    KeyMap,
    Preprocess,
    efficientnet_lite_key,
    is_optional_in_swin,
    resnet_key,
    swin_key,
    swin_tensors,
)
from uniquery.backbones.pretrained import imagenet_file, load_weights
from uniquery.backbones.resnet import ResNet, Stage, is_optional_in_resnet
from uniquery.backbones.swin import SIZES, Swin
from uniquery.backbones.tiny import Tiny
from uniquery.errors import ConfigError
from uniquery.layers.norm import NormKind
from uniquery.settings import Settings

__all__ = ["BACKBONES", "Backbone", "BackboneConfig", "PixelFormat", "build_backbone"]


class BackboneConfig(Settings):
    """Which backbone, and where its weights come from.

    Attributes:
        name: one of `BACKBONES`.
        weights: "imagenet", the path of a .safetensors or .pth file, or "random". Without it, building fails: random
            weights must be asked for.
        norm: "frozen" batch normalization has constant statistics and affine parameters, "batch" learns them. By
            default frozen, and "batch" with random weights. Not for Swin and tiny, which have no batch normalization.
        frozen_stages: how many of the stem and the stages are not trained; 2 is the stem and the stage of stride 4.
            By default 2, and 0 for Swin and with random weights.
        caffe: for ResNets, whether the weights are of the original Caffe kind (stride in the 1×1 convolution, BGR
            pixels) instead of torchvision's.
        deformable_stages: for ResNet-50 and -101, stages whose 3×3 convolutions are deformable.
        modulated: whether each tap of those has a factor (version 2) in addition to an offset.
        checkpoint_gradients: recompute each block in the backward pass: less memory, about a third more time.
    """

    name: Literal[
        "resnet18",
        "resnet50",
        "resnet101",
        "efficientnet_lite0",
        "efficientnet_lite1",
        "efficientnet_lite2",
        "swin_tiny",
        "swin_small",
        "swin_base",
        "swin_base_384",
        "swin_large",
        "swin_large_384",
        "tiny",
    ]
    weights: str | None = None
    norm: NormKind | None = None
    frozen_stages: int | None = Field(default=None, ge=0, le=4)
    caffe: bool = False
    deformable_stages: tuple[Stage, ...] = ()
    modulated: bool = False
    checkpoint_gradients: bool = False

    @model_validator(mode="after")
    def _check_backbone(self) -> Self:
        if self.caffe and not self.name.startswith("resnet"):
            raise ValueError(f"'caffe' is a setting of ResNets; remove it for '{self.name}'")
        if self.caffe and self.weights == "imagenet":
            raise ValueError("weights 'imagenet' are torchvision's; give 'caffe' weights by their path")
        if self.deformable_stages and self.name not in ("resnet50", "resnet101"):
            raise ValueError(f"'deformable_stages' is a setting of resnet50 and resnet101; remove it for '{self.name}'")
        if self.modulated and not self.deformable_stages:
            raise ValueError("'modulated' is a setting of deformable convolutions; give 'deformable_stages' too")
        kind = "group" if self.name == "tiny" else "layer" if self.name.startswith("swin") else None
        if kind and self.norm is not None:
            raise ValueError(f"the backbone '{self.name}' has {kind} normalization; remove 'norm'")
        return self


@dataclass(frozen=True)
class Family:
    """How to build a backbone of the table, and how to load its published weights.

    Attributes:
        build: (kind of normalization, `caffe`) → backbone; for ResNets, with further keyword arguments.
        rename, preprocess, is_optional: see `load_weights`.
        frozen_stages: default number of frozen stages with published weights.
    """

    build: Callable[..., StagedBackbone]
    rename: KeyMap
    preprocess: Preprocess = dict
    is_optional: Callable[[str], bool] = lambda _: False
    frozen_stages: int = 2


def _resnet(depth: int) -> Family:
    def build(norm: NormKind, caffe: bool, **deformation: Any) -> StagedBackbone:
        return ResNet(depth, norm=norm, stride_in_1x1=caffe, **deformation)

    return Family(build, resnet_key, is_optional=is_optional_in_resnet)


def _efficientnet_lite(size: int) -> Family:
    return Family(lambda norm, _: EfficientNetLite(size, norm=norm), partial(efficientnet_lite_key, size=size))


def _swin(size: str, window: int) -> Family:
    return Family(
        lambda _norm, _caffe: Swin(*SIZES[size], window=window),
        swin_key,
        swin_tensors,
        is_optional_in_swin,
        frozen_stages=0,
    )


BACKBONES: dict[str, Family] = {
    "resnet18": _resnet(18),
    "resnet50": _resnet(50),
    "resnet101": _resnet(101),
    "efficientnet_lite0": _efficientnet_lite(0),
    "efficientnet_lite1": _efficientnet_lite(1),
    "efficientnet_lite2": _efficientnet_lite(2),
    "swin_tiny": _swin("tiny", 7),
    "swin_small": _swin("small", 7),
    "swin_base": _swin("base", 7),
    "swin_base_384": _swin("base", 12),
    "swin_large": _swin("large", 7),
    "swin_large_384": _swin("large", 12),
    "tiny": Family(lambda _norm, _caffe: Tiny(), lambda key: key),
}


def build_backbone(config: BackboneConfig, *, pretrained: bool = True) -> Backbone:
    """The backbone that `config` describes, with its weights loaded.

    Args:
        config: which backbone.
        pretrained: False does not load weights: a checkpoint of the whole model is loaded later.

    Raises:
        ConfigError: `config.weights` is missing.
        CheckpointError: the weights are missing, cannot be read, or do not fit.

    >>> build_backbone(BackboneConfig(name="tiny", weights="random")).channels
    {4: 16, 8: 32, 16: 64, 32: 96}
    """
    if config.weights is None:
        raise ConfigError(
            f"The backbone '{config.name}' has no weights; set its weights to 'imagenet', to the path of a "
            ".safetensors or .pth file, or to 'random'."
        )
    random = config.weights == "random"
    family = BACKBONES[config.name]
    deformation = {key: getattr(config, key) for key in ("deformable_stages", "modulated") if getattr(config, key)}
    backbone = family.build(config.norm or ("batch" if random else "frozen"), config.caffe, **deformation)
    if pretrained and not random:
        path = imagenet_file(config.name) if config.weights == "imagenet" else Path(config.weights).expanduser()
        load_weights(backbone, path, family.rename, preprocess=family.preprocess, is_optional=family.is_optional)
    default = 0 if random else family.frozen_stages
    backbone.freeze(default if config.frozen_stages is None else config.frozen_stages)
    backbone.checkpoint_gradients = config.checkpoint_gradients
    return backbone
