"""Names of AdelaiDet's checkpoints, in ours."""

import re
from collections.abc import Mapping

from torch import Tensor

_CONDINST = (
    (r"backbone\.bottom_up\.", "backbone."),
    (r"backbone\.fpn_lateral(\d)\.", lambda m: f"fpn.laterals.{2 ** int(m[1])}."),
    (r"backbone\.fpn_output(\d)\.", lambda m: f"fpn.outputs.{2 ** int(m[1])}."),
    (r"backbone\.top_block\.p(\d)\.", lambda m: f"fpn.extras.{int(m[1]) - 6}."),
    (r"proposal_generator\.fcos_head\.cls_tower\.", "head.class_tower."),
    (r"proposal_generator\.fcos_head\.bbox_tower\.", "head.box_tower."),
    (r"proposal_generator\.fcos_head\.cls_logits\.", "head.classes."),
    (r"proposal_generator\.fcos_head\.bbox_pred\.", "head.distances."),
    (r"proposal_generator\.fcos_head\.ctrness\.", "head.centerness."),
    (r"proposal_generator\.fcos_head\.scales\.(\d+)\.scale", r"head.scales.\1"),
    (r"controller\.", "head.controller."),
    (r"mask_branch\.", "mask_branch."),
)
_NO_WEIGHTS = ("mask_head.", "proposal_generator.fcos_outputs.", "pixel_mean", "pixel_std")


def condinst_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdelaiDet's CondInst state dict under our names; what carries no weights there is dropped.

    >>> import torch
    >>> list(condinst_names({"backbone.fpn_lateral3.bias": torch.zeros(1), "mask_head._iter": torch.zeros(1)}))
    ['fpn.laterals.8.bias']
    """
    return {_ours(name): tensor for name, tensor in foreign.items() if not name.startswith(_NO_WEIGHTS)}


def is_condinst(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict carries AdelaiDet's names of CondInst."""
    return any(name.startswith("proposal_generator.fcos_head.") for name in foreign) and "controller.weight" in foreign


def _ours(name: str) -> str:
    for pattern, replacement in _CONDINST:
        renamed, count = re.subn(rf"^{pattern}", replacement, name)
        if count:
            return renamed
    return name
