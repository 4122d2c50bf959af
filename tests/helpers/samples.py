"""Samples whose pixels show where they came from."""

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from uniquery.data.augment import Sample


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def painted(height: int = 48, width: int = 60) -> Sample:
    """Two things, painted as their masks: channel k is 255 where mask k is, with labels 5 and 3."""
    masks = torch.zeros(2, height, width, dtype=torch.uint8)
    masks[0, 4:24, 6:36] = 1
    masks[1, 20:44, 30:50] = 1
    image = torch.cat([masks * 255, torch.zeros_like(masks[:1])])
    return Sample(image, masks, torch.tensor([5, 3]))


def noisy(height: int = 48, width: int = 60) -> Sample:
    """Every pixel has its own color, so that a moved pixel is seen."""
    image = torch.from_numpy(rng().integers(0, 256, (3, height, width), dtype=np.uint8))
    return Sample(image, (image[:2] > 127).to(torch.uint8), torch.tensor([0, 1]))


def without_instances(height: int = 48, width: int = 60) -> Sample:
    sample = noisy(height, width)
    return Sample(sample.image, sample.masks[:0], sample.labels[:0])


def equal(a: Sample, b: Sample) -> bool:
    return all(_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(Sample))


def _equal(a: Tensor | bool | None, b: Tensor | bool | None) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b


def white(height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    ones = torch.ones(1, height, width, dtype=torch.uint8)
    return ones.expand(3, height, width) * 255, ones, torch.tensor([0])
