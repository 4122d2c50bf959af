"""From the state dict keys of published backbones to ours: one function per family, None for what we do not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from uniquery.backbones.efficientnet_lite import STAGES

KeyMap = Callable[[str], str | None]
Preprocess = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

_PREFIX = re.compile(r"^(module\.)?(backbone\.)?(bottom_up\.|0\.body\.)?")
_OURS = re.compile(r"(stem|res[2-5]|stage[1-4])\..+")


def resnet_key(key: str) -> str | None:
    """Our key for a ResNet tensor of detectron2 or torchvision.

    detectron2's keys are ours after a prefix.

    >>> resnet_key("backbone.bottom_up.res2.0.conv1.norm.bias"), resnet_key("layer1.0.downsample.1.bias")
    ('res2.0.conv1.norm.bias', 'res2.0.shortcut.norm.bias')
    >>> resnet_key("conv1.weight"), resnet_key("bn1.weight"), resnet_key("fc.weight")
    ('stem.conv1.weight', 'stem.conv1.norm.weight', None)
    """
    key = _PREFIX.sub("", key)
    if _OURS.fullmatch(key):
        return key
    key = re.sub(r"^(conv1|bn1)\.", r"stem.\1.", key)
    key = re.sub(r"^layer([1-4])\.", lambda m: f"res{int(m[1]) + 1}.", key)
    key = key.replace(".downsample.0.", ".shortcut.").replace(".downsample.1.", ".shortcut.norm.")
    key = re.sub(r"\.bn([1-3])\.", r".conv\1.norm.", key)
    return key if _OURS.fullmatch(key) else None


def efficientnet_lite_key(key: str) -> str | None:
    """Our key for a tensor of `efficientnet_lite_pytorch`.

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
    """Our prefix of each published block, which are one list there: the first is in our stem, the others in stages."""
    counts = [sum(count for count, _, _ in groups) for groups in STAGES]
    return "stem.block", *(f"stage{stage}.{i}" for stage, count in enumerate(counts, start=1) for i in range(count))


_BLOCKS = _block_names()


_SWIN_KEYS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^patch_embed\.", "stem."),
    (r"^embeddings\.patch_embeddings\.projection\.", "stem.proj."),
    (r"^embeddings\.norm\.", "stem.norm."),
    (r"^(?:encoder\.)?layers\.(\d)\.blocks\.", lambda m: f"stage{int(m[1]) + 1}.blocks."),
    (r"^(?:encoder\.)?layers\.(\d)\.downsample\.", lambda m: f"stage{int(m[1]) + 2}.merge."),
    (r"^norm(\d)\.", lambda m: f"stage{int(m[1]) + 1}.norm."),
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
    """Our key for a Swin tensor of the original, Mask2Former or Hugging Face, after `swin_tensors`.

    The originals merge patches at the end of a stage, we at the beginning of the next.

    >>> swin_key("backbone.layers.0.blocks.1.attn.qkv.bias"), swin_key("layers.0.downsample.reduction.weight")
    ('stage1.blocks.1.attn.qkv.bias', 'stage2.merge.reduction.weight')
    >>> swin_key("swin.encoder.layers.2.blocks.5.attention.output.dense.weight"), swin_key("norm3.weight")
    ('stage3.blocks.5.attn.proj.weight', 'stage4.norm.weight')
    >>> swin_key("norm.weight"), swin_key("head.weight")
    (None, None)
    """
    key = _PREFIX.sub("", key).removeprefix("swin.")
    for pattern, replacement in _SWIN_KEYS:
        key = re.sub(pattern, replacement, key)
    return key if _OURS.fullmatch(key) else None


def swin_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Swin as in the original, with keys that `swin_key` maps.

    - Masks and indices, which follow from the sizes, are left out.
    - timm since 0.9 merges patches at the beginning of a stage, and numbers the merging with that stage.
    - Hugging Face has separate query, key and value; here they become one `qkv`.
    """
    kept = {key: value for key, value in tensors.items() if not key.endswith(("relative_position_index", "attn_mask"))}
    if any(re.search(r"(^|\.)layers\.3\.downsample\.", key) for key in kept):
        kept = {_merging_in_previous_stage(key): value for key, value in kept.items()}
    for key in list(kept):
        if query := re.fullmatch(r"(.*\.attention\.)(self\.query|q_proj)(\.\w+)", key):
            names = ("self.query", "self.key", "self.value") if "self" in query[2] else ("q_proj", "k_proj", "v_proj")
            keys = [f"{query[1]}{name}{query[3]}" for name in names]
            if all(name in kept for name in keys):
                kept[f"{query[1]}qkv{query[3]}"] = torch.cat([kept.pop(name) for name in keys])
    return kept


def _merging_in_previous_stage(key: str) -> str:
    return re.sub(r"\blayers\.(\d)\.downsample\.", lambda m: f"layers.{int(m[1]) - 1}.downsample.", key)


def is_optional_in_swin(key: str) -> bool:
    """Whether classification weights lack our tensor: they have no normalization of stage outputs.

    >>> is_optional_in_swin("stage1.norm.weight"), is_optional_in_swin("stage2.merge.norm.weight")
    (True, False)
    """
    return re.fullmatch(r"stage\d\.norm\.\w+", key) is not None
