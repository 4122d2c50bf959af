"""What a run leaves in its folder at the start, and what it says."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from uniquery import __version__
from uniquery.data.dataset import Dataset
from uniquery.errors import ConfigError, UserError
from uniquery.files import make_folder, write_atomically
from uniquery.parallel import get_world_size
from uniquery.segmenters.mask2former import Mask2FormerConfig
from uniquery.training.checkpoint import has_checkpoint
from uniquery.training.config import Config, flat, parse_config, read_yaml, to_yaml
from uniquery.training.run import Run, choose_device, images_per_step

Resume = bool | Literal["auto"]

# The data may lie elsewhere; that it is the same data is checked by its content.
MAY_DIFFER_ON_RESUME = (
    "output",
    "data.workers",
    "data.train.annotations",
    "data.train.images",
    "data.val.annotations",
    "data.val.images",
    "train.batch_size",  # their product with the number of processes is checked when the checkpoint is read
    "train.accumulate",
    "train.log_every",
    "train.save_every",
    "train.save_minutes",
    "train.keep_last",
    "train.skip_nonfinite",
    "train.device",
    "train.tensorboard",
)


_ABSENT = "not set"


def should_resume(config: Config, resume: Resume) -> bool:
    """Whether a run goes on from a checkpoint.

    Raises:
        UserError: a new run would overwrite another, or there is nothing to resume.
        ConfigError: a resumed run is not the run it was.
    """
    folder = config.folder
    is_known, is_saved = (folder / "config.yaml").is_file(), has_checkpoint(folder)
    is_begun = is_saved or (is_known and (folder / "best").exists())
    if not resume:
        if is_begun:
            raise UserError(f"{folder} already holds a run: give --resume to go on with it, or another --name.")
        return False
    if not is_known and (resume != "auto" or is_saved):
        raise UserError(f"Nothing to resume: {folder / 'config.yaml'} is missing. Train without --resume first.")
    if resume != "auto" or is_begun:
        _check_unchanged(config)
    return resume != "auto" or is_saved


def _check_unchanged(config: Config) -> None:
    file = config.folder / "config.yaml"
    before, now = flat(parse_config(read_yaml(file), where=str(file))), flat(config)
    keys = [k for k in {**before, **now} if not k.startswith(MAY_DIFFER_ON_RESUME)]
    changed = [k for k in keys if before.get(k, _ABSENT) != now.get(k, _ABSENT)]
    if changed:
        changes = ", ".join(f"{k} was {before.get(k, _ABSENT)} and is {now.get(k, _ABSENT)}" for k in changed[:5])
        raise ConfigError(
            f"--resume of {config.folder} with another configuration: {changes}. Use another name for a new run."
        )


def open_folder(config: Config, *, is_new: bool = True) -> None:
    """Makes the folder of a run and says in it what it is; of a resumed run, where it now finds its data."""
    folder = make_folder(config.folder)
    write_atomically(folder / "config.yaml", to_yaml(config))
    if is_new:
        write_atomically(folder / "environment.json", json.dumps(environment(config), indent=2))


def environment(config: Config) -> dict[str, Any]:
    """What a run was made with."""
    return {
        "uniquery": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": str(choose_device(config.train.device)),
        "threads": torch.get_num_threads(),
        "processes": get_world_size(),
        "seed": config.seed,
        "command": " ".join(sys.argv),
    }


def print_summary(run: Run, data: Dataset, val: Dataset | None, console: Console) -> None:
    """Says what is about to happen, and what looks wrong."""
    settings = run.config.train
    images = images_per_step(run.config)
    trainable = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"[bold]{run.config.model.name}[/] on {run.config.backbone.name}: {total / 1e6:.1f} M parameters, "
        f"{trainable / 1e6:.1f} M of them trained, on {run.device}"
    )
    instances = int(data.instances_per_image().sum())
    console.print(
        f"train: {len(data)} images, {instances} instances, {len(data.categories)} classes; "
        f"val: {f'{len(val)} images' if val else 'none'}"
    )
    lr = max(group["initial_lr"] for group in run.optimizer.param_groups)
    console.print(
        f"{run.steps} steps of {settings.batch_size} × {settings.accumulate}{_processes()} = {images} images "
        f"({run.steps * images / len(data):.1f} epochs), lr {lr:.3g}"
    )
    for step in run.config.data.augment:
        console.print(f"  augment {step!r}")
    for warning in data.warnings[:3]:
        console.print(f"[yellow]warning:[/] {warning}")
    if len(data.warnings) > 3:
        console.print(f"[yellow]warning:[/] {len(data.warnings) - 3} more: uniquery data check")
    if not instances:
        console.print(
            "[yellow]warning:[/] the training data has no instances: all that can be learned is to find none."
        )
    _warn_of_crowds(run.config, data, console)


def _processes() -> str:
    return f" × {get_world_size()} processes" if get_world_size() > 1 else ""


def _warn_of_crowds(config: Config, data: Dataset, console: Console) -> None:
    most = int(data.instances_per_image().max())
    limits = {"model.max_detections": config.model.max_detections, "eval.max_detections": config.eval.max_detections}
    if isinstance(config.model, Mask2FormerConfig):
        limits["model.queries"] = config.model.queries
    for key, limit in limits.items():
        if most > limit:
            console.print(
                f"[yellow]warning:[/] an image has {most} instances, more than {key} = {limit}: some cannot be found."
            )
