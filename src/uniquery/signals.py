"""Stop signals: the first one is remembered until the current step is done; a second Ctrl-C ends the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORKER_GRACE_SECONDS = 60  # a data worker ends this long after SIGTERM


class StopRequest:
    """Whether a signal has asked to stop, and which; true once one has."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, _: FrameType | None) -> None:
        """Remembers the signal, and lets the next Ctrl-C end the process at once.

        A second SIGTERM does not: a launcher forwards the one that it got, and a cluster may send one to every process.
        """
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.signal = signal.Signals(number)

    def request(self) -> None:
        """Requests a stop because another process got a signal."""
        self.signal = self.signal or signal.SIGTERM

    def exit(self) -> NoReturn:
        """Ends with the exit code of the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catches SIGINT and SIGTERM inside the block; only in the main thread, as Python allows it nowhere else.

    >>> with stop_requests() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.signal.name
    'SIGTERM'
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals(_worker: int = 0) -> None:
    """For a data worker: a signal to the whole process group must not end it before the trainer's current step.

    Ctrl-C never ends a worker. SIGTERM ends it after a minute, so that a worker that hangs ends too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_after_grace)


def _end_after_grace(*_: object) -> None:
    signal.alarm(WORKER_GRACE_SECONDS)
