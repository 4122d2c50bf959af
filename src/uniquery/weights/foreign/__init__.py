"""State dicts of other projects, with our keys."""

from collections.abc import Callable, Mapping

from torch import Tensor

from uniquery.weights.foreign.adelaidet import condinst_names, is_condinst, is_solov2, solov2_names
from uniquery.weights.foreign.mask2former import (
    hf_mask2former_names,
    is_hf_mask2former,
    is_mask2former,
    mask2former_names,
)
from uniquery.weights.foreign.solq import is_solq, solq_names

StateDict = Mapping[str, Tensor]

_FORMATS: tuple[tuple[Callable[[StateDict], bool], Callable[[StateDict], dict[str, Tensor]]], ...] = (
    (is_condinst, condinst_names),
    (is_solov2, solov2_names),
    (is_mask2former, mask2former_names),
    (is_hf_mask2former, hf_mask2former_names),
    (is_solq, solq_names),
)


def to_uniquery_names(foreign: StateDict) -> dict[str, Tensor]:
    """A state dict of another project with our keys; unchanged if the project is not known."""
    for is_format, rename in _FORMATS:
        if is_format(foreign):
            return rename(foreign)
    return dict(foreign)
