"""What a run prints before its first step, and the environment that it records."""

from __future__ import annotations

import platform
import shlex
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from uniquery import __version__
from uniquery.data.dataset import Dataset
from uniquery.data.images import sixteen_bit_maximum, unused_bits
from uniquery.data.mirrored import similar_pairs
from uniquery.data.sampling import images_per_epoch
from uniquery.errors import DataError, list_some
from uniquery.evaluation.protocol import DETECTIONS
from uniquery.parallel import choose_device, get_world_size
from uniquery.training.config import Config
from uniquery.training.optim import warmup_steps
from uniquery.training.run import TrainingRun, images_per_step

SOME_IMAGES = 8
FEW_STEPS, FEW_EPOCHS = 200, 3  # shorter runs are warned about


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
        "command": shlex.join(sys.orig_argv),
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
    epochs = run.steps * images / images_per_epoch(data, run.config.data.sampling)
    console.print(
        f"{run.steps} steps of {settings.batch_size} × {settings.accumulate}{processes} = {images} images "
        f"({epochs:.1f} epochs), lr {lr:.3g}"
    )
    for augmentation in run.config.data.augment:
        console.print(f"  augment {augmentation!r}")
    for warning in [
        *length_warnings(run, data),
        *_flip_warnings(run.config, data),
        *_warnings(run.config, data),
        *_bit_warnings(data, run.config.data.bit_depth),
    ]:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def length_warnings(run: TrainingRun, data: Dataset) -> list[str]:
    """What is wrong with the length of a run."""
    schedule, steps = run.config.schedule, run.steps
    epochs = steps * images_per_step(run.config) / images_per_epoch(data, run.config.data.sampling)
    warnings = []
    warmup = warmup_steps(schedule, steps)
    if warmup < schedule.warmup_steps:
        warnings.append(
            f"schedule.warmup_steps = {schedule.warmup_steps} is more than a quarter of the {steps} steps: the warm-up "
            f"takes {warmup}."
        )
    if steps < FEW_STEPS or epochs < FEW_EPOCHS:
        warnings.append(
            f"{steps} steps ({epochs:.1f} epochs) are few, and the model may find nothing yet: some hundred steps and "
            f"{FEW_EPOCHS} epochs are the least; set train.steps or train.epochs."
        )
    return warnings


def _flip_warnings(config: Config, data: Dataset) -> list[str]:
    """Classes that flips would turn into one another."""
    flips = ["data.augment"] if any(a.is_mirror and getattr(a, "p", 0) for a in config.data.augment) else []
    if config.querying.equivariance and config.querying.equivariance.flip:
        flips.append("querying.equivariance.flip")
    known = {frozenset(pair) for pair in config.data.flip_pairs}
    pairs = [pair for pair in similar_pairs(data.classes) if frozenset(pair) not in known] if flips else []
    if not pairs:
        return []
    listed = list_some([f"{a} and {b}" for a, b in pairs], 3)
    setting = ", ".join(f"[{a}, {b}]" for a, b in pairs)
    return [
        f"flips ({', '.join(flips)}) may turn these classes into one another, and their labels become wrong: {listed}. "
        f"If so, swap them with data.flip_pairs=[{setting}], or leave the flips out."
    ]


def _bit_warnings(data: Dataset, bit_depth: int | None) -> list[str]:
    """16-bit images that use a small part of their range, or more than data.bit_depth; looks at some of the images."""
    maxima = []
    for index in range(0, len(data), max(1, len(data) // SOME_IMAGES)):
        with suppress(DataError):  # training meets it later
            maxima.append(sixteen_bit_maximum(data.path(index)))
    sentence = unused_bits([largest for largest in maxima if largest is not None], bit_depth)
    return [sentence] if sentence else []


def _warnings(config: Config, data: Dataset) -> list[str]:
    warnings = list(data.warnings[:3])
    if len(data.warnings) > 3:
        warnings = [*warnings, f"{len(data.warnings) - 3} more: uniquery data check"]
    counts = data.instances_per_image()
    if not counts.any():
        warnings = [*warnings, "the training data has no instances: the model can only learn to find nothing."]
    most = int(counts.max())
    protocol = config.eval.protocol or ("lvis" if all(data.frequencies) else "coco")
    evaluated = config.eval.max_detections or DETECTIONS[protocol]
    limits = {"model.max_detections": config.model.max_detections, "eval.max_detections": evaluated}
    limits |= dict([config.model.instance_limit] if config.model.instance_limit else [])
    crowded = [
        f"an image has {most} instances, more than {key} = {limit}: some cannot be found."
        for key, limit in limits.items()
        if most > limit
    ]
    return [*warnings, *crowded]
