"""Which samples make which batch, and how they are joined. Everything follows from seed, epoch and position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from traceback import clear_frames

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from uniquery.data.augment import Augmentation, Sample, augment, resize, resized_size
from uniquery.data.coco import CocoData
from uniquery.errors import DataError
from uniquery.masks.geometry import mask_boxes
from uniquery.structures import Images, Targets

PAD_MULTIPLE = 32


@dataclass(frozen=True)
class Item:
    """A sample of a batch, before padding."""

    sample: Sample
    image_id: int
    original_size: tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Padded images, their ground truth, and their sizes before any resizing."""

    images: Images
    targets: list[Targets]
    original_sizes: list[tuple[int, int]]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(self.images.to(device), [t.to(device) for t in self.targets], self.original_sizes)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, for copies that overlap with work."""
        images = Images(self.images.pixels.pin_memory(), self.images.sizes)
        return Batch(images, [t.pin_memory() for t in self.targets], self.original_sizes)


class TrainingItems(Dataset["Item | DataError"]):
    """Augmented samples, each drawn by (seed, epoch, image), so that workers do not matter.

    A sample that cannot be read is returned as its error: raised in a worker it would arrive wrapped in a traceback.
    """

    def __init__(self, data: CocoData, steps: Sequence[Augmentation], seed: int) -> None:
        self.data, self.steps, self.seed = data, steps, seed

    def __getitem__(self, key: tuple[int, int]) -> Item | DataError:
        epoch, index = key
        rng = np.random.default_rng([self.seed, epoch, index])
        try:
            sample = load_sample(self.data, index)
        except DataError as error:
            return error
        return Item(augment(sample, self.steps, rng), int(self.data.image_ids[index]), sample.size)


class EvaluationItems(Dataset["Item | DataError"]):
    """Each image once, resized to the test size, without masks: ground truth is read from the annotations.

    Of several parts, one holds every so many-th image.
    """

    def __init__(self, data: CocoData, short: int, longest: int, part: int = 0, parts: int = 1) -> None:
        self.data, self.short, self.longest = data, short, longest
        self.indices = range(part, len(data), parts)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Item | DataError:
        index = self.indices[position]
        try:
            image = self.data.read(index)
        except DataError as error:
            return error
        sample = image_only(image)
        resized = resize(sample, resized_size(*sample.size, self.short, self.longest))
        return Item(resized, int(self.data.image_ids[index]), sample.size)


def image_only(image: npt.NDArray[np.uint8]) -> Sample:
    """An (H, W, 3) image as a sample without instances."""
    height, width = image.shape[:2]
    pixels = torch.tensor(image).permute(2, 0, 1)
    return Sample(pixels, torch.zeros(0, height, width, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))


def load_sample(data: CocoData, index: int) -> Sample:
    """An image and its instances as a sample."""
    image, masks, labels = data.load(index)
    return Sample(image_only(image).image, masks, labels)


def collate(items: Sequence[Item | DataError]) -> Batch | DataError:
    """Pads to a common size, a multiple of the coarsest stride; the first error of a batch stands for it."""
    good: list[Item] = []
    for item in items:
        if isinstance(item, DataError):
            return item
        good.append(item)
    sizes = tuple(item.sample.size for item in good)
    height, width = (-(-max(side) // PAD_MULTIPLE) * PAD_MULTIPLE for side in zip(*sizes, strict=True))
    pixels = torch.zeros(len(good), 3, height, width, dtype=torch.uint8)
    for row, item in zip(pixels, good, strict=True):
        row[:, : item.sample.size[0], : item.sample.size[1]] = item.sample.image
    targets = [_targets(item, height, width) for item in good]
    return Batch(Images(pixels, sizes), targets, [item.original_size for item in good])


def _targets(item: Item, height: int, width: int) -> Targets:
    masks = item.sample.masks
    padded = F.pad(masks, (0, width - masks.shape[2], 0, height - masks.shape[1])).bool()
    return Targets(item.sample.labels, mask_boxes(padded), padded, item.image_id)


def raise_errors(batches: DataLoader[Batch | DataError]) -> Iterator[Batch]:
    """The batches; an error that a worker sent is raised here, where it can be told in one sentence."""
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except BaseException as error:
        clear_frames(error.__traceback__)  # they hold the workers, for which python would wait at its end, for ever
        raise
