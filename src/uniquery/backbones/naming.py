"""Where a tensor of a published backbone belongs in ours: one function per family, None for what is no part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from uniquery.backbones.efficientnet_lite import STAGES

KeyMap = Callable[[str], str | None]
Preparation = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

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


_SWIN_NAMES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^patch_embed\.", "stem."),
    (r"^embeddings\.patch_embeddings\.projection\.", "stem.proj."),
    (r"^embeddings\.norm\.", "stem.norm."),
    (r"^(?:encoder\.)?layers\.(\d)\.blocks\.", lambda found: f"stage{int(found[1]) + 1}.blocks."),
    (r"^(?:encoder\.)?layers\.(\d)\.downsample\.", lambda found: f"stage{int(found[1]) + 2}.merge."),
    (r"^norm(\d)\.", lambda found: f"stage{int(found[1]) + 1}.norm."),
    (r"^hidden_states_norms\.", ""),
    (r"^(stage\d)\.(weight|bias)$", r"\1.norm.\2"),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.attention\.(?:self\.|relative_position_bias\.)?", ".attn."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
)


def swin_key(key: str) -> str | None:
    """Our name of a Swin tensor that the original, Mask2Former or Hugging Face named; see `swin_tensors` before it.

    The originals merge patches at the end of a stage, we at the beginning of the next.

    >>> swin_key("backbone.layers.0.blocks.1.attn.qkv.bias"), swin_key("layers.0.downsample.reduction.weight")
    ('stage1.blocks.1.attn.qkv.bias', 'stage2.merge.reduction.weight')
    >>> swin_key("swin.encoder.layers.2.blocks.5.attention.output.dense.weight"), swin_key("norm3.weight")
    ('stage3.blocks.5.attn.proj.weight', 'stage4.norm.weight')
    >>> swin_key("norm.weight"), swin_key("head.weight")
    (None, None)
    """
    key = _PREFIX.sub("", key).removeprefix("swin.")
    for theirs, ours in _SWIN_NAMES:
        key = re.sub(theirs, ours, key)
    return key if _OURS.fullmatch(key) else None


def swin_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Swin as the original keeps them, under names that `swin_key` knows.

    - Masks and indices, which follow from the sizes, are left out.
    - timm since 0.9 merges patches at the beginning of a stage, and counts the merging with that stage.
    - Hugging Face keeps query, key and value apart; here they become one `qkv`.
    """
    kept = {key: value for key, value in tensors.items() if not key.endswith(("relative_position_index", "attn_mask"))}
    if any(re.search(r"(^|\.)layers\.3\.downsample\.", key) for key in kept):
        kept = {_merging_with_the_stage_before(key): value for key, value in kept.items()}
    for key in list(kept):
        if query := re.fullmatch(r"(.*\.attention\.)(self\.query|q_proj)(\.\w+)", key):
            names = ("self.query", "self.key", "self.value") if "self" in query[2] else ("q_proj", "k_proj", "v_proj")
            parts = [f"{query[1]}{name}{query[3]}" for name in names]
            if all(part in kept for part in parts):
                kept[f"{query[1]}qkv{query[3]}"] = torch.cat([kept.pop(part) for part in parts])
    return kept


def _merging_with_the_stage_before(key: str) -> str:
    return re.sub(r"\blayers\.(\d)\.downsample\.", lambda found: f"layers.{int(found[1]) - 1}.downsample.", key)


def swin_may_lack(key: str) -> bool:
    """Whether weights of a classifier have nothing for our tensor: it has no normalization on the outputs of stages.

    >>> swin_may_lack("stage1.norm.weight"), swin_may_lack("stage2.merge.norm.weight")
    (True, False)
    """
    return re.fullmatch(r"stage\d\.norm\.\w+", key) is not None
