"""Which images make which batch; everything follows from the seed and the position."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch.utils.data import Sampler

from uniquery.data.dataset import Dataset
from uniquery.settings import Settings

Key = tuple[int, ...]
"""Epoch and index of an image; a third number counts its further appearances in the epoch, from 1."""
Array = npt.NDArray[np.int64]
_FRACTION_BITS = 32  # of a repeat factor: whole numbers make the length of any number of epochs exact


class RepeatFactor(Settings):
    """Images with rare classes appear more often in an epoch (Gupta et al., LVIS, CVPR 2019)."""

    name: Literal["repeat_factor"] = Field("repeat_factor", description="how images are sampled")
    threshold: float = Field(
        0.001, gt=0, le=1, description="classes in a smaller share of the images are repeated, by √(threshold / share)"
    )


def repeat_factors(data: Dataset, sampling: RepeatFactor | None) -> npt.NDArray[np.float64] | None:
    """(I,) how often each image appears in an epoch on average; None without sampling: once.

    r(I) = max over its classes c of max(1, √(t / f(c))), where f(c) is the share of images with an instance of c.
    """
    if sampling is None:
        return None
    index, label = data.image_classes()
    share = torch.bincount(label, minlength=len(data.categories)).double() / len(data)
    factors = torch.ones(len(data), dtype=torch.float64)
    return factors.scatter_reduce(0, index, (sampling.threshold / share[label]).sqrt(), "amax").numpy()


def images_per_epoch(data: Dataset, sampling: RepeatFactor | None) -> float:
    """How many images an epoch has on average, repeated ones counted as often as they appear."""
    factors = repeat_factors(data, sampling)
    return len(data) if factors is None else float(factors.sum())


class PermutedImages:
    """Epochs in which each image appears once, in a random order."""

    def __init__(self, images: int, seed: int) -> None:
        self.count, self.seed = images, seed

    def start(self, epoch: int) -> int:
        """How many positions all epochs before this one have."""
        return epoch * self.count

    def epoch_of(self, position: int) -> int:
        """The epoch of a position in the sequence of all epochs."""
        return position // self.count

    def images(self, epoch: int) -> tuple[Array, Array]:
        """Of each position of an epoch: the index of its image, and how often that came before in the epoch."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return order, np.zeros_like(order)


class RepeatedImages:
    """Epochs in which an image with the factor r appears ⌊r⌋ or ⌊r⌋ + 1 times, r times on average.

    The fractions are rounded by systematic sampling in the random order of the epoch: going through the images, one is
    added whenever the sum of their fractions passes a whole number. The sum starts at random and goes on from epoch to
    epoch. So each image is rounded up with a chance equal to its fraction, and all epochs before a given one together
    have a length that needs no random number to be known.

    Args:
        factors: (I,) repeat factors, at least 1.
        seed: seed of the run.
    """

    def __init__(self, factors: npt.NDArray[np.float64], seed: int) -> None:
        scaled = np.rint(factors * 2**_FRACTION_BITS).astype(np.int64)
        self._whole, self._fraction = scaled >> _FRACTION_BITS, scaled & (2**_FRACTION_BITS - 1)
        self._whole_sum, self._fraction_sum = int(self._whole.sum()), int(self._fraction.sum())
        self._offset, self.seed = int(np.random.default_rng([seed]).integers(2**_FRACTION_BITS)), seed

    def start(self, epoch: int) -> int:
        """How many positions all epochs before this one have.

        >>> [RepeatedImages(np.array([1.0, 1.5]), seed=0).start(epoch) for epoch in (0, 2, 4, 2 * 10**12)]
        [0, 5, 10, 5000000000000]
        """
        return epoch * self._whole_sum + ((self._offset + epoch * self._fraction_sum) >> _FRACTION_BITS)

    def epoch_of(self, position: int) -> int:
        """The epoch of a position in the sequence of all epochs."""
        length = (self._whole_sum << _FRACTION_BITS) + self._fraction_sum
        epoch = (position << _FRACTION_BITS) // length
        while self.start(epoch) > position:
            epoch -= 1
        while self.start(epoch + 1) <= position:
            epoch += 1
        return epoch

    def images(self, epoch: int) -> tuple[Array, Array]:
        """Of each position of an epoch: the index of its image, and how often that came before in the epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self._whole))
        first = (self._offset + epoch * self._fraction_sum) % 2**_FRACTION_BITS
        sums = first + np.concatenate([[0], np.cumsum(self._fraction[order])])
        counts = self._whole[order] + np.diff(sums >> _FRACTION_BITS)
        shuffled = rng.permutation(np.repeat(order, counts))
        by_image = np.argsort(shuffled, kind="stable")
        is_first = np.diff(shuffled[by_image], prepend=-1) != 0
        positions = np.arange(len(shuffled))
        repeats = np.empty_like(shuffled)
        repeats[by_image] = positions - np.maximum.accumulate(np.where(is_first, positions, 0))
        return shuffled, repeats


class StepBatchSampler(Sampler[list[Key]]):
    """Batches of (epoch, index) from one endless sequence of epochs, from a given step on.

    An epoch is a permutation of the images, or with repeat factors of some of them several times. Each step takes the
    next `batch_size` positions of the sequence for each process, so training can start at any step without replaying
    the steps before it.

    Args:
        images: how many there are.
        batch_size: positions of a step and process.
        seed: seed of the run.
        first_step: the step to start from.
        last_step: the step to stop before.
        rank: this process.
        ranks: how many processes share the images.
        factors: (images,) how often each appears in an epoch; None: once.
    """

    def __init__(
        self,
        images: int,
        batch_size: int,
        seed: int,
        *,
        first_step: int = 0,
        last_step: int,
        rank: int = 0,
        ranks: int = 1,
        factors: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.first_step, self.last_step = first_step, last_step
        self.rank, self.ranks = rank, ranks
        self._epochs = PermutedImages(images, seed) if factors is None else RepeatedImages(factors, seed)
        self._images = lru_cache(maxsize=2)(self._epochs.images)

    def __len__(self) -> int:
        return self.last_step - self.first_step

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.first_step, self.last_step):
            start = (step * self.ranks + self.rank) * self.batch_size
            yield [self._key(position) for position in range(start, start + self.batch_size)]

    def _key(self, position: int) -> Key:
        epoch = self._epochs.epoch_of(position)
        offset = position - self._epochs.start(epoch)
        index, repeat = (int(column[offset]) for column in self._images(epoch))
        return (epoch, index, repeat) if repeat else (epoch, index)
