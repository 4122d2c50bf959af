"""From mmdetection 3's names of CondInst, SOLOv2 and Mask2Former to ours.

The three are the originals' functions with other names: the same order of dynamic parameters, of classes and of
coordinates, the same position encodings, no background class except Mask2Former's last. Two things differ in content:
the channels of Swin's patch merging are in the order of `nn.Unfold`, and pixels are RGB of unit variance, as for all
weights of torchvision, where AdelaiDet's are BGR (`backbone.caffe`). Settings that leave no trace in the weights are
those of mmdetection's own configurations: `norm_on_bbox`, `centerness_on_reg` and `relu_before_extra_convs` are on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from uniquery.backbones.key_maps import SWIN, TORCHVISION_RESNET
from uniquery.errors import CheckpointError
from uniquery.weights.foreign.renaming import KeyPairs, rename_keys, rename_prefix

_MASK_FEATURES = "mask_head.mask_feature_head."
_SWIN_BLOCK: KeyPairs = (
    ("patch_embed.projection.", "patch_embed.proj."),
    *(
        (f"stages.{i}.blocks.{{}}.{theirs}", f"layers.{i}.blocks.{{}}.{original}")
        for i in range(4)
        for theirs, original in (
            ("attn.w_msa.", "attn."),
            ("ffn.layers.0.0.", "mlp.fc1."),
            ("ffn.layers.1.", "mlp.fc2."),
            ("norm", "norm"),
        )
    ),
    *((f"stages.{i}.downsample.", f"layers.{i}.downsample.") for i in range(3)),
)
_HEAD = "panoptic_head."
_PIXEL_DECODER = _HEAD + "pixel_decoder."
_MASK2FORMER: KeyPairs = (
    *(
        (f"{_PIXEL_DECODER}encoder.layers.{{}}.{theirs}.", f"pixel_decoder.layers.{{}}.{ours}.")
        for theirs, ours in (
            ("self_attn.sampling_offsets", "attention.offsets"),
            ("self_attn.attention_weights", "attention.attention"),
            ("self_attn.value_proj", "attention.values"),
            ("self_attn.output_proj", "attention.output"),
            ("norms.0", "norm"),
            ("ffn.layers.0.0", "feed_forward.linear1"),
            ("ffn.layers.1", "feed_forward.linear2"),
            ("norms.1", "feed_forward.norm"),
        )
    ),
    (_PIXEL_DECODER + "input_convs.{}.conv.", "pixel_decoder.projections.{}."),
    (_PIXEL_DECODER + "input_convs.{}.gn.", "pixel_decoder.norms.{}."),
    (_PIXEL_DECODER + "level_encoding.weight", "pixel_decoder.level_embedding"),
    (_PIXEL_DECODER + "lateral_convs.0.conv.", "pixel_decoder.lateral."),
    (_PIXEL_DECODER + "lateral_convs.0.gn.", "pixel_decoder.lateral_norm."),
    (_PIXEL_DECODER + "output_convs.0.conv.", "pixel_decoder.merge."),
    (_PIXEL_DECODER + "output_convs.0.gn.", "pixel_decoder.merge_norm."),
    (_PIXEL_DECODER + "mask_feature.", "pixel_decoder.embed."),
    *(
        (f"{_HEAD}transformer_decoder.layers.{{}}.{theirs}", f"decoder.{ours}")
        for theirs, ours in (
            *(
                (f"{kind}_attn.attn.{part}", f"{kind}_attention.{{}}.{name}")
                for kind in ("self", "cross")
                for part, name in (("in_proj_", "in_"), ("out_proj.", "output."))
            ),
            ("norms.0.", "cross_attention.{}.norm."),  # cross-attention comes first
            ("norms.1.", "self_attention.{}.norm."),
            ("ffn.layers.0.0.", "feed_forward.{}.linear1."),
            ("ffn.layers.1.", "feed_forward.{}.linear2."),
            ("norms.2.", "feed_forward.{}.norm."),
        )
    ),
    (_HEAD + "transformer_decoder.post_norm.", "decoder.norm."),
    (_HEAD + "query_feat.weight", "decoder.query_features"),
    (_HEAD + "query_embed.weight", "decoder.query_positions"),
    (_HEAD + "level_embed.weight", "decoder.level_embedding"),
    (_HEAD + "cls_embed.", "decoder.classes."),
    *((f"{_HEAD}mask_embed.{2 * i}.", f"decoder.masks.{i}.") for i in range(3)),  # a ReLU after each
)


def is_mmdet_condinst(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is mmdetection's CondInst."""
    return "bbox_head.controller.weight" in foreign


