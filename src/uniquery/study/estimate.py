"""How long the runs of a study will take, from a few measured steps."""

from __future__ import annotations

from collections.abc import Sequence

from uniquery.study.plan import PlannedRun
from uniquery.training.dry_run import seconds_per_step


def estimate_runs(runs: Sequence[PlannedRun]) -> dict[str, float]:
    """Seconds of training of each run by its name; each variant is measured once on each data set."""
    measured: dict[tuple[str, str | None], float] = {}
    for run in runs:
        if (run.data, run.variant) not in measured:
            seconds, steps = seconds_per_step(run.config)
            measured[run.data, run.variant] = seconds * steps
    return {run.name: measured[run.data, run.variant] for run in runs}
