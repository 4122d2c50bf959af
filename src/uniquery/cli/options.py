"""Options that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from uniquery.cli import COMMANDS

if TYPE_CHECKING:
    from uniquery.training.config_files import Override

MODEL_HELP = "a run folder, a checkpoint folder, a model file, or hf://user/name on the Hugging Face Hub"


def command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    *,
    example: str,
    help: str | None = None,  # noqa: A002 (the name that argparse uses)
) -> argparse.ArgumentParser:
    """A parser of a command, whose help is by default that of `COMMANDS` and ends with an example."""
    sentence = COMMANDS[name] if help is None else help
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=sentence,
        description=sentence[0].upper() + sentence[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set a.b=c`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any setting, such as train.steps=100; can be repeated",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device cuda`."""
    parser.add_argument(
        "--device",
        default="auto",
        help="where to compute: cpu, cuda, cuda:1, …; auto takes a GPU if there is one (default: %(default)s)",
    )


def add_split(parser: argparse.ArgumentParser, flag: str, help: str) -> None:  # noqa: A002 (the name that argparse uses)
    """`--flag ANNOTATIONS IMAGES`."""
    parser.add_argument(flag, nargs=2, type=Path, metavar=("ANNOTATIONS", "IMAGES"), help=help)


def split_overrides(name: str, pair: Sequence[Path] | None) -> list[Override]:
    """The values of an `add_split` option as settings of `data.<name>`; none if it was not given."""
    keys = ("annotations", "images")
    return [(f"data.{name}.{key}", str(path)) for key, path in zip(keys, pair or (), strict=False)]


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    return _whole_number(text, 1)


def not_negative(text: str) -> int:
    """A whole number, 0 or above, for argparse."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    with suppress(ValueError):
        if int(text) >= least:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} on")


def probability(text: str) -> float:
    """A number from 0 to 1, for argparse.

    >>> probability("0.5")
    0.5
    """
    with suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")


@contextmanager
def progress_bar(title: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; the function it gives is called with (done, total)."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_warning(sentence: str) -> None:
    """Prints to stderr."""
    print(f"warning: {sentence}", file=sys.stderr)
