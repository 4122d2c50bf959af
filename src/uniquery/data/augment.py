"""Random changes of a training sample, each a small setting and a pure function of a random generator.

Letters: K instances, H × W pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from uniquery.settings import Settings

Fraction = Annotated[float, Field(gt=0, le=1)]
Window = tuple[slice, slice]
"""Rows and columns."""


@dataclass(frozen=True)
class Sample:
    """One image and its instances: image (3, H, W) uint8, masks (K, H, W) uint8, labels (K,)."""

    image: Tensor
    masks: Tensor
    labels: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.image.shape[1], self.image.shape[2]

    def without_empty(self) -> Sample:
        """Only the instances that still own a pixel."""
        kept = self.masks.flatten(1).any(1).bool()
        return replace(self, masks=self.masks[kept], labels=self.labels[kept])


class Augmentation(Settings, ABC):
    """A random policy: `__call__` draws from the generator and applies what it drew."""

    model_config = ConfigDict(allow_inf_nan=False)

    @abstractmethod
    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """The changed sample."""


class ShortSide(Augmentation):
    """Resizes so that the short side is drawn from a range, unless the long side would pass its limit."""

    op: Literal["short_side"] = "short_side"
    range: tuple[int, int] = Field((400, 1200), description="smallest and largest short side, in pixels")
    longest: int = Field(1333, gt=0, description="limit of the long side")

    @model_validator(mode="after")
    def _ordered(self) -> ShortSide:
        if not 0 < self.range[0] <= self.range[1]:
            raise ValueError("range must be two positive sizes, the smaller first")
        return self

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        short = int(rng.integers(self.range[0], self.range[1] + 1))
        return resize(sample, resized_size(*sample.size, short, self.longest))


class Flip(Augmentation):
    """Mirrors left and right."""

    op: Literal["flip"] = "flip"
    p: float = Field(0.5, ge=0, le=1)
    axis: Literal["horizontal", "vertical"] = "horizontal"

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        if rng.random() >= self.p:
            return sample
        dim = 2 if self.axis == "horizontal" else 1
        return replace(sample, image=sample.image.flip(dim), masks=sample.masks.flip(dim))


class Transpose(Augmentation):
    """Exchanges rows and columns; with both flips, all right-angle rotations: for images without an up."""

    op: Literal["transpose"] = "transpose"
    p: float = Field(0.5, ge=0, le=1)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        if rng.random() >= self.p:
            return sample
        return replace(sample, image=sample.image.mT, masks=sample.masks.mT)


class Crop(Augmentation):
    """Cuts a window whose sides are fractions of the image's."""

    op: Literal["crop"] = "crop"
    p: float = Field(1.0, ge=0, le=1)
    range: tuple[Fraction, Fraction] = Field((0.6, 1.0), description="smallest and largest fraction of each side")

    @model_validator(mode="after")
    def _ordered(self) -> Crop:
        if self.range[0] > self.range[1]:
            raise ValueError("range must have the smaller fraction first")
        return self

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        if rng.random() >= self.p:
            return sample
        window = [max(1, round(side * rng.uniform(*self.range))) for side in sample.size]
        return crop(sample, (window[0], window[1]), rng)


class ScaleJitter(Augmentation):
    """Rescales by a random factor, then cuts or pads to a square of fixed size (large-scale jitter).

    The factor is relative to the scale at which the image just fits the square.
    """

    op: Literal["scale_jitter"] = "scale_jitter"
    range: tuple[float, float] = Field((0.1, 2.0), description="smallest and largest factor")
    size: int = Field(1024, gt=0, description="side of the output, in pixels")

    @model_validator(mode="after")
    def _ordered(self) -> ScaleJitter:
        if not 0 < self.range[0] <= self.range[1]:
            raise ValueError("range must be two positive factors, the smaller first")
        return self

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        fit = self.size * rng.uniform(*self.range) / max(sample.size)
        height, width = (max(1, round(side * fit)) for side in sample.size)
        window = place((height, width), (min(height, self.size), min(width, self.size)), rng)
        sample = resize_and_cut(sample, (height, width), window)
        padding = (0, self.size - sample.size[1], 0, self.size - sample.size[0])
        return replace(sample, image=F.pad(sample.image, padding), masks=F.pad(sample.masks, padding))


