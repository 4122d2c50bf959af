"""What training a row of the paper needs on this machine, from a few measured steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from uniquery.data.sampling import images_per_epoch
from uniquery.data.scenes import ScenesConfig, make_scenes
from uniquery.errors import ConfigError
from uniquery.paper import PaperData, config_name, read_paper
from uniquery.training.batches import load_splits
from uniquery.training.config import Config, SplitConfig, load_config
from uniquery.training.config_files import Override
from uniquery.training.dry_run import Forecast, count_evaluations, measure_config
from uniquery.training.run import count_steps

DRAWN = ScenesConfig(train_images=1, val_images=2, size=640, crowding=20)
"""Images in place of missing data: as large as most of COCO's, and more crowded than most."""


@dataclass(frozen=True)
class RowForecast:
    """The forecast of a row.

    Attributes:
        forecast: steps, time and memory.
        is_drawn: whether drawn images were measured, because the data is not there.
    """

    forecast: Forecast
    is_drawn: bool


def row_config(table: str, row: str, overrides: Sequence[Override] = ()) -> Config:
    """The configuration of a row.

    Raises:
        ConfigError: there is no such row, or an override is wrong.
    """
    read_paper().table(table).row(row)
    return load_config(config_name(table, row), overrides)


def split_batch(config: Config, processes: int) -> Config:
    """A row for one of several processes: together they have the row's batch.

    Raises:
        ConfigError: the batch cannot be divided among so many.
    """
    batch, smallest = config.train.batch_size, config.querying.forwards_per_image
    if batch % (processes * smallest):
        possible = [str(n) for n in range(1, batch + 1) if batch % (n * smallest) == 0]
        raise ConfigError(
            f"A batch of {batch} images cannot be divided among {processes} processes"
            f"{', as views come in pairs' if smallest > 1 else ''}; possible numbers: {', '.join(possible)}."
        )
    return config.model_copy(update={"train": config.train.model_copy(update={"batch_size": batch // processes})})


def forecast_row(config: Config, data: PaperData, processes: int) -> RowForecast:
    """Measures a few steps of a row as one of several processes has them.

    Args:
        config: of the row.
        data: what the row is trained on; if its files are not there, drawn images are measured.
        processes: how many will train together; the time of their communication is not measured.
    """
    one = split_batch(config, processes)
    if has_data(config):
        train, val = load_splits(config)
        measured = measure_config(one, train, val)
        images, val_images = images_per_epoch(train, config.data.sampling), len(val) if val is not None else 0
    else:
        with drawn_data(one, data.classes) as drawn:
            measured = measure_config(drawn, *load_splits(drawn))
        images, val_images = float(data.train_images), data.val_images
    steps = count_steps(config.train, images, config.train.batch_size * config.train.accumulate)
    measured = replace(measured, processes=processes)
    forecast = Forecast(measured, steps, count_evaluations(config, steps), val_images)
    return RowForecast(forecast, is_drawn=not has_data(config))


def has_data(config: Config) -> bool:
    """Whether the files of all splits are there."""
    splits = [split for split in (config.data.train, config.data.val) if split is not None]
    return all(split.annotations.is_file() and split.images.is_dir() for split in splits)


@contextmanager
def drawn_data(config: Config, classes: int, scenes: ScenesConfig = DRAWN) -> Iterator[Config]:
    """The configuration on drawn images in a temporary folder, in the form of its data and with as many classes."""
    form = {
        "panoptic": config.data.train is not None and "panoptic" in config.data.train.annotations.name,
        "lvis": config.data.sampling is not None,
    }
    scenes = scenes.model_copy(update={**form, "train_images": max(scenes.train_images, config.train.batch_size)})
    with TemporaryDirectory(prefix="uniquery-") as folder:
        files = make_scenes(Path(folder) / "scenes", scenes)
        splits = {}
        for split in ("train", "val"):
            _add_classes(files.annotations(split), classes)
            splits[split] = SplitConfig(annotations=files.annotations(split), images=files.images(split))
        yield config.model_copy(update={"data": config.data.model_copy(update=splits)})


def _add_classes(annotations: Path, classes: int) -> None:
    """Adds classes without instances to a json, so that the model is as large as with the real data."""
    content: dict[str, Any] = json.loads(annotations.read_text())
    rows = content["categories"]
    first = max(row["id"] for row in rows) + 1
    rows += [{**rows[-1], "id": first + n, "name": f"class {first + n}"} for n in range(classes - len(rows))]
    annotations.write_text(json.dumps(content))


def default_processes() -> int:
    """The GPUs of this machine; without any, the eight of the paper."""
    return torch.cuda.device_count() or 8
