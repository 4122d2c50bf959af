"""Time and peak memory of a piece of work, for the other benchmarks."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleaved(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, taken in turns after one warm-up, so that a noisy machine disturbs all alike."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work))
    return times


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Other processes that compute without a pause."""
    others = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    time.sleep(1)  # until they have started
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def _spin() -> None:
    while True:
        sum(range(10_000))


def peak_gb() -> float:
    """Largest resident memory of this process.

    Not from getrusage where it can be helped: there, a child starts with the peak of its parent.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) / 1e6 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


def extra_gb(prepare: Callable[..., Callable[[], object]], *arguments: object) -> float:
    """How far the peak of a fresh process rises when it does the prepared work."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_extra, (prepare, *arguments))


def _extra(prepare: Callable[..., Callable[[], object]], *arguments: object) -> float:
    work = prepare(*arguments)
    _forget_peak()
    before = peak_gb()
    work()
    return peak_gb() - before


def _forget_peak() -> None:
    """Resets the peak to what is resident now, so that a costly preparation hides nothing; Linux only."""
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        switch.write_text("5")
