"""Samples as training gets them, drawn as a contact sheet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from uniquery.data.augment import Augmentation, Sample, augment
from uniquery.data.batch import load_random
from uniquery.data.dataset import Dataset
from uniquery.data.mirrored import mirrored_labels
from uniquery.masks import rle
from uniquery.report.drawings import LabeledMask, grid, overlay
from uniquery.report.text_labels import Picture

EPOCHS = 4
_STRIPE = 6  # pixels between the hatch lines of regions that are not valid


def preview_picture(
    data: Dataset,
    augmentations: Sequence[Augmentation],
    seed: int,
    rows: int,
    flip_pairs: Sequence[tuple[str, str]] = (),
) -> Picture:
    """A row for each of some images, spread over the data: the image as it is, then as in epochs 0 to 3.

    Regions that are not valid, which training ignores, are gray and hatched.
    """
    pictures, titles = [], []
    mirrored = mirrored_labels(data.categories, flip_pairs)
    for index in range(0, len(data), max(1, len(data) // rows))[:rows]:
        sample = data.load(index)
        pictures.append(sample_picture(sample, data.classes))
        titles.append(data.path(index).name)
        for epoch in range(EPOCHS):
            rng = np.random.default_rng([seed, epoch, index])
            augmented = augment(sample, augmentations, rng, partial(load_random, data), mirrored)
            pictures.append(sample_picture(augmented, data.classes))
            titles.append(f"epoch {epoch}: {augmented.size[1]} x {augmented.size[0]}")
    return grid(pictures, 1 + EPOCHS, titles)


def sample_picture(sample: Sample, classes: Sequence[str]) -> Picture:
    """(H, W, 3) uint8: a sample with its instances drawn over it, and what is not valid gray and hatched."""
    image = sample.image.permute(1, 2, 0).contiguous().numpy()
    if sample.valid is not None:
        image = _hatch(image, sample.valid.numpy() == 0)
    instances = [
        LabeledMask(rle.encode(mask.numpy()), classes[int(label)])
        for mask, label in zip(sample.masks, sample.labels, strict=True)
    ]
    return overlay(image, instances)


def _hatch(image: Picture, region: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Picture:
    """The image with a region in gray under diagonal white lines."""
    gray = np.repeat(image.mean(2, keepdims=True) * 0.5 + 64, 3, axis=2).astype(np.uint8)
    rows, columns = np.indices(region.shape)
    gray[(rows + columns) % _STRIPE == 0] = 255
    return np.where(region[..., None], gray, image)
