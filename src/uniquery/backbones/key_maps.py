"""Names of published backbones, as prefix pairs that rename in both directions, and one function per family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from uniquery.backbones.efficientnet_lite import scaled_stages

KeyMap = Callable[[str], str | None]  # our key, or None for what we do not have
Preprocess = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
KeyPairs = Sequence[tuple[str, str]]  # (their prefix, our prefix) of keys; "{}" stands for a number, the same in both

_PREFIX = re.compile(r"^(module\.)?(backbone\.)?(bottom_up\.|0\.body\.)?")
_OURS = re.compile(r"(stem|res[2-5]|stage[1-4])\..+")


def rename_prefix(key: str, pairs: KeyPairs, *, to_ours: bool = True) -> str:
    """The key with the first prefix that matches replaced, theirs by ours or the other way, or as it is.

    >>> pairs = [("cate_tower.{}.", "class_tower.{}."), ("cate_", "class_")]
    >>> rename_prefix("cate_tower.3.weight", pairs), rename_prefix("class_pred.bias", pairs, to_ours=False)
    ('class_tower.3.weight', 'cate_pred.bias')
    """
    for pair in pairs:
        old, new = pair if to_ours else reversed(pair)
        match = re.match(re.escape(old).replace(r"\{\}", r"(\d+)"), key)
        if match:
            return new.format(*match.groups()) + key[match.end() :]
    return key


TORCHVISION_RESNET: KeyPairs = (
    ("bn1.", "stem.conv1.norm."),
    ("conv1.", "stem.conv1."),
    *(
        (f"layer{stage - 1}.{{}}.{theirs}", f"res{stage}.{{}}.{ours}")
        for stage in (2, 3, 4, 5)
        for theirs, ours in (
            *((f"bn{i}.", f"conv{i}.norm.") for i in (1, 2, 3)),
            *((f"conv{i}.", f"conv{i}.") for i in (1, 2, 3)),
            ("downsample.1.", "shortcut.norm."),
            ("downsample.0.", "shortcut."),
        )
    ),
)
HF_RESNET: KeyPairs = (
    ("embedder.embedder.normalization.", "stem.conv1.norm."),
    ("embedder.embedder.convolution.", "stem.conv1."),
    *(
        (f"encoder.stages.{stage - 2}.layers.{{}}.{theirs}", f"res{stage}.{{}}.{ours}")
        for stage in (2, 3, 4, 5)
        for theirs, ours in (
            *((f"layer.{i}.normalization.", f"conv{i + 1}.norm.") for i in (0, 1, 2)),
            *((f"layer.{i}.convolution.", f"conv{i + 1}.") for i in (0, 1, 2)),
            ("shortcut.normalization.", "shortcut.norm."),
            ("shortcut.convolution.", "shortcut."),
        )
    ),
)


def resnet_key(key: str) -> str | None:
    """Our key for a ResNet tensor of detectron2, torchvision or Hugging Face.

    detectron2's keys are ours after a prefix.

    >>> resnet_key("backbone.bottom_up.res2.0.conv1.norm.bias"), resnet_key("layer1.0.downsample.1.bias")
    ('res2.0.conv1.norm.bias', 'res2.0.shortcut.norm.bias')
    >>> resnet_key("conv1.weight"), resnet_key("bn1.weight"), resnet_key("fc.weight")
    ('stem.conv1.weight', 'stem.conv1.norm.weight', None)
    >>> resnet_key("encoder.stages.2.layers.5.layer.1.convolution.weight")
    'res4.5.conv2.weight'
    """
    return _checked(rename_prefix(_PREFIX.sub("", key), (*TORCHVISION_RESNET, *HF_RESNET)))


def _checked(key: str) -> str | None:
    return key if _OURS.fullmatch(key) else None


def efficientnet_lite_key(key: str, size: int = 0) -> str | None:
    """Our key for a tensor of `efficientnet_lite_pytorch`; the sizes differ in how many blocks a stage has.

    >>> efficientnet_lite_key("_conv_stem.weight"), efficientnet_lite_key("_blocks.0._bn2.bias")
    ('stem.conv.weight', 'stem.block.project.norm.bias')
    >>> efficientnet_lite_key("_blocks.5._expand_conv.weight"), efficientnet_lite_key("_conv_head.weight")
    ('stage3.0.expand.weight', None)
    >>> efficientnet_lite_key("_blocks.5._expand_conv.weight", size=1)
    'stage2.1.expand.weight'
    """
    return _checked(rename_prefix(_PREFIX.sub("", key), _EFFICIENTNET_LITE[size]))


def _efficientnet_lite(size: int) -> KeyPairs:
    """The published blocks are one list: the first is in our stem, the others are in stages."""
    counts = [sum(count for count, _, _ in groups) for groups in scaled_stages(size)]
    blocks = ["stem.block", *(f"stage{stage}.{i}" for stage, count in enumerate(counts, 1) for i in range(count))]
    return (
        ("_bn0.", "stem.conv.norm."),
        ("_conv_stem.", "stem.conv."),
        *(
            (f"_blocks.{number}.{theirs}.", f"{block}.{ours}.")
            for number, block in enumerate(blocks)
            for i, conv in enumerate(("expand", "depthwise", "project"))
            for theirs, ours in ((f"_bn{i}", f"{conv}.norm"), (f"_{conv}_conv", conv))
        ),
    )


_EFFICIENTNET_LITE = {size: _efficientnet_lite(size) for size in (0, 1, 2)}

# The originals merge patches at the end of a stage, we at the beginning of the next.
SWIN: KeyPairs = (
    ("patch_embed.proj.", "stem.proj."),
    ("patch_embed.norm.", "stem.norm."),
    *((f"layers.{i}.blocks.", f"stage{i + 1}.blocks.") for i in range(4)),
    *((f"layers.{i}.downsample.", f"stage{i + 2}.merge.") for i in range(3)),
    *((f"norm{i}.", f"stage{i + 1}.norm.") for i in range(4)),
)
HF_SWIN: KeyPairs = (
    ("embeddings.patch_embeddings.projection.", "stem.proj."),
    ("embeddings.norm.", "stem.norm."),
    *(
        (f"encoder.layers.{i}.blocks.{{}}.{theirs}", f"stage{i + 1}.blocks.{{}}.{ours}")
        for i in range(4)
        for theirs, ours in (
            ("layernorm_before.", "norm1."),
            ("layernorm_after.", "norm2."),
            ("attention.self.relative_position_bias_table", "attn.relative_position_bias_table"),
            ("attention.relative_position_bias.relative_position_bias_table", "attn.relative_position_bias_table"),
            ("attention.output.dense.", "attn.proj."),
            ("attention.o_proj.", "attn.proj."),
            *((f"attention.self.{part}.", f"attn.{part}.") for part in ("query", "key", "value")),
            *((f"attention.{part[0]}_proj.", f"attn.{part}.") for part in ("query", "key", "value")),
            ("intermediate.dense.", "mlp.fc1."),
            ("output.dense.", "mlp.fc2."),
            ("mlp.", "mlp."),
        )
    ),
    *((f"encoder.layers.{i}.downsample.", f"stage{i + 2}.merge.") for i in range(3)),
    *((f"hidden_states_norms.stage{i}.", f"stage{i}.norm.") for i in (1, 2, 3, 4)),
)


def swin_key(key: str) -> str | None:
    """Our key for a Swin tensor of the original, Mask2Former or Hugging Face, after `swin_tensors`.

    >>> swin_key("backbone.layers.0.blocks.1.attn.qkv.bias"), swin_key("layers.0.downsample.reduction.weight")
    ('stage1.blocks.1.attn.qkv.bias', 'stage2.merge.reduction.weight')
    >>> swin_key("swin.encoder.layers.2.blocks.5.attention.output.dense.weight"), swin_key("norm3.weight")
    ('stage3.blocks.5.attn.proj.weight', 'stage4.norm.weight')
    >>> swin_key("norm.weight"), swin_key("head.weight")
    (None, None)
    """
    return _checked(rename_prefix(_PREFIX.sub("", key).removeprefix("swin."), (*SWIN, *HF_SWIN)))


def swin_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Swin as in the original, with keys that `swin_key` maps.

    - Masks and indices, which follow from the sizes, are left out.
    - timm since 0.9 merges patches at the beginning of a stage, and numbers the merging with that stage.
    - Hugging Face has separate query, key and value; here they become one `qkv`, with our key.
    """
    kept = {key: value for key, value in tensors.items() if not key.endswith(("relative_position_index", "attn_mask"))}
    if any(re.search(r"(^|\.)layers\.3\.downsample\.", key) for key in kept):
        kept = {_merging_in_previous_stage(key): value for key, value in kept.items()}
    attention = {swin_key(key): key for key in kept if ".attention." in key}
    for query in [ours for ours in attention if ours is not None and ".attn.query." in ours]:
        keys = [attention.get(query.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
        if all(keys):
            kept[query.replace(".query.", ".qkv.")] = torch.cat([kept.pop(key) for key in keys if key])
    return kept


def split_qkv(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of ours as Hugging Face has it: `qkv` as separate query, key and value, others as they are."""
    if ".attn.qkv." not in key:
        return {key: tensor}
    parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
    return {key.replace(".qkv.", f".{part}."): value for part, value in parts}


def _merging_in_previous_stage(key: str) -> str:
    return re.sub(r"\blayers\.(\d)\.downsample\.", lambda m: f"layers.{int(m[1]) - 1}.downsample.", key)


def is_optional_in_swin(key: str) -> bool:
    """Whether classification weights lack our tensor: they have no normalization of stage outputs.

    >>> is_optional_in_swin("stage1.norm.weight"), is_optional_in_swin("stage2.merge.norm.weight")
    (True, False)
    """
    return re.fullmatch(r"stage\d\.norm\.\w+", key) is not None