def mmdet_condinst_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of mmdetection's CondInst with our keys.

    Raises:
        CheckpointError: its head has deformable convolutions.

    >>> import torch
    >>> list(mmdet_condinst_names({"bbox_head.reg_convs.1.gn.weight": torch.zeros(1)}))
    ['head.box_tower.4.weight']
    """
    _refuse_deformable(foreign, "CondInst")
    convs = _count(_MASK_FEATURES + "conv_branch", foreign)
    pairs: KeyPairs = (
        *_pyramid(first_stride=8),
        *_tower("bbox_head.cls_convs", "head.class_tower", foreign),
        *_tower("bbox_head.reg_convs", "head.box_tower", foreign),
        ("bbox_head.conv_cls.", "head.classes."),
        ("bbox_head.conv_reg.", "head.distances."),
        ("bbox_head.conv_centerness.", "head.centerness."),
        ("bbox_head.scales.{}.scale", "head.scales.{}"),
        ("bbox_head.controller.", "head.controller."),
        *(
            (f"{_MASK_FEATURES}{theirs}.{part}.", f"mask_branch.{ours}.{number}.")
            for theirs, ours in (
                *((f"convs_all_levels.{i}.conv{i}", f"refine.{i}") for i in range(3)),
                ("conv_branch.{}", "tower.{}"),
            )
            for part, number in (("conv", 0), ("bn", 1), ("gn", 1))
        ),
        (_MASK_FEATURES + "conv_pred.", f"mask_branch.tower.{convs}."),
    )
    head = rename_keys(_without_backbone(foreign), pairs)
    head |= {
        name: scale.reshape(1) for name, scale in head.items() if name.startswith("head.scales.")
    }  # a number there
    return {**_backbone(foreign), **head}


def is_mmdet_solov2(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is mmdetection's SOLOv2."""
    return "mask_head.conv_kernel.weight" in foreign


def mmdet_solov2_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of mmdetection's SOLOv2 with our keys.

    Raises:
        CheckpointError: its head has deformable convolutions, as in the variants named "dcn" and "light".

    >>> import torch
    >>> list(mmdet_solov2_names({_MASK_FEATURES + "convs_all_levels.2.conv1.conv.weight": torch.zeros(1)}))
    ['mask_head.refine.2.2.0.weight']
    """
    _refuse_deformable(foreign, "SOLOv2")
    pairs: KeyPairs = (
        *_pyramid(first_stride=4),
        *_tower("mask_head.cls_convs", "head.class_tower", foreign),
        *_tower("mask_head.kernel_convs", "head.kernel_tower", foreign),
        ("mask_head.conv_cls.", "head.classes."),
        ("mask_head.conv_kernel.", "head.kernels."),
        *(
            (f"{_MASK_FEATURES}{theirs}.{part}.", f"mask_head.{ours}.{number}.")
            for theirs, ours in (
                ("convs_all_levels.0.conv0", "refine.0"),
                *(  # in the coarser levels, each block is followed by an upsampling
                    (f"convs_all_levels.{level}.conv{i}", f"refine.{level}.{2 * i}")
                    for level in (1, 2, 3)
                    for i in range(level)
                ),
                ("conv_pred", "project"),
            )
            for part, number in (("conv", 0), ("gn", 1))
        ),
    )
    return {**_backbone(foreign), **rename_keys(_without_backbone(foreign), pairs)}


def is_mmdet_mask2former(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is mmdetection's Mask2Former."""
    return _HEAD + "query_feat.weight" in foreign and _PIXEL_DECODER + "mask_feature.weight" in foreign


