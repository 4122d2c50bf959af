"""From the state dict keys of SOLQ's checkpoints to ours, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from uniquery.weights.foreign.renaming import KeyPairs, rename_prefix

_ATTENTION = (
    ("sampling_offsets.", "offsets."),
    ("attention_weights.", "attention."),
    ("value_proj.", "values."),
    ("output_proj.", "output."),
)
_ENCODER = "transformer.encoder.layers.{}.", "encoder.layers.{}."
_DECODER = "transformer.decoder.layers.{}.", "decoder.layers.{}."
_LAYERS: KeyPairs = (
    *((f"{_ENCODER[0]}self_attn.{theirs}", f"{_ENCODER[1]}attention.{ours}") for theirs, ours in _ATTENTION),
    *((f"{_DECODER[0]}cross_attn.{theirs}", f"{_DECODER[1]}cross_attention.{ours}") for theirs, ours in _ATTENTION),
    (f"{_ENCODER[0]}norm1.", f"{_ENCODER[1]}norm."),
    (f"{_ENCODER[0]}linear", f"{_ENCODER[1]}feed_forward.linear"),
    (f"{_ENCODER[0]}norm2.", f"{_ENCODER[1]}feed_forward.norm."),
    (f"{_DECODER[0]}self_attn.in_proj_", f"{_DECODER[1]}self_attention.in_"),
    (f"{_DECODER[0]}self_attn.out_proj.", f"{_DECODER[1]}self_attention.output."),
    (f"{_DECODER[0]}norm2.", f"{_DECODER[1]}self_attention.norm."),
    (f"{_DECODER[0]}norm1.", f"{_DECODER[1]}norm."),
    (f"{_DECODER[0]}linear", f"{_DECODER[1]}feed_forward.linear"),
    (f"{_DECODER[0]}norm3.", f"{_DECODER[1]}feed_forward.norm."),
)
_BODY = "backbone.0.body."
# A normalization comes before the convolution it belongs to, whose prefix of ours is a part of its own.
_RESNET: KeyPairs = (
    (f"{_BODY}bn1.", "backbone.stem.conv1.norm."),
    (f"{_BODY}conv1.", "backbone.stem.conv1."),
    *(
        (f"{_BODY}layer{stage}.{{}}.{theirs}.", f"backbone.res{stage + 1}.{{}}.{ours}.")
        for stage in range(1, 5)
        for theirs, ours in (
            *((f"bn{i}", f"conv{i}.norm") for i in (1, 2, 3)),
            *((f"conv{i}", f"conv{i}") for i in (1, 2, 3)),
            ("downsample.1", "shortcut.norm"),
            ("downsample.0", "shortcut"),
        )
    ),
)
# The original merges patches at the end of a stage, we at the beginning of the next.
_SWIN: KeyPairs = (
    (f"{_BODY}patch_embed.", "backbone.stem."),
    *((f"{_BODY}layers.{i}.blocks.", f"backbone.stage{i + 1}.blocks.") for i in range(4)),
    *((f"{_BODY}layers.{i}.downsample.", f"backbone.stage{i + 2}.merge.") for i in range(3)),
    *((f"{_BODY}norm{i}.", f"backbone.stage{i + 1}.norm.") for i in range(4)),
)
_PAIRS: KeyPairs = (
    *_LAYERS,
    ("transformer.level_embed", "encoder.level_embedding"),
    ("transformer.reference_points.", "decoder.reference_points."),
    ("input_proj.{}.0.", "encoder.projections.{}."),
    ("input_proj.{}.1.", "encoder.norms.{}."),
    ("query_embed.weight", "decoder.queries"),
    ("class_embed.{}.", "decoder.classes.{}."),
    ("bbox_embed.{}.layers.", "decoder.boxes.{}."),
    ("vector_embed.0.layers.", "vectors."),
    *_RESNET,
    *_SWIN,
)
_BOX_ALIAS = "transformer.decoder.bbox_embed."  # the same modules as bbox_embed
_VECTOR_ALIAS = re.compile(r"vector_embed\.[1-9]\d*\.")  # the same module as vector_embed.0
_NOT_WEIGHTS = ("relative_position_index", "attn_mask", "num_batches_tracked", "total_ops", "total_params")
_UNUSED_NORM = "backbone.stage1.norm."  # of a Swin's first output, which the original does not normalize

_COCO_OUTPUTS = 91  # classes of the original are COCO's category ids, of which these are not used
_COCO_GAPS = (0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_COCO_IDS = tuple(i for i in range(_COCO_OUTPUTS) if i not in _COCO_GAPS)
_NEVER = -20.0  # class logit of an id that is not used


def is_solq(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is the original SOLQ's."""
    return "transformer.level_embed" in foreign and "vector_embed.0.layers.0.weight" in foreign


