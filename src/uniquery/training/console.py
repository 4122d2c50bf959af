"""What a run prints while it trains: a progress bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

_BAR_WIDTH = 20


class _NoteColumn(ProgressColumn):
    """The note of a task on one line; on a narrow terminal it is cut, and nothing else."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


def training_progress(console: Console) -> Progress:
    """Progress bars whose tasks have a field `note`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(_BAR_WIDTH, table_column=Column(no_wrap=True)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _NoteColumn(),
        console=console,
        transient=True,
    )


def loss_note(losses: Mapping[str, float], lr: float, seconds: Mapping[str, float]) -> str:
    """Loss with its terms, time per step and learning rate as text.

    >>> loss_note({"loss_class": 0.5, "loss_mask": 1.25}, 0.001, {"data": 0.5, "forward": 1.5})
    'loss 1.750 (class 0.500, mask 1.250)  2.00 s/step (data 0.50)  lr 0.001'
    """
    terms = ", ".join(f"{name.removeprefix('loss_')} {loss:.3f}" for name, loss in losses.items())
    times = f"{sum(seconds.values()):.2f} s/step (data {seconds['data']:.2f})"
    return f"loss {sum(losses.values()):.3f} ({terms})  {times}  lr {lr:.2g}"


class RemainingTime:
    """How long a run still takes, from the time of its steps and evaluations so far.

    Args:
        step: the step at which this process begins.
    """

    def __init__(self, step: int) -> None:
        self._first, self._start = step, time.monotonic()

    def __call__(self, step: int, steps: int) -> str:
        """The time as h:mm:ss."""
        done = max(step - self._first, 1)
        seconds = (time.monotonic() - self._start) / done * (steps - step)
        return str(timedelta(seconds=round(seconds)))
