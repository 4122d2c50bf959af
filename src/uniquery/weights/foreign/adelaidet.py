"""From the state dict keys of AdelaiDet's checkpoints to ours."""

from collections.abc import Mapping

from torch import Tensor

from uniquery.weights.foreign.renaming import Rules, rename

_PYRAMID: Rules = (
    (r"backbone\.bottom_up\.", "backbone."),
    (r"backbone\.fpn_lateral(\d)\.", lambda m: f"fpn.laterals.{2 ** int(m[1])}."),
    (r"backbone\.fpn_output(\d)\.", lambda m: f"fpn.outputs.{2 ** int(m[1])}."),
    (r"backbone\.top_block\.p(\d)\.", lambda m: f"fpn.extras.{int(m[1]) - 6}."),
)
_CONDINST: Rules = (
    *_PYRAMID,
    (r"proposal_generator\.fcos_head\.cls_tower\.", "head.class_tower."),
    (r"proposal_generator\.fcos_head\.bbox_tower\.", "head.box_tower."),
    (r"proposal_generator\.fcos_head\.cls_logits\.", "head.classes."),
    (r"proposal_generator\.fcos_head\.bbox_pred\.", "head.distances."),
    (r"proposal_generator\.fcos_head\.ctrness\.", "head.centerness."),
    (r"proposal_generator\.fcos_head\.scales\.(\d+)\.scale", r"head.scales.\1"),
    (r"controller\.", "head.controller."),
    (r"mask_branch\.", "mask_branch."),
)
_SOLOV2: Rules = (
    *_PYRAMID,
    (r"ins_head\.cate_tower\.", "head.class_tower."),
    (r"ins_head\.kernel_tower\.", "head.kernel_tower."),
    (r"ins_head\.cate_pred\.", "head.classes."),
    (r"ins_head\.kernel_pred\.", "head.kernels."),
    (r"mask_head\.convs_all_levels\.0\.conv0\.", "mask_head.refine.0."),
    # In the coarser levels, each block is followed by an upsampling.
    (r"mask_head\.convs_all_levels\.(\d)\.conv(\d)\.", lambda m: f"mask_head.refine.{m[1]}.{2 * int(m[2])}."),
    (r"mask_head\.conv_pred\.", "mask_head.project."),
)
_PIXEL_FORMAT = ("pixel_mean", "pixel_std")


def condinst_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdelaiDet's CondInst state dict with our keys; buffers that are not weights are dropped.

    >>> import torch
    >>> list(condinst_names({"backbone.fpn_lateral3.bias": torch.zeros(1), "mask_head._iter": torch.zeros(1)}))
    ['fpn.laterals.8.bias']
    """
    dropped = ("mask_head.", "proposal_generator.fcos_outputs.", *_PIXEL_FORMAT)
    return {rename(name, _CONDINST): tensor for name, tensor in foreign.items() if not name.startswith(dropped)}


def solov2_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdelaiDet's SOLOv2 state dict with our keys.

    >>> import torch
    >>> list(solov2_names({"mask_head.convs_all_levels.2.conv1.0.weight": torch.zeros(1)}))
    ['mask_head.refine.2.2.0.weight']
    """
    return {rename(name, _SOLOV2): tensor for name, tensor in foreign.items() if not name.startswith(_PIXEL_FORMAT)}


def is_condinst(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is AdelaiDet's CondInst."""
    return any(name.startswith("proposal_generator.fcos_head.") for name in foreign) and "controller.weight" in foreign


def is_solov2(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is AdelaiDet's SOLOv2."""
    return "ins_head.kernel_pred.weight" in foreign and "mask_head.conv_pred.0.weight" in foreign
