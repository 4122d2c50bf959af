"""State dicts of other projects: with our keys, and ours with theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from uniquery.weights.foreign.adelaidet import (
    condinst_names,
    is_condinst,
    is_solov2,
    original_condinst_names,
    original_solov2_names,
    solov2_names,
)
from uniquery.weights.foreign.mask2former import (
    hf_mask2former_names,
    is_hf_mask2former,
    is_mask2former,
    mask2former_names,
    original_hf_mask2former_names,
    original_mask2former_names,
)
from uniquery.weights.foreign.mmdet import (
    is_mmdet_condinst,
    is_mmdet_mask2former,
    is_mmdet_solov2,
    mmdet_condinst_names,
    mmdet_mask2former_names,
    mmdet_solov2_names,
)
from uniquery.weights.foreign.solq import is_solq, original_solq_names, solq_names
from uniquery.weights.foreign.sotr import is_sotr, original_sotr_names, sotr_names
from uniquery.weights.foreign.sparseinst import is_sparseinst, original_sparseinst_names, sparseinst_names

StateDict = Mapping[str, Tensor]
KeyMap = Callable[[StateDict], dict[str, Tensor]]


@dataclass(frozen=True)
class Format:
    """The names that a project has for a segmenter.

    Attributes:
        segmenter: its name here.
        project: "original", "huggingface" or "mmdetection".
        matches: whether a state dict has these names.
        to_ours: renames theirs to ours, without buffers that are not weights.
        to_theirs: renames ours to theirs; None if these names are only read.
        backbones: what the names of backbones begin with that the project has too.
        wrapper: the key of the state dict in its .pth files, or None if there is no dict around it.
    """

    segmenter: str
    project: str
    matches: Callable[[StateDict], bool]
    to_ours: KeyMap
    to_theirs: KeyMap | None = None
    backbones: tuple[str, ...] = ("resnet",)
    wrapper: str | None = "model"


FORMATS: tuple[Format, ...] = (
    Format("condinst", "original", is_condinst, condinst_names, original_condinst_names),
    Format("solov2", "original", is_solov2, solov2_names, original_solov2_names),
    Format("sotr", "original", is_sotr, sotr_names, original_sotr_names),
    Format(
        "mask2former",
        "original",
        is_mask2former,
        mask2former_names,
        original_mask2former_names,
        backbones=("resnet", "swin"),
    ),
    Format(
        "mask2former",
        "huggingface",
        is_hf_mask2former,
        hf_mask2former_names,
        original_hf_mask2former_names,
        backbones=("resnet", "swin"),
        wrapper=None,
    ),
    Format("sparseinst", "original", is_sparseinst, sparseinst_names, original_sparseinst_names),
    Format("solq", "original", is_solq, solq_names, original_solq_names, backbones=("resnet", "swin")),
    Format("condinst", "mmdetection", is_mmdet_condinst, mmdet_condinst_names),
    Format("solov2", "mmdetection", is_mmdet_solov2, mmdet_solov2_names),
    Format("mask2former", "mmdetection", is_mmdet_mask2former, mmdet_mask2former_names),
)


def find_format(foreign: StateDict) -> Format | None:
    """Whose names a state dict has; None if they are not known."""
    return next((format_ for format_ in FORMATS if format_.matches(foreign)), None)


def to_uniquery_names(foreign: StateDict) -> dict[str, Tensor]:
    """A state dict of another project with our keys; unchanged if the project is not known.

    Raises:
        CheckpointError: the project is known, but its model is another than ours.
    """
    format_ = find_format(foreign)
    return dict(foreign) if format_ is None else format_.to_ours(foreign)
