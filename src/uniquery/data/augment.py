"""Random changes of a training sample. Each is a settings model and a pure function of a random generator.

Letters: K instances, H × W pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from uniquery.settings import Settings

Fraction = Annotated[float, Field(gt=0, le=1)]
Window = tuple[slice, slice]
"""Rows and columns."""
LoadOther = Callable[[], "Sample"]
"""Another sample, already augmented."""


@dataclass(frozen=True)
class Sample:
    """One image and its instances.

    Attributes:
        image: (3, H, W) uint8.
        masks: (K, H, W) uint8.
        labels: (K,) int64.
        valid: (H, W) uint8, 0 in regions that training ignores; None means that all pixels are valid.
        things: (K,) bool, false for stuff; None means that all are things.
        is_mirrored: whether its labels are those of a mirror image.
    """

    image: Tensor
    masks: Tensor
    labels: Tensor
    valid: Tensor | None = None
    things: Tensor | None = None
    is_mirrored: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.image.shape[1], self.image.shape[2]

    def without_empty(self) -> Sample:
        """Only the instances that still own a pixel."""
        kept = self.masks.flatten(1).any(1).bool()
        things = None if self.things is None else self.things[kept]
        return replace(self, masks=self.masks[kept], labels=self.labels[kept], things=things)

    def without_stuff(self) -> Sample:
        """Only the things."""
        if self.things is None:
            return self
        return replace(self, masks=self.masks[self.things], labels=self.labels[self.things], things=None)

    def with_pixels(self, image: Tensor, change_masks: Callable[[Tensor], Tensor]) -> Sample:
        """With another image; its masks, and its valid pixels as a (1, H, W) mask, are changed by the function."""
        valid = None if self.valid is None else change_masks(self.valid[None])[0]
        return replace(self, image=image, masks=change_masks(self.masks), valid=valid)


class Augmentation(Settings, ABC):
    """A random policy: `__call__` draws from the generator and applies what it drew."""

    model_config = ConfigDict(allow_inf_nan=False)
    is_mirror: ClassVar[bool] = False
    """Whether it makes mirror images; if it does nothing, it must return the very same sample."""

    @abstractmethod
    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """The changed sample."""


class ShortSide(Augmentation):
    """Resizes to a random short side, or to a smaller one if the long side would exceed its limit."""

    op: Literal["short_side"] = "short_side"
    range: tuple[int, int] = Field((400, 1200), description="smallest and largest short side, in pixels")
    longest: int = Field(1333, gt=0, description="limit of the long side")

    @model_validator(mode="after")
    def _ordered(self) -> ShortSide:
        if not 0 < self.range[0] <= self.range[1]:
            raise ValueError("range must be two positive sizes, the smaller first")
        if self.range[1] > self.longest:
            raise ValueError(f"the short side cannot be {self.range[1]} if the long side is at most {self.longest}")
        return self

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        short = int(rng.integers(self.range[0], self.range[1] + 1))
        return resize(sample, resized_size(*sample.size, short, self.longest))


class Flip(Augmentation):
    """Mirrors left and right, or top and bottom."""

    is_mirror = True
    op: Literal["flip"] = "flip"
    p: float = Field(0.5, ge=0, le=1, description="probability of a flip")
    axis: Literal["horizontal", "vertical"] = Field(
        "horizontal", description="horizontal: left and right change places"
    )

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        if rng.random() >= self.p:
            return sample
        dim = 2 if self.axis == "horizontal" else 1
        return sample.with_pixels(sample.image.flip(dim), lambda masks: masks.flip(dim))


class Transpose(Augmentation):
    """Swaps rows and columns. Together with both flips it gives all 90° rotations: for images without a fixed top."""

    is_mirror = True
    op: Literal["transpose"] = "transpose"
    p: float = Field(0.5, ge=0, le=1, description="probability of a transposition")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        if rng.random() >= self.p:
            return sample
        return sample.with_pixels(sample.image.mT, lambda masks: masks.mT)


class Crop(Augmentation):
    """Crops a window whose sides are fractions of the image's sides."""

    op: Literal["crop"] = "crop"
    p: float = Field(1.0, ge=0, le=1, description="probability of a crop")
    range: tuple[Fraction, Fraction] = Field((0.6, 1.0), description="smallest and largest fraction of each side")

    @model_validator(mode="after")
    def _ordered(self) -> Crop:
        if self.range[0] > self.range[1]:
            raise ValueError("range must have the smaller fraction first")
        return self

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        if rng.random() >= self.p:
            return sample
        height, width = (max(1, round(side * rng.uniform(*self.range))) for side in sample.size)
        return crop(sample, (height, width), rng)


