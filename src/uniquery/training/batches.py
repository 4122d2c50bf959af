"""The data of a run, and the batches of its steps."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import DataLoader

from uniquery.data.batch import Batch, TrainingSamples, collate, raise_errors
from uniquery.data.coco import CocoData
from uniquery.data.dataset import Dataset, is_panoptic
from uniquery.data.images import is_file
from uniquery.data.mirrored import mirrored_labels
from uniquery.data.open import open_data
from uniquery.data.sampling import StepBatchSampler, repeat_factors
from uniquery.errors import ConfigError, DataError, UserError
from uniquery.parallel import get_rank, get_world_size
from uniquery.segmenters import segmenters_with
from uniquery.signals import ignore_signals
from uniquery.training.config import Config, EvalConfig, SplitConfig
from uniquery.training.run import TrainingRun

_WORKER_KILLED = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)")


def load_splits(config: Config) -> tuple[Dataset, Dataset | None]:
    """The training and the validation data of an experiment."""
    data = config.data
    if data.train is None:
        raise ConfigError(
            "There is no training data: give --train ANNOTATIONS IMAGES, or data.train in the configuration."
        )
    with hint_at_option("--train", data.train):
        train_data = open_data(
            data.train.annotations,
            data.train.images,
            pngs=data.train.panoptic_pngs,
            classes=data.classes,
            keep_empty=data.keep_empty,
            ignore_crowd=data.ignore_crowd,
            bit_depth=data.bit_depth,
        )
        _check_panoptic(config, train_data, train_data)
        train_data.check_files_exist()
    if data.val is None:
        return train_data, None
    with hint_at_option("--val", data.val):
        val = open_validation_data(data.val, train_data.classes, data.bit_depth)
        _check_panoptic(config, train_data, val)
        val.check_files_exist()
    _check_protocol(val, config.eval)
    if data.classes is None:
        check_classes_known(val, train_data.classes)
    return train_data, val


def _check_panoptic(config: Config, train: Dataset, split: Dataset) -> None:
    """Raises a ConfigError if a split needs a panoptic segmenter and has none, or is of another kind than training."""
    if is_panoptic(split.categories) and not config.model.supports_panoptic:
        others = " or ".join(segmenters_with("supports_panoptic"))
        raise ConfigError(
            f"{config.model.name} segments instances only, but {split.annotations} is panoptic: use instance "
            f"annotations, or a segmenter for things and stuff (model.name={others})."
        )
    if is_panoptic(split.categories) != is_panoptic(train.categories):
        raise ConfigError(
            f"One of {train.annotations} and {split.annotations} is panoptic and the other is not: train and validate "
            "on the same kind of annotations."
        )


def check_classes_known(data: CocoData, classes: Sequence[str]) -> None:
    """Checks that all instances of a data set are of classes that a model has; it need not have instances of all.

    Raises:
        DataError: there are others, which would silently not be scored.
    """
    if data.unused:
        name, count = next(iter(data.unused.items()))
        known = f"{', '.join(classes[:8])}{', …' * (len(classes) > 8)}"
        raise DataError(
            f"{data.annotations} has {count} annotations of the class '{name}', which the training data does not have; "
            f"its classes are {known}. Rename the class, or train with data.classes, which leaves all others out."
        )


@contextmanager
def hint_at_option(option: str, split: SplitConfig) -> Iterator[None]:
    """Adds a hint to an error in the block if the files of a split are not there.

    Raises:
        DataError: an error of the block.
    """
    try:
        yield
    except DataError as error:
        if is_file(split.annotations) and split.images.is_dir():
            raise
        raise DataError(f"{error} Say where the data is with {option} ANNOTATIONS IMAGES.") from None


def _check_protocol(val: Dataset, settings: EvalConfig) -> None:
    """Raises before the training if the metrics cannot be computed after it."""
    if is_panoptic(val.categories):
        if settings.protocol is not None:
            raise ConfigError(
                f"eval.protocol {settings.protocol} is for instances, but {val.annotations} is panoptic and is scored "
                "by panoptic quality: leave it out."
            )
        return
    without = [name for name, frequency in zip(val.classes, val.frequencies, strict=True) if frequency is None]
    if settings.protocol == "lvis" and without:
        raise DataError(
            f"{val.annotations}: the class {without[0]} has no 'frequency' (r, c or f), which eval.protocol lvis "
            "needs: add it, or use coco."
        )
    is_lvis = settings.protocol == "lvis" or (settings.protocol is None and not without)
    if is_lvis and settings.backend != "hotcoco":
        raise ConfigError(f"LVIS metrics need eval.backend hotcoco, not {settings.backend}; or use eval.protocol coco.")


def open_validation_data(split: SplitConfig, classes: Sequence[str], bit_depth: int | None = None) -> CocoData:
    """Validation data with those classes of a model that it has; the same object while the file is unchanged.

    So training, diagnosis and the pictures of the report parse it once.

    Raises:
        DataError: something is wrong with the data.
    """
    modified = split.annotations.stat().st_mtime_ns if split.annotations.is_file() else None
    return _open_cached(split, tuple(classes), bit_depth, modified)


@lru_cache(maxsize=2)
def _open_cached(
    split: SplitConfig, classes: tuple[str, ...], bit_depth: int | None, _modified: int | None
) -> CocoData:
    return open_data(
        split.annotations,
        split.images,
        pngs=split.panoptic_pngs,
        classes=classes,
        allow_missing=True,
        bit_depth=bit_depth,
    )


def data_checksums(data: Dataset, val: Dataset | None) -> dict[str, int]:
    """A checksum of the images and instances of each split, independent of where its files are."""
    return {name: split.checksum() for name, split in (("train", data), ("val", val)) if split is not None}


def training_batches(
    run: TrainingRun, data: Dataset, *, steps: tuple[int, int] | None = None, workers: int | None = None
) -> Generator[Batch, None, None]:
    """The batches from the run's step to its last, or of a range `(first, last + 1)` of steps.

    Raises:
        DataError: an image cannot be read.
    """
    settings = run.config.train
    first, last = steps or (run.step, run.steps)
    sampler = StepBatchSampler(
        len(data),
        settings.batch_size // run.config.querying.forwards_per_image,
        run.config.seed,
        first_step=first * settings.accumulate,
        last_step=last * settings.accumulate,
        rank=get_rank(),
        ranks=get_world_size(),
        factors=repeat_factors(data, run.config.data.sampling),
    )
    loader: DataLoader[Any] = DataLoader(
        training_samples(run, data),
        batch_sampler=sampler,
        num_workers=run.config.data.workers if workers is None else workers,
        collate_fn=collate,
        pin_memory=run.device.type == "cuda",
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # otherwise the loader draws its base seed from the global generator
    )
    yield from raise_errors(loader)


def training_samples(run: TrainingRun, data: Dataset) -> TrainingSamples:
    """The augmented samples that a run trains on."""
    settings = run.config.data
    return TrainingSamples(
        data,
        settings.augment,
        run.config.seed,
        federated=settings.federated,
        skip_unreadable=settings.on_unreadable == "skip",
        mirrored=mirrored_labels(data.categories, settings.flip_pairs),
    )


@contextmanager
def explain_killed_workers() -> Iterator[None]:
    """Turns torch's error about a killed data worker, which may come at any place of the block, into one sentence.

    An error that was raised inside a worker has the worker's traceback, and is passed on.

    Raises:
        UserError: a worker process was killed.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:  # while it was sending, its connection breaks first
        reason = str(error).partition("\n")[0]
        is_killed = (
            _WORKER_KILLED.match(reason) if isinstance(error, RuntimeError) else not reason.startswith("Caught ")
        )
        if not is_killed:
            raise
        raise UserError(
            f"A data worker process was killed, most often because memory ran out ({reason}): "
            "lower data.workers or the sizes in data.augment, then continue with --resume auto."
        ) from None
