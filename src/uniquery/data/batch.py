"""Samples loaded from a data set and joined to batches. Everything follows from seed, epoch and position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from traceback import clear_frames

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import data as torch_data

from uniquery.data.augment import Augmentation, Sample, augment, image_only, resize, resized_size
from uniquery.data.dataset import ClassLists, Dataset
from uniquery.data.lvis import FederatedClasses, FederatedSettings
from uniquery.data.sampling import Key
from uniquery.errors import DataError
from uniquery.masks.geometry import mask_boxes
from uniquery.structures import SIZE_DIVISIBILITY, Images, Targets

MAX_UNREADABLE = 20
"""If so many images in a row cannot be read, skipping them would hide that the whole data set is damaged."""


@dataclass(frozen=True)
class LoadedSample:
    """A sample of a batch, before padding.

    Attributes:
        sample: the image as the model gets it.
        image_id: the image's id in its data set.
        original_size: (height, width) of the image file.
        unreadable: one sentence for each image that this sample was to have, but that cannot be read.
        classes: for the federated class loss; None without it.
    """

    sample: Sample
    image_id: int
    original_size: tuple[int, int]
    unreadable: tuple[str, ...] = ()
    classes: ClassLists | None = None


@dataclass(frozen=True)
class Batch:
    """Padded images, their ground truth, and their sizes before any resizing.

    Attributes:
        images: the images.
        targets: the ground truth of each image.
        original_sizes: (height, width) of each image file.
        unreadable: for each image, what `LoadedSample.unreadable` says.
    """

    images: Images
    targets: list[Targets]
    original_sizes: list[tuple[int, int]]
    unreadable: list[tuple[str, ...]] = field(default_factory=list)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return replace(self, images=self.images.to(device), targets=[t.to(device) for t in self.targets])

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, for copies that overlap with computation."""
        images = Images(self.images.pixels.pin_memory(), self.images.sizes)
        return replace(self, images=images, targets=[t.pin_memory() for t in self.targets])


class TrainingSamples(torch_data.Dataset["LoadedSample | DataError"]):
    """Augmented samples. Random numbers follow from (seed, epoch, image), so the number of workers does not matter.

    A sample that cannot be read is returned as its error: an error raised in a worker would arrive with a traceback.

    Args:
        data: the data set.
        augmentations: in order.
        seed: the seed of the run.
        skip_unreadable: takes a random other image instead of one that cannot be read; which one follows from
            (seed, epoch, image) too.
        mirrored: (C,) the label that each class has in a mirror image; None: the same.
    """

    def __init__(
        self,
        data: Dataset,
        augmentations: Sequence[Augmentation],
        seed: int,
        *,
        federated: FederatedSettings | None = None,
        skip_unreadable: bool = False,
        mirrored: Tensor | None = None,
    ) -> None:
        self.data, self.augmentations, self.seed = data, augmentations, seed
        self.federated = FederatedClasses(data, federated) if federated else None
        self.skip_unreadable, self.mirrored = skip_unreadable, mirrored

    def __getitem__(self, key: Key) -> LoadedSample | DataError:
        rng, index = np.random.default_rng([self.seed, *key]), key[1]
        unreadable: list[str] = []
        try:
            while True:
                try:
                    sample = self.data.load(index)
                    break
                except DataError as error:
                    self._skip(error, unreadable)
                    index = int(rng.integers(len(self.data)))
            load_other = partial(self._load_other, unreadable)
            augmented = augment(sample, self.augmentations, rng, load_other, self.mirrored)
        except DataError as error:
            return error
        classes = self._classes(self.federated, index, sample, augmented, rng) if self.federated else None
        return LoadedSample(augmented, int(self.data.image_ids[index]), sample.size, tuple(unreadable), classes)

    def _classes(
        self, federated: FederatedClasses, index: int, sample: Sample, augmented: Sample, rng: np.random.Generator
    ) -> ClassLists:
        """The classes that an augmented image teaches; what is known of a class holds for its mirror image's class."""
        mirrored = self.mirrored if augmented.is_mirrored else None
        seen = augmented.labels if mirrored is None else mirrored[augmented.labels]  # swapped back
        drawn = federated.draw(index, sample.labels.tolist(), rng, pasted=seen.tolist())
        return drawn if mirrored is None else drawn.with_labels(mirrored.tolist())

    def _load_other(self, unreadable: list[str], rng: np.random.Generator) -> Sample:
        """A random image, for copy-paste."""
        while True:
            try:
                return load_random(self.data, rng)
            except DataError as error:
                self._skip(error, unreadable)

    def _skip(self, error: DataError, unreadable: list[str]) -> None:
        """Notes an image that cannot be read, or raises its error."""
        if not self.skip_unreadable or len(unreadable) == MAX_UNREADABLE:
            raise error
        unreadable.append(str(error))


