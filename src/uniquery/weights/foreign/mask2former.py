"""The original's and Hugging Face's names of Mask2Former, and ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from uniquery.backbones.key_maps import HF_RESNET, HF_SWIN, SWIN, resnet_key, split_qkv, swin_key, swin_tensors
from uniquery.weights.foreign.renaming import KeyPairs, rename_keys

_HEAD = "sem_seg_head.predictor."
_PIXEL_DECODER = "sem_seg_head.pixel_decoder."
_ORIGINAL: KeyPairs = (
    *(
        (f"{_PIXEL_DECODER}transformer.encoder.layers.{{}}.{theirs}.", f"pixel_decoder.layers.{{}}.{ours}.")
        for theirs, ours in (
            ("self_attn.sampling_offsets", "attention.offsets"),
            ("self_attn.attention_weights", "attention.attention"),
            ("self_attn.value_proj", "attention.values"),
            ("self_attn.output_proj", "attention.output"),
            ("norm1", "norm"),
            ("linear1", "feed_forward.linear1"),
            ("linear2", "feed_forward.linear2"),
            ("norm2", "feed_forward.norm"),
        )
    ),
    (_PIXEL_DECODER + "input_proj.{}.0.", "pixel_decoder.projections.{}."),
    (_PIXEL_DECODER + "input_proj.{}.1.", "pixel_decoder.norms.{}."),
    (_PIXEL_DECODER + "transformer.level_embed", "pixel_decoder.level_embedding"),
    (_PIXEL_DECODER + "mask_features.", "pixel_decoder.embed."),
    (_PIXEL_DECODER + "adapter_1.norm.", "pixel_decoder.lateral_norm."),
    (_PIXEL_DECODER + "adapter_1.", "pixel_decoder.lateral."),
    (_PIXEL_DECODER + "layer_1.norm.", "pixel_decoder.merge_norm."),
    (_PIXEL_DECODER + "layer_1.", "pixel_decoder.merge."),
    *(
        (f"{_HEAD}transformer_{kind}_attention_layers.{{}}.{theirs}", f"decoder.{kind}_attention.{{}}.{ours}")
        for kind, attention in (("self", "self_attn"), ("cross", "multihead_attn"))
        for theirs, ours in (
            (f"{attention}.in_proj_", "in_"),
            (f"{attention}.out_proj.", "output."),
            ("norm.", "norm."),
        )
    ),
    (_HEAD + "transformer_ffn_layers.", "decoder.feed_forward."),
    (_HEAD + "decoder_norm.", "decoder.norm."),
    (_HEAD + "query_feat.weight", "decoder.query_features"),
    (_HEAD + "static_query.weight", "decoder.query_features"),  # in its first checkpoints
    (_HEAD + "query_embed.weight", "decoder.query_positions"),
    (_HEAD + "level_embed.weight", "decoder.level_embedding"),
    (_HEAD + "class_embed.", "decoder.classes."),
    (_HEAD + "mask_embed.layers.", "decoder.masks."),
)
_HF_PIXEL_DECODER = "model.pixel_level_module.decoder."
_HF_DECODER = "model.transformer_module."
_HUGGING_FACE: KeyPairs = (
    *(
        (f"{_HF_PIXEL_DECODER}encoder.layers.{{}}.{theirs}.", f"pixel_decoder.layers.{{}}.{ours}.")
        for theirs, ours in (
            ("self_attn.sampling_offsets", "attention.offsets"),
            ("self_attn.attention_weights", "attention.attention"),
            ("self_attn.value_proj", "attention.values"),
            ("self_attn.output_proj", "attention.output"),
            ("self_attn_layer_norm", "norm"),
            ("fc1", "feed_forward.linear1"),
            ("fc2", "feed_forward.linear2"),
            ("final_layer_norm", "feed_forward.norm"),
        )
    ),
    (_HF_PIXEL_DECODER + "input_projections.{}.0.", "pixel_decoder.projections.{}."),
    (_HF_PIXEL_DECODER + "input_projections.{}.1.", "pixel_decoder.norms.{}."),
    (_HF_PIXEL_DECODER + "level_embed", "pixel_decoder.level_embedding"),
    (_HF_PIXEL_DECODER + "mask_projection.", "pixel_decoder.embed."),
    (_HF_PIXEL_DECODER + "adapter_1.0.", "pixel_decoder.lateral."),
    (_HF_PIXEL_DECODER + "adapter_1.1.", "pixel_decoder.lateral_norm."),
    (_HF_PIXEL_DECODER + "layer_1.0.", "pixel_decoder.merge."),
    (_HF_PIXEL_DECODER + "layer_1.1.", "pixel_decoder.merge_norm."),
    *(
        (f"{_HF_DECODER}decoder.layers.{{}}.{theirs}", f"decoder.{ours}")
        for theirs, ours in (
            ("self_attn.out_proj.", "self_attention.{}.output."),
            *((f"self_attn.{part}_proj.", f"self_attention.{{}}.{part}_") for part in "qkv"),
            ("self_attn_layer_norm.", "self_attention.{}.norm."),
            ("cross_attn.in_proj_", "cross_attention.{}.in_"),
            ("cross_attn.out_proj.", "cross_attention.{}.output."),
            ("cross_attn_layer_norm.", "cross_attention.{}.norm."),
            ("fc1.", "feed_forward.{}.linear1."),
            ("fc2.", "feed_forward.{}.linear2."),
            ("final_layer_norm.", "feed_forward.{}.norm."),
        )
    ),
    (_HF_DECODER + "decoder.layernorm.", "decoder.norm."),
    (_HF_DECODER + "decoder.mask_predictor.mask_embedder.{}.0.", "decoder.masks.{}."),
    (_HF_DECODER + "queries_features.weight", "decoder.query_features"),
    (_HF_DECODER + "queries_embedder.weight", "decoder.query_positions"),
    (_HF_DECODER + "level_embed.weight", "decoder.level_embedding"),
    ("class_predictor.", "decoder.classes."),
)
_HF_BACKBONE = "model.pixel_level_module.encoder."
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
    backbone, head = split_backbone(foreign, "backbone.")
    return {**backbone_names(backbone), **rename_keys(head, _ORIGINAL)}


def original_mask2former_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `mask2former_names`, without the buffers, which the original fills from its own configuration.

    >>> list(original_mask2former_names({"backbone.stage1.norm.bias": torch.zeros(1)}))
    ['backbone.norm0.bias']
    """
    backbone, head = split_backbone(ours, "backbone.")
    backbone = rename_keys(backbone, SWIN, to_ours=False)  # a ResNet has the same names
    return {**add_prefix(backbone, "backbone."), **rename_keys(head, _ORIGINAL, to_ours=False)}


