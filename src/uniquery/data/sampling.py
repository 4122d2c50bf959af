"""Which images make which batch; everything follows from the seed and the position."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler


class StepBatchSampler(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, index) from one endless sequence of permutations, from a given step on.

    Position p of the sequence is image π_e(p mod n) of epoch e = p div n. Each step takes the next `batch_size`
    positions for each process, so training can start at any step without replaying the steps before it.
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
    ) -> None:
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.first_step, self.last_step = first_step, last_step
        self.rank, self.ranks = rank, ranks
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def __len__(self) -> int:
        return self.last_step - self.first_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first_step, self.last_step):
            start = (step * self.ranks + self.rank) * self.batch_size
            yield [self._key(position) for position in range(start, start + self.batch_size)]

    def _key(self, position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, self.images)
        return epoch, int(self._permutation(epoch)[offset])

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.images)
