"""Renaming of state dict keys by rules."""

import re
from collections.abc import Callable, Sequence

Rules = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]  # patterns of prefixes, and what replaces them


def rename(key: str, rules: Rules) -> str:
    r"""The key with its prefix replaced by the first rule that matches, or as it is.

    >>> rename("layer1.weight", [(r"layer(\d)\.", r"res\1."), (r"layer", "x")])
    'res1.weight'
    """
    for pattern, replacement in rules:
        renamed, count = re.subn(rf"^{pattern}", replacement, key)
        if count:
            return renamed
    return key


KeyPairs = Sequence[tuple[str, str]]  # (their prefix, our prefix) of keys; "{}" stands for a number, the same in both


def rename_prefix(key: str, pairs: KeyPairs, *, to_ours: bool = True) -> str:
    """The key with the first prefix that matches replaced, theirs by ours or the other way, or as it is.

    >>> pairs = [("cate_tower.{}.", "class_tower.{}."), ("cate_", "class_")]
    >>> rename_prefix("cate_tower.3.weight", pairs), rename_prefix("class_pred.bias", pairs, to_ours=False)
    ('class_tower.3.weight', 'cate_pred.bias')
    """
    for pair in pairs:
        old, new = pair if to_ours else reversed(pair)
        match = re.match(re.escape(old).replace(r"\{\}", r"(\d+)"), key)
        if match:
            return new.format(*match.groups()) + key[match.end() :]
    return key
