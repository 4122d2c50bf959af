"""Images that cannot be read: reported once each where they are skipped."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from uniquery.parallel import gather_lists


class UnreadableImages:
    """The images that a run skipped, in all processes.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._is_printed: dict[str, bool] = {}  # by sentence

    def add(self, sentences: Iterable[str]) -> None:
        """Remembers a sentence about each image."""
        for sentence in sentences:
            self._is_printed.setdefault(sentence, False)

    def print_new(self) -> None:
        """Prints about the images of all processes that were not printed yet; all processes must call it."""
        new = gather_lists([sentence for sentence, is_printed in self._is_printed.items() if not is_printed])
        for sentence in dict.fromkeys(new):
            if not self._is_printed.get(sentence):  # of another process, which may have met it later
                self.console.print(
                    f"[yellow]warning:[/] {escape(sentence)} Another image is taken (data.on_unreadable).",
                    soft_wrap=True,
                )
        self._is_printed = dict.fromkeys([*self._is_printed, *new], True)
