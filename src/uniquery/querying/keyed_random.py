"""Random numbers that depend on what they are for, not on who asked before.

What is drawn for an image is keyed by seed, step and image: it is the same after a resumption, and with any number of
processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Generators = torch.Generator | Sequence[torch.Generator] | None


def keyed_generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose.

    >>> float(torch.rand((), generator=keyed_generator(0, 7))) == float(torch.rand((), generator=keyed_generator(0, 7)))
    True
    """
    return torch.Generator(device).manual_seed(keyed_seed(*key))


def keyed_seed(*key: int) -> int:
    """A seed for one purpose; keys may be negative, as ids are."""
    (seed,) = np.random.SeedSequence([part % 2**64 for part in key]).generate_state(1, np.uint64)
    return int(seed) % 2**63


def of_each_image(generator: Generators, images: int) -> Sequence[torch.Generator | None]:
    """A generator per image: the given ones, or the one they share."""
    return [generator] * images if generator is None or isinstance(generator, torch.Generator) else generator