def mmdet_mask2former_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of mmdetection's Mask2Former, with a ResNet or a Swin, with our keys.

    Raises:
        CheckpointError: it is of mmdetection 2, or projects the levels between its decoders.

    >>> import torch
    >>> list(mmdet_mask2former_names({"panoptic_head.mask_embed.4.bias": torch.zeros(1)}))
    ['decoder.masks.2.bias']
    """
    if any(".attentions." in name for name in foreign):
        raise CheckpointError("This Mask2Former has the names of mmdetection 2; use a checkpoint of mmdetection 3.")
    if any(name.startswith(_HEAD + "decoder_input_projs.") for name in foreign):
        raise CheckpointError(
            "This Mask2Former of mmdetection projects the levels between its two decoders, which the original and ours "
            "do not; it cannot be converted."
        )
    return {**_backbone(foreign), **rename_keys(_without_backbone(foreign), _MASK2FORMER)}


def _refuse_deformable(foreign: Mapping[str, Tensor], model: str) -> None:
    if any(".conv.conv_offset." in name for name in foreign):
        raise CheckpointError(
            f"This {model} of mmdetection has deformable convolutions in its head, which ours does not; it cannot be "
            "converted."
        )


def _pyramid(first_stride: int) -> KeyPairs:
    """Of the FPN, which numbers its convolutions from the finest level; those of extra levels come last."""
    strides = [stride for stride in (4, 8, 16, 32) if stride >= first_stride]
    return (
        *((f"neck.lateral_convs.{i}.conv.", f"fpn.laterals.{stride}.") for i, stride in enumerate(strides)),
        *((f"neck.fpn_convs.{i}.conv.", f"fpn.outputs.{stride}.") for i, stride in enumerate(strides)),
        *((f"neck.fpn_convs.{len(strides) + i}.conv.", f"fpn.extras.{i}.") for i in range(2)),
    )


def _tower(theirs: str, ours: str, foreign: Mapping[str, Tensor]) -> KeyPairs:
    """Of a tower: they number blocks, we number the layers convolution, normalization and ReLU."""
    return tuple(
        (f"{theirs}.{i}.{part}.", f"{ours}.{3 * i + number}.")
        for i in range(_count(theirs, foreign))
        for part, number in (("conv", 0), ("gn", 1))
    )


def _count(prefix: str, foreign: Mapping[str, Tensor]) -> int:
    """How many numbered modules there are under a prefix."""
    matches = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in foreign)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def _without_backbone(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in foreign.items() if not name.startswith(("backbone.", "data_preprocessor."))
    }


def _backbone(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the backbone with our keys, without indices and counts of batches."""
    dropped = ("relative_position_index", "num_batches_tracked")
    ours = {}
    for name, tensor in foreign.items():
        if name.startswith("backbone.") and not name.endswith(dropped):
            key = name.removeprefix("backbone.")
            original = rename_prefix(key, _SWIN_BLOCK)
            tensor = _merging_order(tensor) if ".downsample." in original and original != key else tensor
            ours[f"backbone.{rename_prefix(original, (*SWIN, *TORCHVISION_RESNET))}"] = tensor
    return ours


def _merging_order(tensor: Tensor) -> Tensor:
    """(..., 4C) of patch merging, from the order of `nn.Unfold` (channel, row, column) to (column, row, channel)."""
    cells: Tensor = tensor.unflatten(-1, (-1, 2, 2))
    return cells.transpose(-1, -3).flatten(-3)
