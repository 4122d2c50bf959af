"""From the state dict keys of SparseInst's checkpoints to ours, and back."""

from collections.abc import Mapping

from torch import Tensor

from uniquery.weights.foreign.renaming import KeyPairs, rename_prefix

_KEYS: KeyPairs = (
    *((f"encoder.fpn_laterals.{i}.", f"encoder.pyramid.laterals.{32 >> i}.") for i in range(3)),
    *((f"encoder.fpn_outputs.{i}.", f"encoder.pyramid.outputs.{32 >> i}.") for i in range(3)),
    ("encoder.ppm.stages.{}.1.", "encoder.pyramid.context.levels.{}."),
    ("encoder.ppm.bottleneck.", "encoder.pyramid.context.merge."),
    ("decoder.inst_branch.inst_convs.", "instance_branch.convs."),
    ("decoder.inst_branch.iam_conv.", "instance_branch.activation."),
    ("decoder.inst_branch.fc.", "instance_branch.merge."),
    ("decoder.inst_branch.cls_score.", "instance_branch.classes."),
    ("decoder.inst_branch.mask_kernel.", "instance_branch.kernels."),
    ("decoder.inst_branch.objectness.", "instance_branch.objectness."),
    ("decoder.mask_branch.mask_convs.", "mask_branch.convs."),
    ("decoder.mask_branch.projection.", "mask_branch.project."),
)


def is_sparseinst(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is the original SparseInst's."""
    return "decoder.inst_branch.iam_conv.weight" in foreign


def sparseinst_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The original's state dict with our keys; its ResNet has the same.

    >>> import torch
    >>> list(sparseinst_names({"encoder.fpn_laterals.2.bias": torch.zeros(1)}))
    ['encoder.pyramid.laterals.8.bias']
    """
    return {rename_prefix(name, _KEYS): tensor for name, tensor in foreign.items()}


def original_sparseinst_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict with the original's keys.

    >>> import torch
    >>> list(original_sparseinst_names({"encoder.pyramid.laterals.8.bias": torch.zeros(1)}))
    ['encoder.fpn_laterals.2.bias']
    """
    return {rename_prefix(name, _KEYS, to_ours=False): tensor for name, tensor in ours.items()}
