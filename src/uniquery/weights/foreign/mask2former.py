"""From the state dict keys of Mask2Former's checkpoints, the original's and Hugging Face's, to ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from uniquery.backbones.key_maps import resnet_key, swin_key, swin_tensors
from uniquery.weights.foreign.renaming import Rules, rename

_DEFORMABLE: Rules = (
    (r"self_attn\.sampling_offsets\.", "attention.offsets."),
    (r"self_attn\.attention_weights\.", "attention.attention."),
    (r"self_attn\.value_proj\.", "attention.values."),
    (r"self_attn\.output_proj\.", "attention.output."),
    (r"(norm1|self_attn_layer_norm)\.", "norm."),
    (r"(linear1|fc1)\.", "feed_forward.linear1."),
    (r"(linear2|fc2)\.", "feed_forward.linear2."),
    (r"(norm2|final_layer_norm)\.", "feed_forward.norm."),
)
_ATTENTION: Rules = (
    (r"(self_attn|multihead_attn)\.in_proj_", "in_"),
    (r"(self_attn|multihead_attn)\.out_proj\.", "output."),
    (r"linear1\.", "linear1."),
    (r"linear2\.", "linear2."),
)
_PIXEL_DECODER = r"sem_seg_head\.pixel_decoder\."
_ORIGINAL: Rules = (
    (_PIXEL_DECODER + r"input_proj\.(\d)\.0\.", r"pixel_decoder.projections.\1."),
    (_PIXEL_DECODER + r"input_proj\.(\d)\.1\.", r"pixel_decoder.norms.\1."),
    (_PIXEL_DECODER + r"transformer\.level_embed", "pixel_decoder.level_embedding"),
    (_PIXEL_DECODER + r"transformer\.encoder\.layers\.", "pixel_decoder.layers."),
    (_PIXEL_DECODER + r"mask_features\.", "pixel_decoder.embed."),
    (_PIXEL_DECODER + r"adapter_1\.norm\.", "pixel_decoder.lateral_norm."),
    (_PIXEL_DECODER + r"adapter_1\.", "pixel_decoder.lateral."),
    (_PIXEL_DECODER + r"layer_1\.norm\.", "pixel_decoder.merge_norm."),
    (_PIXEL_DECODER + r"layer_1\.", "pixel_decoder.merge."),
    (r"sem_seg_head\.predictor\.transformer_self_attention_layers\.", "decoder.self_attention."),
    (r"sem_seg_head\.predictor\.transformer_cross_attention_layers\.", "decoder.cross_attention."),
    (r"sem_seg_head\.predictor\.transformer_ffn_layers\.", "decoder.feed_forward."),
    (r"sem_seg_head\.predictor\.decoder_norm\.", "decoder.norm."),
    (r"sem_seg_head\.predictor\.(query_feat|static_query)\.weight", "decoder.query_features"),
    (r"sem_seg_head\.predictor\.query_embed\.weight", "decoder.query_positions"),
    (r"sem_seg_head\.predictor\.level_embed\.weight", "decoder.level_embedding"),
    (r"sem_seg_head\.predictor\.class_embed\.", "decoder.classes."),
    (r"sem_seg_head\.predictor\.mask_embed\.layers\.", "decoder.masks."),
)
_HF_PIXEL_DECODER = r"model\.pixel_level_module\.decoder\."
_HF_DECODER = r"model\.transformer_module\."
_HUGGING_FACE: Rules = (
    (_HF_PIXEL_DECODER + r"input_projections\.(\d)\.0\.", r"pixel_decoder.projections.\1."),
    (_HF_PIXEL_DECODER + r"input_projections\.(\d)\.1\.", r"pixel_decoder.norms.\1."),
    (_HF_PIXEL_DECODER + r"level_embed", "pixel_decoder.level_embedding"),
    (_HF_PIXEL_DECODER + r"encoder\.layers\.", "pixel_decoder.layers."),
    (_HF_PIXEL_DECODER + r"mask_projection\.", "pixel_decoder.embed."),
    (_HF_PIXEL_DECODER + r"adapter_1\.0\.", "pixel_decoder.lateral."),
    (_HF_PIXEL_DECODER + r"adapter_1\.1\.", "pixel_decoder.lateral_norm."),
    (_HF_PIXEL_DECODER + r"layer_1\.0\.", "pixel_decoder.merge."),
    (_HF_PIXEL_DECODER + r"layer_1\.1\.", "pixel_decoder.merge_norm."),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"decoder.self_attention.\1.output."),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"decoder.self_attention.\1.\2_"),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.self_attn_layer_norm\.", r"decoder.self_attention.\1.norm."),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.cross_attn\.in_proj_", r"decoder.cross_attention.\1.in_"),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.cross_attn\.out_proj\.", r"decoder.cross_attention.\1.output."),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.cross_attn_layer_norm\.", r"decoder.cross_attention.\1.norm."),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.fc1\.", r"decoder.feed_forward.\1.linear1."),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.fc2\.", r"decoder.feed_forward.\1.linear2."),
    (_HF_DECODER + r"decoder\.layers\.(\d+)\.final_layer_norm\.", r"decoder.feed_forward.\1.norm."),
    (_HF_DECODER + r"decoder\.layernorm\.", "decoder.norm."),
    (_HF_DECODER + r"decoder\.mask_predictor\.mask_embedder\.(\d)\.0\.", r"decoder.masks.\1."),
    (_HF_DECODER + r"queries_features\.weight", "decoder.query_features"),
    (_HF_DECODER + r"queries_embedder\.weight", "decoder.query_positions"),
    (_HF_DECODER + r"level_embed\.weight", "decoder.level_embedding"),
    (r"class_predictor\.", "decoder.classes."),
)
_HF_BACKBONE = "model.pixel_level_module.encoder."
_HF_BLOCK = re.compile(
    r"encoder\.stages\.(\d)\.layers\.(\d+)\.(shortcut|layer\.(\d))\.(convolution|normalization)\.(\w+)"
)
_HF_STEM = re.compile(r"embedder\.embedder\.(convolution|normalization)\.(\w+)")
_NOT_WEIGHTS = ("criterion.", "pixel_mean", "pixel_std")


def is_mask2former(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is the original Mask2Former's."""
    return any(name.startswith("sem_seg_head.predictor.transformer_cross_attention_layers.") for name in foreign)


