"""Renaming of whole state dicts by prefix pairs."""

from collections.abc import Mapping

from torch import Tensor

from uniquery.backbones.key_maps import KeyPairs, rename_prefix

__all__ = ["KeyPairs", "rename_keys", "rename_prefix"]


def rename_keys(state: Mapping[str, Tensor], pairs: KeyPairs, *, to_ours: bool = True) -> dict[str, Tensor]:
    """A state dict with `rename_prefix` applied to each key."""
    return {rename_prefix(name, pairs, to_ours=to_ours): tensor for name, tensor in state.items()}
