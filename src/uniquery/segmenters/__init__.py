"""The table of segmenters, and `build_segmenter`."""

from __future__ import annotations

from typing import Annotated, Any, cast, get_args

from pydantic import Field, TypeAdapter

from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.condinst import CondInst, CondInstConfig
from uniquery.segmenters.mask2former import Mask2Former, Mask2FormerConfig
from uniquery.segmenters.solov2 import SOLOv2, SOLOv2Config
from uniquery.segmenters.solq import SOLQ, SOLQConfig
from uniquery.segmenters.sotr import SOTR, SOTRConfig
from uniquery.segmenters.sparseinst import SparseInst, SparseInstConfig

SEGMENTERS: dict[str, type[Any]] = {
    "condinst": CondInst,
    "mask2former": Mask2Former,
    "solov2": SOLOv2,
    "solq": SOLQ,
    "sotr": SOTR,
    "sparseinst": SparseInst,
}
SegmenterConfig = Annotated[
    CondInstConfig | Mask2FormerConfig | SOLOv2Config | SOLQConfig | SOTRConfig | SparseInstConfig,
    Field(discriminator="name"),
]
DEFAULT_SEGMENTER = CondInstConfig()  # for a config that names no model

__all__ = [
    "DEFAULT_SEGMENTER",
    "SEGMENTERS",
    "SegmenterConfig",
    "build_segmenter",
    "read_segmenter_config",
    "segmenters_with",
]


def build_segmenter(
    config: SegmenterConfig, backbone: BackboneConfig, num_classes: int, *, pretrained: bool = True
) -> Segmenter[Any, Any, Any]:
    """A segmenter on a backbone; `pretrained=False` does not load backbone weights: a checkpoint is loaded later."""
    model = SEGMENTERS[config.name](build_backbone(backbone, pretrained=pretrained), num_classes, config)
    return cast("Segmenter[Any, Any, Any]", model)


def segmenters_with(property_name: str) -> list[str]:
    """The names of the segmenters whose settings have a property, such as `supports_panoptic`."""
    settings = [one() for one in get_args(get_args(SegmenterConfig)[0])]
    return [one.name for one in settings if getattr(one, property_name)]


def read_segmenter_config(json: str) -> SegmenterConfig:
    """The settings of whichever segmenter the text names."""
    adapter: TypeAdapter[SegmenterConfig] = TypeAdapter(SegmenterConfig)
    return adapter.validate_json(json)