def solq_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The original's state dict, with a ResNet or a Swin, with our keys and contiguous classes.

    The 91 classes of COCO's category ids become the 80 that exist, in their order; other numbers of classes stay.
    Each tensor that the original lists under several names is taken once.

    >>> import torch
    >>> names = "class_embed.0.bias", "transformer.decoder.bbox_embed.0.layers.0.bias", "query_embed.weight"
    >>> {name: len(tensor) for name, tensor in solq_names(dict.fromkeys(names, torch.zeros(91))).items()}
    {'decoder.classes.0.bias': 80, 'decoder.queries': 91}
    """
    ours = solq_keys(foreign)
    return {name: _contiguous(tensor) if _is_class(name) else tensor for name, tensor in ours.items()}


def solq_keys(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `solq_names`, with the classes as they are."""
    weights = {name: tensor for name, tensor in foreign.items() if not _is_dropped(name)}
    ours = {rename_prefix(name, _PAIRS): tensor for name, tensor in weights.items()}
    if (second := ours.get("backbone.stage2.norm.weight")) is not None and f"{_UNUSED_NORM}weight" not in ours:
        half = len(second) // 2
        ours |= {f"{_UNUSED_NORM}weight": second.new_ones(half), f"{_UNUSED_NORM}bias": second.new_zeros(half)}
    return ours


def _is_dropped(name: str) -> bool:
    return name.startswith(_BOX_ALIAS) or bool(_VECTOR_ALIAS.match(name)) or name.endswith(_NOT_WEIGHTS)


def original_solq_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict of a SOLQ with the original's keys, the inverse of `solq_names`.

    80 classes are taken to be COCO's and become the original's 91; an id that is not used is never predicted.

    >>> import torch
    >>> sorted(original_solq_names({"decoder.boxes.0.0.bias": torch.zeros(1)}))
    ['bbox_embed.0.layers.0.bias', 'transformer.decoder.bbox_embed.0.layers.0.bias']
    """
    layers = len({name.split(".")[2] for name in ours if name.startswith("decoder.layers.")})
    theirs: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        if name.startswith(_UNUSED_NORM) or name.endswith("num_batches_tracked"):
            continue
        key = rename_prefix(name, _PAIRS, to_ours=False)
        theirs[key] = _category_ids(tensor) if _is_class(name) else tensor
        if key.startswith("bbox_embed."):
            theirs[f"transformer.decoder.{key}"] = tensor
        if key.startswith("vector_embed."):
            theirs |= {key.replace(".0.", f".{i}.", 1): tensor for i in range(1, layers)}
    return theirs


def _is_class(name: str) -> bool:
    return name.startswith("decoder.classes.")


def _contiguous(tensor: Tensor) -> Tensor:
    """The rows of a class predictor for the ids that are used."""
    return tensor[list(_COCO_IDS)] if len(tensor) == _COCO_OUTPUTS else tensor


def _category_ids(tensor: Tensor) -> Tensor:
    """The inverse of `_contiguous`: weights of unused ids are 0, their biases so low that they are never predicted."""
    if len(tensor) != len(_COCO_IDS):
        return tensor
    rows = tensor.new_full((_COCO_OUTPUTS, *tensor.shape[1:]), _NEVER if tensor.ndim == 1 else 0.0)
    rows[list(_COCO_IDS)] = tensor
    return rows