class Color(Augmentation):
    """Changes brightness, contrast and saturation, each by a factor in 1 ± strength."""

    op: Literal["color"] = "color"
    brightness: float = Field(0.2, ge=0, lt=1)
    contrast: float = Field(0.2, ge=0, lt=1)
    saturation: float = Field(0.2, ge=0, lt=1)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        brightness, contrast, saturation = (
            float(rng.uniform(1 - s, 1 + s)) for s in (self.brightness, self.contrast, self.saturation)
        )
        image = sample.image.float() * brightness
        image = (image - image.mean()) * contrast + image.mean()
        gray = image.mean(0, keepdim=True)
        image = (image - gray) * saturation + gray
        return replace(sample, image=image.round().clamp(0, 255).to(torch.uint8))


class TestSize(Settings):
    """How images are resized for evaluation and prediction."""

    __test__ = False  # not a test class, whatever its name

    short: int = Field(800, gt=0, description="short side, in pixels")
    longest: int = Field(1333, gt=0, description="limit of the long side")


AnyAugmentation = Annotated[ShortSide | Flip | Transpose | Crop | ScaleJitter | Color, Field(discriminator="op")]


def augment(sample: Sample, steps: Sequence[Augmentation], rng: np.random.Generator) -> Sample:
    """Applies the steps in order; instances that end up without a pixel are dropped."""
    for step in steps:
        sample = step(sample, rng)
    return sample.without_empty()


def resize(sample: Sample, size: tuple[int, int]) -> Sample:
    """Antialiased for the image, nearest for the masks."""
    if size == sample.size:
        return sample
    image = F.interpolate(sample.image[None], size=size, mode="bilinear", antialias=True)[0]
    masks = (
        F.interpolate(sample.masks[None], size=size, mode="nearest-exact")[0]
        if len(sample.masks)
        else (sample.masks.new_zeros(0, *size))
    )
    return replace(sample, image=image, masks=masks)


def resized_size(height: int, width: int, short: int, longest: int) -> tuple[int, int]:
    """The size with the given short side, unless the long side would pass its limit.

    >>> resized_size(480, 640, short=800, longest=1333)
    (800, 1067)
    """
    scale = min(short / min(height, width), longest / max(height, width))
    return max(1, math.floor(height * scale + 0.5)), max(1, math.floor(width * scale + 0.5))


def crop(sample: Sample, size: tuple[int, int], rng: np.random.Generator) -> Sample:
    """A window of the given size, uniformly placed."""
    window = place(sample.size, size, rng)
    return replace(sample, image=sample.image[:, *window], masks=sample.masks[:, *window])


def place(sides: tuple[int, int], size: tuple[int, int], rng: np.random.Generator) -> Window:
    """A window of the given size, uniformly placed."""
    top, left = (int(rng.integers(0, side - wanted + 1)) for side, wanted in zip(sides, size, strict=True))
    return slice(top, top + size[0]), slice(left, left + size[1])


def resize_and_cut(sample: Sample, size: tuple[int, int], window: Window) -> Sample:
    """What cutting the window after `resize` gives; masks, of which there may be many, are resized only inside it."""
    if window == (slice(0, size[0]), slice(0, size[1])):  # all of it, which `resize` does faster
        return resize(sample, size)
    image = resize(replace(sample, masks=sample.masks[:0]), size).image[:, *window]
    rows, columns = (_nearest(*sides)[shown] for *sides, shown in zip(sample.size, size, window, strict=True))
    if len(rows) < sample.size[0]:  # choosing columns costs most: among as few rows as possible
        masks = sample.masks.index_select(1, rows).index_select(2, columns)
    else:
        masks = sample.masks.index_select(2, columns).index_select(1, rows)
    return Sample(image, masks, sample.labels)


def _nearest(old: int, new: int) -> Tensor:
    """(new,) the old index that each new one takes."""
    return F.interpolate(torch.arange(old).float()[None, None], size=new, mode="nearest-exact")[0, 0].long()
