"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from uniquery.training.config_files import Override


def command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    *,
    help: str,  # noqa: A002 (argparse's own word)
    example: str,
) -> argparse.ArgumentParser:
    """A subcommand whose help ends with an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set a.b=c`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override any setting, repeatable"
    )


def add_split(parser: argparse.ArgumentParser, flag: str, help: str) -> None:  # noqa: A002 (argparse's own word)
    """`--flag ANNOTATIONS IMAGES`."""
    parser.add_argument(flag, nargs=2, type=Path, metavar=("ANNOTATIONS", "IMAGES"), help=help)


def split_overrides(name: str, pair: Sequence[Path] | None) -> list[Override]:
    """What `add_split` was given, as settings of `data.<name>`."""
    keys = ("annotations", "images")
    return [(f"data.{name}.{key}", str(path)) for key, path in zip(keys, pair or (), strict=False)]


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def not_negative(text: str) -> int:
    """A whole number, 0 or above, for argparse."""
    value = int(text)
    if value < 0:
        raise ValueError
    return value


@contextmanager
def progress_bar(title: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar that is told (done, total)."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