def mask2former_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The original's state dict, with a ResNet or a Swin, with our keys; buffers that are not weights are dropped.

    >>> names = "sem_seg_head.predictor.query_feat.weight", "criterion.empty_weight"
    >>> list(mask2former_names(dict.fromkeys(names, torch.zeros(1))))
    ['decoder.query_features']
    """
    backbone, head = _split_backbone(foreign, "backbone.")
    return {**_backbone(backbone), **{_original_key(name): tensor for name, tensor in head.items()}}


def _split_backbone(foreign: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the backbone, without the prefix, and the others."""
    backbone = {name.removeprefix(prefix): tensor for name, tensor in foreign.items() if name.startswith(prefix)}
    return backbone, {n: tensor for n, tensor in foreign.items() if not n.startswith((prefix, *_NOT_WEIGHTS))}


def _backbone(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a backbone with our keys."""
    is_swin = any("relative_position_bias_table" in name for name in foreign)
    key, tensors = (swin_key, swin_tensors(foreign)) if is_swin else (_resnet_key, foreign)
    named = ((key(name), tensor) for name, tensor in tensors.items() if not name.endswith("num_batches_tracked"))
    return {f"backbone.{name}": tensor for name, tensor in named if name is not None}


def _original_key(name: str) -> str:
    name = rename(name, _ORIGINAL)
    prefix = re.match(r"(pixel_decoder\.layers|decoder\.(?:self_attention|cross_attention|feed_forward))\.\d+\.", name)
    if prefix is None:
        return name
    rules = _DEFORMABLE if name.startswith("pixel_decoder") else _ATTENTION
    return prefix[0] + rename(name[prefix.end() :], rules)


def is_hf_mask2former(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is Hugging Face's Mask2Former."""
    return any(name.startswith("model.transformer_module.decoder.") for name in foreign)


def hf_mask2former_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of Hugging Face's `Mask2FormerForUniversalSegmentation` with our keys, without other buffers.

    The separate query, key and value projections of its self-attention become one, as ours are.

    >>> list(hf_mask2former_names({"class_predictor.bias": torch.zeros(1), "criterion.empty_weight": torch.zeros(2)}))
    ['decoder.classes.bias']
    """
    backbone, head = _split_backbone(foreign, _HF_BACKBONE)
    ours = {_hf_key(name): tensor for name, tensor in head.items()}
    for name in [name for name in ours if re.fullmatch(r"decoder\.self_attention\.\d+\.q_\w+", name)]:
        projections = [ours.pop(name.replace(".q_", f".{letter}_")) for letter in "qkv"]
        ours[name.replace(".q_", ".in_")] = torch.cat(projections)
    return {**_backbone(backbone), **ours}


def _hf_key(name: str) -> str:
    name = rename(name, _HUGGING_FACE)
    prefix = re.match(r"pixel_decoder\.layers\.\d+\.", name)
    return name if prefix is None else prefix[0] + rename(name[prefix.end() :], _DEFORMABLE)


def _resnet_key(name: str) -> str | None:
    """Our key for a ResNet tensor of detectron2 or Hugging Face."""
    if stem := _HF_STEM.fullmatch(name):
        return f"stem.conv1.{'norm.' * (stem[1] == 'normalization')}{stem[2]}"
    if block := _HF_BLOCK.fullmatch(name):
        layer = "shortcut" if block[3] == "shortcut" else f"conv{int(block[4]) + 1}"
        return f"res{int(block[1]) + 2}.{block[2]}.{layer}.{'norm.' * (block[5] == 'normalization')}{block[6]}"
    return resnet_key(name)
