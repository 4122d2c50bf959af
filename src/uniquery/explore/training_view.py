"""A run while it trains: its curves, how far it is, and how long it still takes."""

from __future__ import annotations

import time
from typing import Any

from uniquery.explore.runs import ExploredRun
from uniquery.report.runs import RunRecord, load_run
from uniquery.training.log import finite

RECENT = 10
"""The lines of training that the remaining time rests on."""
QUIET_SECONDS = 120.0
"""A run that has written nothing for so long, and for ten of its own log intervals, is not training any more."""


def training_state(run: ExploredRun, now: float | None = None) -> dict[str, Any] | None:
    """Curves and state, ready for json; None for a model without a run.

    Args:
        run: the run.
        now: seconds since the epoch; the clock's time by default.

    Raises:
        UserError: its log cannot be read.
    """
    folder = run.folder
    if folder is None:
        return None
    record = load_run(folder.path)
    steps = _planned_steps(record)
    quiet = (time.time() if now is None else now) - folder.metrics_file.stat().st_mtime
    finished = steps is not None and record.steps >= steps
    seconds = _seconds_per_step(record)
    is_training = not finished and quiet < max(QUIET_SECONDS, 10 * seconds * _log_interval(record))
    losses = sorted({name for line in record.train for name in line.losses})
    headline = record.final.headline if record.final else "AP"
    return {
        "status": "finished" if finished else "training" if is_training else "stopped",
        "step": record.steps,
        "steps": steps,
        "remaining": round(_remaining(record, steps, seconds)) if is_training and steps else None,
        "quiet": round(quiet),
        "train_steps": [line.step for line in record.train],
        "losses": {"total": [finite(line.total) for line in record.train]}
        | {name: [finite(line.losses.get(name)) for line in record.train] for name in losses},
        "lr": [finite(line.lr) for line in record.train],
        "headline": headline,
        "eval_steps": [line.step for line in record.evals],
        "scores": [line.score for line in record.evals],
        "skipped": len(record.skipped),
        "diagnosis": dict(record.diagnosis),
        "version": run.version,
    }


def _planned_steps(record: RunRecord) -> int | None:
    """How many steps the run is to take; None if its files do not say it."""
    text = record.config.get("train.steps", "")
    if text.isdecimal():
        return int(text)
    try:
        epochs, each = float(record.config["train.epochs"]), float(record.environment["steps_per_epoch"])
    except (KeyError, ValueError):
        return None
    return max(1, round(epochs * each))


def _seconds_per_step(record: RunRecord) -> float:
    recent = record.train[-RECENT:]
    totals = [sum(finite(value) or 0.0 for value in line.seconds.values()) for line in recent]
    return sum(totals) / len(totals) if totals else 0.0


def _log_interval(record: RunRecord) -> int:
    steps = [line.step for line in record.train[-2:]]
    return steps[1] - steps[0] if len(steps) == 2 else 1


def _remaining(record: RunRecord, steps: int | None, seconds: float) -> float:
    """Seconds of the steps that are left, and of the evaluations that fall into them."""
    left = max(0, (steps or 0) - record.steps)
    total = left * seconds
    times = [line.seconds for line in record.evals if line.seconds]
    text = record.config.get("train.eval_every", "")
    if times and text.isdecimal():
        total += left / int(text) * sum(times) / len(times)
    return total
