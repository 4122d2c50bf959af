"""What a run prints before its first step, and the environment that it records."""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
import torch
from rich.console import Console

from uniquery import __version__
from uniquery.data.dataset import Dataset
from uniquery.parallel import choose_device, get_world_size
from uniquery.training.config import Config
from uniquery.training.run import TrainingRun, images_per_step


def environment(config: Config) -> dict[str, Any]:
    """Versions, device, seed and command of a run."""
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


def print_summary(run: TrainingRun, data: Dataset, val: Dataset | None, console: Console) -> None:
    """Prints model, data and length of a run, and warnings."""
    settings = run.config.train
    images = images_per_step(run.config)
    trainable = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"[bold]{run.config.model.name}[/] on {run.config.backbone.name}: {total / 1e6:.1f} M parameters, "
        f"{trainable / 1e6:.1f} M of them trainable, on {run.device}"
    )
    instances = int(data.instances_per_image().sum())
    console.print(
        f"train: {len(data)} images, {instances} instances, {len(data.categories)} classes; "
        f"val: {f'{len(val)} images' if val else 'none'}"
    )
    lr = max(group["initial_lr"] for group in run.optimizer.param_groups)
    processes = f" × {get_world_size()} processes" if get_world_size() > 1 else ""
    console.print(
        f"{run.steps} steps of {settings.batch_size} × {settings.accumulate}{processes} = {images} images "
        f"({run.steps * images / len(data):.1f} epochs), lr {lr:.3g}"
    )
    for augmentation in run.config.data.augment:
        console.print(f"  augment {augmentation!r}")
    for warning in _warnings(run.config, data):
        console.print(f"[yellow]warning:[/] {warning}")


def _warnings(config: Config, data: Dataset) -> list[str]:
    warnings = list(data.warnings[:3])
    if len(data.warnings) > 3:
        warnings = [*warnings, f"{len(data.warnings) - 3} more: uniquery data check"]
    counts = data.instances_per_image()
    if not counts.any():
        warnings = [*warnings, "the training data has no instances: the model can only learn to find nothing."]
    most = int(counts.max())
    limits = {"model.max_detections": config.model.max_detections, "eval.max_detections": config.eval.max_detections}
    limits |= dict([config.model.instance_limit] if config.model.instance_limit else [])
    crowded = [
        f"an image has {most} instances, more than {key} = {limit}: some cannot be found."
        for key, limit in limits.items()
        if most > limit
    ]
    return [*warnings, *crowded]
