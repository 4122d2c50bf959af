"""How long the runs of a study will take, from a few measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from uniquery.study.plan import PlannedRun
from uniquery.training.dry_run import seconds_per_step


def estimate_runs(runs: Sequence[PlannedRun], threads: int | None = None) -> dict[str, float]:
    """Seconds of training of each run by its name; each variant is measured once on each data set.

    Args:
        runs: which.
        threads: of a run; None: as many as torch has now.
    """
    measured: dict[tuple[str, str | None], float] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        for run in runs:
            if (run.data, run.variant) not in measured:
                seconds, steps = seconds_per_step(run.config)
                measured[run.data, run.variant] = seconds * steps
    finally:
        torch.set_num_threads(before)
    return {run.name: measured[run.data, run.variant] for run in runs}


def total_seconds(runs: Sequence[PlannedRun], seconds: Mapping[str, float], jobs: int) -> float:
    """Seconds until all runs are done, `jobs` at a time; those that start from a base wait for it."""
    bases = [seconds[run.name] for run in runs if run.variant is None]
    others = [seconds[run.name] for run in runs if run.variant is not None]
    return _in_parallel(bases, jobs) + _in_parallel(others, jobs)


def _in_parallel(seconds: Sequence[float], jobs: int) -> float:
    return max(sum(seconds) / jobs, *seconds) if seconds else 0.0
