"""Random numbers that depend on a key, not on what was drawn before.

What is drawn for an image is keyed by seed, step and image: it is the same after resuming, and with any number of
processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Generators = torch.Generator | Sequence[torch.Generator] | None


def keyed_generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on the key alone.

    >>> float(torch.rand((), generator=keyed_generator(0, 7))) == float(torch.rand((), generator=keyed_generator(0, 7)))
    True
    """
    return torch.Generator(device).manual_seed(keyed_seed(*key))


def keyed_seed(*key: int) -> int:
    """A seed that depends on the key alone; parts of a key may be negative, as ids may."""
    (seed,) = np.random.SeedSequence([part % 2**64 for part in key]).generate_state(1, np.uint64)
    return int(seed) % 2**63


def generator_per_image(generator: Generators, images: int) -> Sequence[torch.Generator | None]:
    """A generator for each image: the given list, or one generator repeated."""
    return [generator] * images if generator is None or isinstance(generator, torch.Generator) else generator
