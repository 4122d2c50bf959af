"""Where a tensor of a published backbone belongs in ours: one function per family, None for what is no part of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from uniquery.backbones.efficientnet_lite import STAGES

KeyMap = Callable[[str], str | None]

_PREFIX = re.compile(r"^(module\.)?(backbone\.)?(bottom_up\.|0\.body\.)?")
_OURS = re.compile(r"(stem|res[2-5]|stage[1-4])\..+")


def resnet_key(key: str) -> str | None:
    """Our name of a ResNet tensor that detectron2 or torchvision named.

    detectron2's names are ours behind a prefix.

    >>> resnet_key("backbone.bottom_up.res2.0.conv1.norm.bias"), resnet_key("layer1.0.downsample.1.bias")
    ('res2.0.conv1.norm.bias', 'res2.0.shortcut.norm.bias')
    >>> resnet_key("conv1.weight"), resnet_key("bn1.weight"), resnet_key("fc.weight")
    ('stem.conv1.weight', 'stem.conv1.norm.weight', None)
    """
    key = _PREFIX.sub("", key)
    if _OURS.fullmatch(key):
        return key
    key = re.sub(r"^(conv1|bn1)\.", r"stem.\1.", key)
    key = re.sub(r"^layer([1-4])\.", lambda found: f"res{int(found[1]) + 1}.", key)
    key = key.replace(".downsample.0.", ".shortcut.").replace(".downsample.1.", ".shortcut.norm.")
    key = re.sub(r"\.bn([1-3])\.", r".conv\1.norm.", key)
    return key if _OURS.fullmatch(key) else None


def efficientnet_lite_key(key: str) -> str | None:
    """Our name of a tensor that `efficientnet_lite_pytorch` named.

    >>> efficientnet_lite_key("_conv_stem.weight"), efficientnet_lite_key("_blocks.0._bn2.bias")
    ('stem.conv.weight', 'stem.block.project.norm.bias')
    >>> efficientnet_lite_key("_blocks.5._expand_conv.weight"), efficientnet_lite_key("_conv_head.weight")
    ('stage3.0.expand.weight', None)
    """
    key = _PREFIX.sub("", key)
    if _OURS.fullmatch(key):
        return key
    if stem := re.fullmatch(r"(?:_conv_stem|(_bn0))\.(\w+)", key):
        return f"stem.conv.{'norm.' if stem[1] else ''}{stem[2]}"
    block = re.fullmatch(r"_blocks\.(\d+)\.(?:_(\w+)_conv|_bn([0-2]))\.(\w+)", key)
    if block is None:
        return None
    layer = block[2] or ("expand", "depthwise", "project")[int(block[3])] + ".norm"
    index = int(block[1])
    return f"{_BLOCKS[index]}.{layer}.{block[4]}" if index < len(_BLOCKS) else None


def _block_names() -> tuple[str, ...]:
    """Where the published, flat list of blocks sits with us: the stem holds the first, the stages the others."""
    counts = [sum(count for count, _, _ in groups) for groups in STAGES]
    return "stem.block", *(f"stage{stage}.{i}" for stage, count in enumerate(counts, start=1) for i in range(count))


_BLOCKS = _block_names()