def load_random(data: Dataset, rng: np.random.Generator) -> Sample:
    """A random image of a data set, and its instances."""
    return data.load(int(rng.integers(len(data))))


class EvaluationSamples(torch_data.Dataset["LoadedSample | DataError"]):
    """Each image once, resized to the test size, without masks: metrics read the ground truth from the annotations.

    With several ranks, each one gets every `ranks`-th image. With `skip_unreadable`, an image that cannot be read
    becomes a small black one that has its error as `unreadable`.
    """

    def __init__(
        self,
        data: Dataset,
        short: int,
        longest: int,
        rank: int = 0,
        ranks: int = 1,
        *,
        skip_unreadable: bool = False,
    ) -> None:
        self.data, self.short, self.longest = data, short, longest
        self.skip_unreadable = skip_unreadable
        self.indices: Sequence[int] = range(rank, len(data), ranks)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> LoadedSample | DataError:
        index = self.indices[position]
        try:
            image = self.data.read(index)
        except DataError as error:
            if not self.skip_unreadable:
                return error
            black = image_only(np.zeros((SIZE_DIVISIBILITY, SIZE_DIVISIBILITY, 3), np.uint8))
            return LoadedSample(black, int(self.data.image_ids[index]), black.size, (str(error),))
        sample = image_only(image)
        resized = resize(sample, resized_size(*sample.size, self.short, self.longest))
        return LoadedSample(resized, int(self.data.image_ids[index]), sample.size)


def collate(samples: Sequence[LoadedSample | DataError]) -> Batch | DataError:
    """Pads to a common size, a multiple of the coarsest stride; if samples are errors, returns the first error."""
    loaded: list[LoadedSample] = []
    for one in samples:
        if isinstance(one, DataError):
            return one
        loaded.append(one)
    sizes = tuple(one.sample.size for one in loaded)
    height, width = (-(-max(side) // SIZE_DIVISIBILITY) * SIZE_DIVISIBILITY for side in zip(*sizes, strict=True))
    pixels = torch.zeros(len(loaded), 3, height, width, dtype=torch.uint8)
    for row, one in zip(pixels, loaded, strict=True):
        row[:, : one.sample.size[0], : one.sample.size[1]] = one.sample.image
    targets = [_targets(one, height, width) for one in loaded]
    original_sizes, unreadable = [one.original_size for one in loaded], [one.unreadable for one in loaded]
    return Batch(Images(pixels, sizes), targets, original_sizes, unreadable)


def _targets(loaded: LoadedSample, height: int, width: int) -> Targets:
    """The ground truth of a sample, padded; the padding counts as valid background."""
    sample = loaded.sample
    padding = (0, width - sample.size[1], 0, height - sample.size[0])
    masks = F.pad(sample.masks, padding).bool()
    valid = None if sample.valid is None else F.pad(sample.valid, padding, value=1).bool()
    targets = Targets(sample.labels, mask_boxes(masks), masks, loaded.image_id, valid, sample.things)
    if loaded.classes is None:
        return targets
    negative, not_exhaustive = (torch.tensor(c, dtype=torch.int64) for c in astuple(loaded.classes))
    return replace(targets, negative_classes=negative, not_exhaustive_classes=not_exhaustive)


def raise_errors(batches: torch_data.DataLoader[Batch | DataError]) -> Iterator[Batch]:
    """The batches; an error that a worker returned is raised in this process, without the worker's traceback."""
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except BaseException as error:
        clear_frames(error.__traceback__)  # they hold the workers, for which python would wait forever at exit
        raise
