"""Seconds of each phase of a training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "forward", "assign", "loss", "backward", "step")


class PhaseClock:
    """Seconds per phase of a step. On a GPU it records events, which only `pop_means` waits for.

    Attributes:
        phase: the phase that began last.
        steps: training steps since the last `pop_means`.
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
            start_time = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - start_time

    def pop_means(self) -> dict[str, float]:
        """Mean seconds of each phase of a step since the last call; resets the clock."""
        if self._events:
            torch.cuda.synchronize()
            for phase, start, end in self._events:
                self._seconds[phase] += start.elapsed_time(end) / 1000
            self._events.clear()
        means = {phase: seconds / max(self.steps, 1) for phase, seconds in self._seconds.items()}
        self.steps = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return means
