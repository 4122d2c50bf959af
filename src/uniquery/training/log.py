"""What a run tells: phase times, json lines, TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from uniquery.errors import UserError
from uniquery.files import write_atomically

PHASES = ("data", "forward", "assign", "loss", "backward", "step")


class PhaseClock:
    """Time per phase of a step. On a GPU, events are recorded and read only when asked for, so nothing waits.

    Attributes:
        phase: the one that began last.
        steps: taken since the times were read.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.steps = 0
        self.phase = PHASES[0]
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.phase = phase
        if self.cuda and phase != "data":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((phase, start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Mean seconds of each phase since the last call."""
        if self._events:
            torch.cuda.synchronize()
            for phase, start, end in self._events:
                self._seconds[phase] += start.elapsed_time(end) / 1000
            self._events.clear()
        means = {phase: seconds / max(self.steps, 1) for phase, seconds in self._seconds.items()}
        self.steps = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return means


class MetricsLog:
    """`metrics.jsonl`, one object a line, and TensorBoard if asked for."""

    def __init__(
        self, folder: Path, *, tensorboard: bool = False, keep_until: int = 0, evaluated_until: int = 0
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self._forget_after(keep_until, evaluated_until)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder, keep_until) if tensorboard else None

    def _forget_after(self, step: int, evaluated: int) -> None:
        """A resumed run repeats the steps and the evaluations after its checkpoint: their lines would stand twice."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
                if values["step"] <= (evaluated if values["kind"] == "eval" else step):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a killed run may be cut off
        write_atomically(self.path, "".join(line + "\n" for line in kept))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Adds a line.

        Raises:
            UserError: the system refuses, a full disk for one.
        """
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from None
        if self._board is not None:
            for name, value in _scalars(values):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Makes sure that the lines are on the disk: a checkpoint must not know more than its log.

        Raises:
            UserError: the system refuses.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(f"Cannot write {self.path}: {error.strerror or error}.")

    def close(self) -> None:
        """Flushes and closes."""
        with suppress(OSError):  # a line that a full disk refused, which was told when it was written
            self._file.close()
        if self._board is not None:
            self._board.close()


class SilentLog(MetricsLog):
    """Writes nothing: the log of all processes but the first."""

    def __init__(self) -> None:
        pass

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _scalars(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)


def _tensorboard(folder: Path, keep_until: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard is on: pip install 'uniquery[tensorboard]'.") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=keep_until + 1)
