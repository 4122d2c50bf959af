"""The segmenters: one name → class table, and the one way to build one."""

from __future__ import annotations

from typing import Any

from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.condinst import CondInst, CondInstConfig

SEGMENTERS = {"condinst": CondInst}
SegmenterConfig = CondInstConfig

__all__ = ["SEGMENTERS", "SegmenterConfig", "build_segmenter"]


def build_segmenter(
    config: SegmenterConfig, backbone: BackboneConfig, num_classes: int, *, pretrained: bool = True
) -> Segmenter[Any, Any, Any]:
    """A segmenter on a backbone; `pretrained=False` leaves the backbone's weights to a checkpoint that follows."""
    return SEGMENTERS[config.name](build_backbone(backbone, pretrained=pretrained), num_classes, config)