class ScaleJitter(Augmentation):
    """Resizes by a random factor, then crops or pads to a square of fixed size (large-scale jitter).

    The factor is relative to the scale at which the image just fits the square. Padding counts as valid background.
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
        scale = self.size * rng.uniform(*self.range) / max(sample.size)
        height, width = (max(1, round(side * scale)) for side in sample.size)
        window = random_window((height, width), (min(height, self.size), min(width, self.size)), rng)
        return pad(resize_and_crop(sample, (height, width), window), self.size, self.size)


class Color(Augmentation):
    """Changes brightness, contrast and saturation, each by a factor in 1 ± strength."""

    op: Literal["color"] = "color"
    brightness: float = Field(0.2, ge=0, lt=1, description="largest change, as a fraction")
    contrast: float = Field(0.2, ge=0, lt=1, description="largest change, as a fraction")
    saturation: float = Field(0.2, ge=0, lt=1, description="largest change, as a fraction")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        brightness, contrast, saturation = (
            float(rng.uniform(1 - s, 1 + s)) for s in (self.brightness, self.contrast, self.saturation)
        )
        image = sample.image.float() * brightness
        image = (image - image.mean()) * contrast + image.mean()
        gray = image.mean(0, keepdim=True)
        image = (image - gray) * saturation + gray
        return replace(sample, image=image.round().clamp(0, 255).to(torch.uint8))


class CopyPaste(Augmentation):
    """Pastes instances of another training image (Ghiasi et al., CVPR 2021).

    The other image first goes through the augmentations that stand before this one in the list. What the pasted
    instances cover is removed from the masks below. Stuff is not pasted.
    """

    op: Literal["copy_paste"] = "copy_paste"
    p: float = Field(0.5, ge=0, le=1, description="probability that an image gets instances of another one")
    max_instances: int | None = Field(None, gt=0, description="most instances that are pasted; None: any number")

    def __call__(self, sample: Sample, rng: np.random.Generator, load_other: LoadOther | None = None) -> Sample:
        if rng.random() >= self.p or load_other is None:
            return sample
        other = load_other().without_stuff().without_empty()
        if not len(other.labels):
            return sample
        limit = min(len(other.labels), self.max_instances or len(other.labels))
        chosen = rng.permutation(len(other.labels))[: rng.integers(1, limit + 1)]
        return paste(sample, other, torch.from_numpy(chosen))


class TestSize(Settings):
    """How images are resized for evaluation and prediction."""

    __test__ = False  # pytest takes the name for that of a test class

    short: int = Field(800, gt=0, description="short side, in pixels")
    longest: int = Field(1333, gt=0, description="limit of the long side")


AnyAugmentation = Annotated[
    ShortSide | Flip | Transpose | Crop | ScaleJitter | Color | CopyPaste, Field(discriminator="op")
]


def augment(
    sample: Sample,
    augmentations: Sequence[Augmentation],
    rng: np.random.Generator,
    load: Callable[[np.random.Generator], Sample] | None = None,
    mirrored: Tensor | None = None,
) -> Sample:
    """Applies the augmentations in order; instances without a pixel left are dropped.

    Args:
        sample: the image and its instances.
        augmentations: in order.
        rng: what they draw from.
        load: gives a random sample of the data set, for copy-paste; None: copy-paste does nothing.
        mirrored: (C,) the label that each class has in a mirror image; None: the same.
    """
    for index, augmentation in enumerate(augmentations):
        if isinstance(augmentation, CopyPaste):
            other = None if load is None else partial(_augmented_other, load, augmentations[:index], rng, mirrored)
            sample = augmentation(sample, rng, other)
            continue
        before, sample = sample, augmentation(sample, rng)
        if mirrored is not None and augmentation.is_mirror and sample is not before:
            sample = replace(sample, labels=mirrored[sample.labels], is_mirrored=not sample.is_mirrored)
    return sample.without_empty()


def _augmented_other(
    load: Callable[[np.random.Generator], Sample],
    augmentations: Sequence[Augmentation],
    rng: np.random.Generator,
    mirrored: Tensor | None,
) -> Sample:
    return augment(load(rng), augmentations, rng, load, mirrored)


def paste(sample: Sample, other: Sample, chosen: Tensor) -> Sample:
    """The chosen instances of another sample over this one, top left aligned; what lies outside is cut off."""
    height, width = sample.size
    other = other.with_pixels(other.image[:, :height, :width], lambda masks: masks[:, :height, :width])
    other = pad(other, height, width)
    masks, labels = other.masks[chosen], other.labels[chosen]
    covered = masks.any(0).bool()  # (H, W)
    things = None
    if sample.things is not None or other.things is not None:
        things = torch.cat([_things(sample), _things(other)[chosen]])
    return replace(
        sample,
        image=torch.where(covered, other.image, sample.image),
        masks=torch.cat([sample.masks * ~covered, masks]),
        labels=torch.cat([sample.labels, labels]),
        valid=None if sample.valid is None else (sample.valid.bool() | covered).to(sample.valid.dtype),
        things=things,
    )


def _things(sample: Sample) -> Tensor:
    return torch.ones_like(sample.labels, dtype=torch.bool) if sample.things is None else sample.things


def image_only(image: npt.NDArray[np.uint8]) -> Sample:
    """An (H, W, 3) image as a sample without instances."""
    height, width = image.shape[:2]
    pixels = torch.tensor(image).permute(2, 0, 1)
    return Sample(pixels, torch.zeros(0, height, width, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))


def resize(sample: Sample, size: tuple[int, int]) -> Sample:
    """Antialiased for the image, nearest for masks and valid pixels."""
    if size == sample.size:
        return sample
    image = F.interpolate(sample.image[None], size=size, mode="bilinear", antialias=True)[0]
    return sample.with_pixels(image, lambda masks: _resize_masks(masks, size))


def _resize_masks(masks: Tensor, size: tuple[int, int]) -> Tensor:
    if not len(masks):  # torch refuses to interpolate nothing
        return masks.new_zeros(0, *size)
    return F.interpolate(masks[None], size=size, mode="nearest-exact")[0]


def resized_size(height: int, width: int, short: int, longest: int) -> tuple[int, int]:
    """The size with the given short side, or a smaller one if the long side would exceed its limit.

    >>> resized_size(480, 640, short=800, longest=1333)
    (800, 1067)
    """
    scale = min(short / min(height, width), longest / max(height, width))
    return max(1, math.floor(height * scale + 0.5)), max(1, math.floor(width * scale + 0.5))


def crop(sample: Sample, size: tuple[int, int], rng: np.random.Generator) -> Sample:
    """A window of the given size, uniformly placed."""
    window = random_window(sample.size, size, rng)
    return sample.with_pixels(sample.image[:, *window], lambda masks: masks[:, *window])


def pad(sample: Sample, height: int, width: int) -> Sample:
    """Padded at the bottom and the right with black background; the padding counts as valid."""
    padding = (0, width - sample.size[1], 0, height - sample.size[0])
    valid = None if sample.valid is None else F.pad(sample.valid, padding, value=1)
    return replace(sample, image=F.pad(sample.image, padding), masks=F.pad(sample.masks, padding), valid=valid)


def random_window(image_size: tuple[int, int], size: tuple[int, int], rng: np.random.Generator) -> Window:
    """A window of the given size inside an image, uniformly placed."""
    top, left = (int(rng.integers(0, side - length + 1)) for side, length in zip(image_size, size, strict=True))
    return slice(top, top + size[0]), slice(left, left + size[1])


def resize_and_crop(sample: Sample, size: tuple[int, int], window: Window) -> Sample:
    """The same as cropping the window after `resize`; masks, of which there may be many, are resized only inside it."""
    if window == (slice(0, size[0]), slice(0, size[1])):  # the whole image, for which `resize` is faster
        return resize(sample, size)
    image = resize(Sample(sample.image, sample.masks[:0], sample.labels[:0]), size).image[:, *window]
    rows, columns = (_nearest(*sides)[span] for *sides, span in zip(sample.size, size, window, strict=True))

    def select(masks: Tensor) -> Tensor:
        if len(rows) < sample.size[0]:  # selecting columns costs most: do it in as few rows as possible
            return masks.index_select(1, rows).index_select(2, columns)
        return masks.index_select(2, columns).index_select(1, rows)

    return sample.with_pixels(image, select)


def _nearest(old: int, new: int) -> Tensor:
    """(new,) index of the old pixel that each new pixel copies."""
    return F.interpolate(torch.arange(old).float()[None, None], size=new, mode="nearest-exact")[0, 0].long()
