"""Between the state dict keys of SOTR's checkpoints and ours."""

import re
from collections.abc import Mapping

from torch import Tensor

from uniquery.weights.foreign.adelaidet import GRID_MASK_HEAD, PYRAMID
from uniquery.weights.foreign.renaming import KeyPairs, rename_keys

_BLOCK = "cate_head.transformer.layers.blocks.{}."
_NUMBER = re.compile(r"(?:cate_head\.transformer\.layers\.blocks|transformer)\.(\d+)\.")
_ATTENTION = (
    ("fn.g", "gate"),
    ("fn.fn.to_q.", "queries."),
    ("fn.fn.to_kv.", "keys_values."),
    ("fn.fn.to_out.", "output."),
)
_CONVS = (("g", "gates.{}"), ("fn.0.", "first.{}."), ("fn.2.", "second.{}."))
_OUTSIDE: KeyPairs = (
    *PYRAMID,
    ("cate_head.cate_pred.", "classes."),
    ("cate_head.kernel_pred.", "kernels."),
    *GRID_MASK_HEAD,
)


def is_sotr(foreign: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is the original SOTR's."""
    return any(name.startswith("cate_head.transformer.layers.blocks.") for name in foreign)


def sotr_names(foreign: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The original SOTR's state dict with our keys.

    >>> import torch
    >>> list(sotr_names({"cate_head.transformer.layers.blocks.3.1.fn.0.bias": torch.zeros(1)}))
    ['transformer.1.convs.first.1.bias']
    """
    return rename_keys(foreign, _pairs(foreign))


def original_sotr_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our SOTR's state dict with the original's keys.

    >>> import torch
    >>> list(original_sotr_names({"transformer.1.rows.gate": torch.zeros(1)}))
    ['cate_head.transformer.layers.blocks.2.1.fn.g']
    """
    return rename_keys(ours, _pairs(ours), to_ours=False)


def _pairs(state: Mapping[str, Tensor]) -> KeyPairs:
    """The pairs for as many layers as a state dict has; blocks of attention and of convolutions take turns."""
    layers = 1 + max((int(number[1]) for number in map(_NUMBER.match, state) if number), default=-1)
    attention = [
        (f"{_BLOCK.format(2 * layer)}{branch}.{theirs}", f"transformer.{layer}.{axis}.{ours}")
        for layer in range(layers)
        for branch, axis in enumerate(("columns", "rows"))
        for theirs, ours in _ATTENTION
    ]
    convs = [
        (f"{_BLOCK.format(2 * layer + 1)}{branch}.{theirs}", f"transformer.{layer}.convs.{ours.format(branch)}")
        for layer in range(layers)
        for branch in range(2)
        for theirs, ours in _CONVS
    ]
    return (*_OUTSIDE, *attention, *convs)
