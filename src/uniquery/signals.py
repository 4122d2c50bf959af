"""Being asked to stop: a signal is remembered until the work at hand is done; a second Ctrl-C ends the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORKERS_SECONDS = 60  # that a data worker goes on after SIGTERM


class StopRequest:
    """Whether anyone has asked to stop, and how; true once they have."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remembers the signal. From now on Ctrl-C has its usual effect, at once.

        SIGTERM keeps none: a launcher passes on the one that it got, and a cluster may send one to every process.
        """
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.signal = signal.Signals(number)

    def join(self) -> None:
        """Takes part in a stop that another process was asked for."""
        self.signal = self.signal or signal.SIGTERM

    def obey(self) -> NoReturn:
        """Ends as the signal would have, its exit code included: 130 for Ctrl-C, 143 for SIGTERM."""
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catches SIGINT and SIGTERM inside the block; outside the main thread, where python forbids it, catches nothing.

    >>> with stop_requests() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.signal.name
    'SIGTERM'
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals(_worker: int = 0) -> None:
    """For a data worker: a signal to the whole group of processes is the trainer's to answer.

    Ctrl-C never ends a worker, and SIGTERM after a minute, in which the trainer can finish its step; without an end, a
    worker that hangs could not be got rid of.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


def _end_later(*_: object) -> None:
    signal.alarm(WORKERS_SECONDS)
