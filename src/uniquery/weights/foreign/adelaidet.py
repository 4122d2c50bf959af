"""AdelaiDet's names of CondInst and SOLOv2, and ours."""

from collections.abc import Mapping

from torch import Tensor

from uniquery.weights.foreign.renaming import KeyPairs, rename_keys

PYRAMID: KeyPairs = (
    *((f"backbone.fpn_lateral{n}.", f"fpn.laterals.{2**n}.") for n in (2, 3, 4, 5)),
    *((f"backbone.fpn_output{n}.", f"fpn.outputs.{2**n}.") for n in (2, 3, 4, 5)),
    *((f"backbone.top_block.p{n}.", f"fpn.extras.{n - 6}.") for n in (6, 7)),
    ("backbone.bottom_up.", "backbone."),
)
GRID_MASK_HEAD: KeyPairs = (
    ("mask_head.convs_all_levels.0.conv0.", "mask_head.refine.0."),
    *(  # in the coarser levels, each block is followed by an upsampling
        (f"mask_head.convs_all_levels.{level}.conv{i}.", f"mask_head.refine.{level}.{2 * i}.")
        for level in (1, 2, 3)
        for i in range(level)
    ),
    ("mask_head.conv_pred.", "mask_head.project."),
)
_CONDINST: KeyPairs = (
    *PYRAMID,
    ("proposal_generator.fcos_head.cls_tower.", "head.class_tower."),
    ("proposal_generator.fcos_head.bbox_tower.", "head.box_tower."),
    ("proposal_generator.fcos_head.cls_logits.", "head.classes."),
    ("proposal_generator.fcos_head.bbox_pred.", "head.distances."),
    ("proposal_generator.fcos_head.ctrness.", "head.centerness."),
    ("proposal_generator.fcos_head.scales.{}.scale", "head.scales.{}"),
    ("controller.", "head.controller."),
)
_SOLOV2: KeyPairs = (
    *PYRAMID,
    ("ins_head.cate_tower.", "head.class_tower."),
    ("ins_head.kernel_tower.", "head.kernel_tower."),
    ("ins_head.cate_pred.", "head.classes."),
    ("ins_head.kernel_pred.", "head.kernels."),
    *GRID_MASK_HEAD,
)
_PIXEL_FORMAT = ("pixel_mean", "pixel_std")


def is_condinst(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is AdelaiDet's CondInst."""
    return any(name.startswith("proposal_generator.fcos_head.") for name in foreign) and "controller.weight" in foreign


def condinst_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdelaiDet's CondInst state dict with our keys; buffers that are not weights are dropped.

    >>> import torch
    >>> list(condinst_names({"backbone.fpn_lateral3.bias": torch.zeros(1), "mask_head._iter": torch.zeros(1)}))
    ['fpn.laterals.8.bias']
    """
    dropped = ("mask_head.", "proposal_generator.fcos_outputs.", *_PIXEL_FORMAT)
    return rename_keys({name: t for name, t in foreign.items() if not name.startswith(dropped)}, _CONDINST)


def original_condinst_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `condinst_names`, without the buffers, which AdelaiDet fills from its own configuration."""
    return rename_keys(ours, _CONDINST, to_ours=False)


def is_solov2(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is AdelaiDet's SOLOv2."""
    return "ins_head.kernel_pred.weight" in foreign and "mask_head.conv_pred.0.weight" in foreign


def solov2_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdelaiDet's SOLOv2 state dict with our keys.

    >>> import torch
    >>> list(solov2_names({"mask_head.convs_all_levels.2.conv1.0.weight": torch.zeros(1)}))
    ['mask_head.refine.2.2.0.weight']
    """
    return rename_keys({name: t for name, t in foreign.items() if not name.startswith(_PIXEL_FORMAT)}, _SOLOV2)


def original_solov2_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `solov2_names`."""
    return rename_keys(ours, _SOLOV2, to_ours=False)
