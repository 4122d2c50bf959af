"""Predictions of a model, on images and on data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from uniquery.data.augment import TestSize, image_only, resize, resized_size
from uniquery.data.batch import Batch, EvaluationSamples, LoadedSample, collate, raise_errors
from uniquery.data.dataset import Dataset, Row
from uniquery.querying.contract import Segmenter
from uniquery.signals import ignore_signals
from uniquery.structures import Instances

Progress = Callable[[int, int], None]


def part_of(progress: Progress, number: int, parts: int) -> Progress:
    """What a part of some work calls with its own progress: the part `number`, from 0, of parts that take as long.

    >>> part_of(print, 1, 4)(5, 10)
    15 40
    """
    return lambda done, total: progress(number * total + done, parts * total)


@torch.inference_mode()
def forward_passes(
    model: Segmenter[Any, Any, Any],
    samples: EvaluationSamples,
    *,
    batch_size: int = 1,
    workers: int = 0,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[Batch, Any]]:
    """Each batch of some images, and what the model's forward gives for it.

    Images that the samples skip because they cannot be read are given as a sentence to `on_unreadable`; in the batch
    they are `unreadable`.
    """
    device = next(model.parameters()).device
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # otherwise an evaluation would change the random numbers of training
    )
    model.eval()
    done = 0
    for batch in raise_errors(loader):
        for unreadable in batch.unreadable:
            for sentence in unreadable:
                on_unreadable(sentence)
        yield batch, model(batch.images.to(device))
        done += len(batch.images)
        progress(done, len(samples))


@torch.inference_mode()
def predict_samples(
    model: Segmenter[Any, Any, Any],
    samples: EvaluationSamples,
    *,
    mask_thresholds: Sequence[float | None] = (None,),
    batch_size: int = 1,
    workers: int = 0,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[int, list[Instances]]]:
    """(image id, its instances at each mask threshold) for every image, once; None is the model's own threshold.

    Images that the samples skip because they cannot be read are left out, and given as a sentence to `on_unreadable`.
    """
    passes = forward_passes(
        model, samples, batch_size=batch_size, workers=workers, progress=progress, on_unreadable=on_unreadable
    )
    for batch, outputs in passes:
        at_thresholds = [model.predict(outputs, batch.original_sizes, mask_threshold=t) for t in mask_thresholds]
        for target, unreadable, *instances in zip(batch.targets, batch.unreadable, *at_thresholds, strict=True):
            if not unreadable:
                yield target.image_id, instances


def predict_dataset(
    model: Segmenter[Any, Any, Any],
    data: Dataset,
    classes: Sequence[str],
    size: TestSize,
    *,
    mask_thresholds: Sequence[float | None] = (None,),
    batch_size: int = 1,
    workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] | None = None,
) -> dict[float | None, list[Row]]:
    """COCO results of a model on a data set, by mask threshold; None is the model's own threshold.

    Args:
        model: what predicts.
        data: its images; with several ranks, each rank predicts every `ranks`-th image.
        classes: the model's class names, by label.
        size: how images are resized.
        mask_thresholds: all are applied to the same forward pass.
        batch_size: images of one forward pass.
        workers: processes that load images.
        rank: this process.
        ranks: how many processes share the images.
        progress: called with how many images are done, and how many there are.
        on_unreadable: called with a sentence for each image that cannot be read, which then has no results; None
            raises a DataError instead.
    """
    samples = EvaluationSamples(data, size.short, size.longest, rank, ranks, skip_unreadable=on_unreadable is not None)
    category_ids = category_ids_by_name(classes, data)
    results: dict[float | None, list[Row]] = {threshold: [] for threshold in mask_thresholds}
    predictions = predict_samples(
        model,
        samples,
        mask_thresholds=mask_thresholds,
        batch_size=batch_size,
        workers=workers,
        progress=progress,
        on_unreadable=on_unreadable or (lambda _: None),
    )
    for image_id, at_thresholds in predictions:
        for threshold, instances in zip(mask_thresholds, at_thresholds, strict=True):
            results[threshold] += instances.to_coco(image_id, category_ids)
    return results


@torch.inference_mode()
def predict_image(
    model: Segmenter[Any, Any, Any],
    image: npt.NDArray[np.uint8],
    short: int,
    longest: int,
    *,
    mask_threshold: float | None = None,
) -> Instances:
    """The instances of one (H, W, 3) image, at its own size; the model gets it with the given short side."""
    outputs = image_outputs(model, image, short, longest)
    return model.predict(outputs, [(image.shape[0], image.shape[1])], mask_threshold=mask_threshold)[0]


@torch.inference_mode()
def image_outputs(model: Segmenter[Any, Any, Any], image: npt.NDArray[np.uint8], short: int, longest: int) -> Any:
    """What the model's forward gives for one (H, W, 3) image, resized to the given short side."""
    sample = image_only(image)
    batch = collate([LoadedSample(resize(sample, resized_size(*sample.size, short, longest)), 0, sample.size)])
    assert isinstance(batch, Batch)
    return model(batch.images.to(next(model.parameters()).device))


def category_ids_by_name(classes: Sequence[str], data: Dataset) -> list[int | None]:
    """Label of the model → category id of the data set, by name."""
    ids = {c.name: c.id for c in data.categories}
    return [ids.get(name) for name in classes]
