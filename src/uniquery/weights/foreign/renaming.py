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
