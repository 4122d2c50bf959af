"""The data of a run, and the batches of its steps."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from uniquery.data.batch import Batch, TrainingSamples, collate, raise_errors
from uniquery.data.coco import CocoData
from uniquery.data.dataset import Dataset
from uniquery.data.sampling import EndlessBatches
from uniquery.errors import CheckpointError, ConfigError, UserError
from uniquery.parallel import get_rank, get_world_size
from uniquery.signals import ignore_signals
from uniquery.training.config import Config
from uniquery.training.run import Run

_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)")


def load_splits(config: Config) -> tuple[Dataset, Dataset | None]:
    """The training and the validation data of an experiment."""
    data = config.data
    if data.train is None:
        raise ConfigError(
            "There is no training data: give --train ANNOTATIONS IMAGES, or data.train in the configuration."
        )
    train_data = CocoData(
        data.train.annotations,
        data.train.images,
        classes=data.classes,
        keep_empty=data.keep_empty,
        ignore_crowd=data.ignore_crowd,
    )
    train_data.check_files_exist()
    if data.val is None:
        return train_data, None
    val = CocoData(data.val.annotations, data.val.images, classes=train_data.classes)
    val.check_files_exist()
    return train_data, val


def fingerprints(data: Dataset, val: Dataset | None) -> dict[str, int]:
    """A checksum of the images and instances of each split, wherever its files lie."""
    return {name: split.checksum() for name, split in (("train", data), ("val", val)) if split is not None}


def check_data_unchanged(before: dict[str, int] | None, now: dict[str, int]) -> None:
    """Raises if the data of a run is not what it was when its checkpoint was written.

    Raises:
        CheckpointError: names the split.
    """
    for name in {**now, **before} if before is not None else ():
        if (before or {}).get(name) != now.get(name):
            raise CheckpointError(
                f"The images or instances of data.{name} are not those that the run was started with: give it the same "
                "data, or start a new run, with train.init_from if its weights are to be used."
            )


def training_batches(
    run: Run, data: Dataset, *, steps: tuple[int, int] | None = None, workers: int | None = None
) -> Generator[Batch, None, None]:
    """The batches from the run's step to its last, or of the given half-open range of steps.

    Raises:
        DataError: an image cannot be read.
    """
    settings = run.config.train
    first, last = steps or (run.step, run.steps)
    sampler = EndlessBatches(
        len(data),
        settings.batch_size // run.config.querying.forwards_per_scene,
        run.config.seed,
        first_step=first * settings.accumulate,
        last_step=last * settings.accumulate,
        rank=get_rank(),
        ranks=get_world_size(),
    )
    loader: DataLoader[Any] = DataLoader(
        TrainingSamples(data, run.config.data.augment, run.config.seed),
        batch_sampler=sampler,
        num_workers=run.config.data.workers if workers is None else workers,
        collate_fn=collate,
        pin_memory=run.device.type == "cuda",
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # else each loader would draw its base seed from the global generator
    )
    yield from raise_errors(loader)


@contextmanager
def workers_explained() -> Iterator[None]:
    """Tells in one sentence that a data worker is gone; torch says so in the middle of whatever is being done.

    An error that was raised in a worker arrives with the worker's traceback, and goes on as it is.

    Raises:
        UserError: the system, or somebody, killed a worker.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:  # in the middle of sending, the connection breaks first
        reason = str(error).partition("\n")[0]
        is_gone = _WORKER_DIED.match(reason) if isinstance(error, RuntimeError) else not reason.startswith("Caught ")
        if not is_gone:
            raise
        raise UserError(
            f"A data worker was ended from outside, most often for want of memory ({reason}): "
            "lower data.workers or the sizes in data.augment, then go on with --resume auto."
        ) from None
