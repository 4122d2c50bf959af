"""One training step on an image with 600 instances, run as a program of its own: prints how much memory it took."""

import sys
from pathlib import Path

import numpy as np
import torch

from helpers.small_segmenters import small
from uniquery.data.augment import Sample, ScaleJitter, augment
from uniquery.data.batch import Batch, LoadedSample, collate
from uniquery.querying import EquivarianceSettings, InterSceneSettings, RandomTransform, UniqueQuerying

INSTANCES, COLUMNS, CELL = 600, 25, 20
SIZE = COLUMNS * CELL + 12  # 512
FLOAT_STACK = 4 * INSTANCES * SIZE * SIZE  # bytes that must never exist at once

GROUPS = {"exact": EquivarianceSettings(), "resampled": EquivarianceSettings(rotate=(5, 9), scale=(0.9, 1.1))}


def crowd() -> LoadedSample:
    """A grid of discs, a mask each."""
    y, x = torch.meshgrid(torch.arange(CELL), torch.arange(CELL), indexing="ij")
    disc = ((y - CELL / 2) ** 2 + (x - CELL / 2) ** 2 < 64).to(torch.uint8)
    masks = torch.zeros(INSTANCES, SIZE, SIZE, dtype=torch.uint8)
    for i, mask in enumerate(masks):
        top, left = (CELL * place for place in divmod(i, COLUMNS))
        mask[top : top + CELL, left : left + CELL] = disc
    image = torch.randint(0, 256, (3, SIZE, SIZE), dtype=torch.uint8)
    return LoadedSample(Sample(image, masks, torch.zeros(INSTANCES, dtype=torch.int64)), 1, (SIZE, SIZE))


def restart_peak() -> int:
    """Forgets the largest resident memory so far; returns the present one, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Largest resident memory since then, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def step(group: RandomTransform) -> int:
    """By how much a forward and a backward with both parts of the algorithm raise the peak."""
    segmenter = small("condinst", max_queries=100)
    objective = UniqueQuerying(segmenter, inter=InterSceneSettings(capacity=5000), equivariance=group)
    batch = collate([crowd()])
    assert isinstance(batch, Batch)
    before = restart_peak()
    losses = objective(batch.images, batch.targets)
    torch.stack(list(losses.values())).sum().backward()
    return peak() - before


def load() -> int:
    """By how much augmenting and collating raise the peak."""
    item = crowd()
    before = restart_peak()
    sample = augment(item.sample, [ScaleJitter(range=(0.9, 0.9), size=SIZE)], np.random.default_rng(0))
    collate([LoadedSample(sample, 1, (SIZE, SIZE))])
    return peak() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(load() if sys.argv[1] == "load" else step(GROUPS[sys.argv[1]]))
