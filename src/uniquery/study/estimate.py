"""How long the runs of a study will take, from a few measured steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean

import torch

from uniquery.study.plan import PlannedRun
from uniquery.training.batches import load_splits, training_batches
from uniquery.training.config import Config
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.run import build_run
from uniquery.training.step import compute_gradients, update_weights

_MEASURED_STEPS = 3


def seconds_per_step(config: Config) -> tuple[float, int]:
    """Mean seconds of a training step, and the number of steps of the run; nothing is written."""
    torch.manual_seed(config.seed)
    data, _ = load_splits(config)
    run = build_run(config, data, pretrained=False)
    clock, times = PhaseClock(run.device), []
    count = min(_MEASURED_STEPS, run.steps)
    with closing(training_batches(run, data, steps=(0, count), workers=0)) as batches:
        for _ in range(count):
            start = time.perf_counter()
            result = compute_gradients(run, batches, clock)
            update_weights(run, result.grad_norm, clock)
            run.step += 1
            times.append(time.perf_counter() - start)
    return fmean(times[1:] or times), run.steps  # the first step is slower


def estimate_runs(runs: Sequence[PlannedRun]) -> dict[str, float]:
    """Seconds of training of each run by its name; each variant is measured once on each data set."""
    measured: dict[tuple[str, str | None], float] = {}
    for run in runs:
        if (run.data, run.variant) not in measured:
            seconds, steps = seconds_per_step(run.config)
            measured[run.data, run.variant] = seconds * steps
    return {run.name: measured[run.data, run.variant] for run in runs}