def is_hf_mask2former(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is Hugging Face's Mask2Former."""
    return any(name.startswith("model.transformer_module.decoder.") for name in foreign)


def hf_mask2former_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of Hugging Face's `Mask2FormerForUniversalSegmentation` with our keys, without other buffers.

    The separate query, key and value projections of its self-attention become one, as ours are.

    >>> list(hf_mask2former_names({"class_predictor.bias": torch.zeros(1), "criterion.empty_weight": torch.zeros(2)}))
    ['decoder.classes.bias']
    """
    backbone, head = split_backbone(foreign, _HF_BACKBONE)
    ours = rename_keys(head, _HUGGING_FACE)
    for name in [name for name in ours if re.fullmatch(r"decoder\.self_attention\.\d+\.q_\w+", name)]:
        projections = [ours.pop(name.replace(".q_", f".{letter}_")) for letter in "qkv"]
        ours[name.replace(".q_", ".in_")] = torch.cat(projections)
    return {**backbone_names(backbone), **ours}


def original_hf_mask2former_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `hf_mask2former_names`, with the names that Hugging Face saves.

    >>> list(original_hf_mask2former_names({"decoder.self_attention.0.in_bias": torch.zeros(3)}))[0]
    'model.transformer_module.decoder.layers.0.self_attn.q_proj.bias'
    """
    backbone, head = split_backbone(ours, "backbone.")
    backbone = {part: value for name, tensor in backbone.items() for part, value in split_qkv(name, tensor).items()}
    for name in [name for name in head if re.fullmatch(r"decoder\.self_attention\.\d+\.in_\w+", name)]:
        for letter, part in zip("qkv", head.pop(name).chunk(3), strict=True):
            head[name.replace(".in_", f".{letter}_")] = part
    backbone = rename_keys(backbone, (*HF_SWIN, *HF_RESNET), to_ours=False)
    return {**add_prefix(backbone, _HF_BACKBONE), **rename_keys(head, _HUGGING_FACE, to_ours=False)}


def split_backbone(state: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the backbone, without the prefix, and the others; buffers of no use are left out."""
    backbone = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    return backbone, {n: tensor for n, tensor in state.items() if not n.startswith((prefix, *_NOT_WEIGHTS))}


def add_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A state dict with the prefix before each key."""
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def backbone_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a published ResNet or Swin, which have no prefix, with our keys."""
    is_swin = any("relative_position_bias_table" in name for name in foreign)
    key, tensors = (swin_key, swin_tensors(foreign)) if is_swin else (resnet_key, foreign)
    named = ((key(name), tensor) for name, tensor in tensors.items() if not name.endswith("num_batches_tracked"))
    return add_prefix({name: tensor for name, tensor in named if name is not None}, "backbone.")
