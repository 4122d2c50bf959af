"""The command line: one file per command."""

from __future__ import annotations

import argparse
import os
import sys

# Threads that wait by spinning make a step five times slower as soon as anything else runs on the machine; threads that
# sleep at once are slow to wake for the next small operation. A short spin does neither. OpenMP reads this once, when
# torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from uniquery import __version__
from uniquery.cli import config, data, demo, diagnose, eval, predict, report, train  # noqa: A004 (named like its command)
from uniquery.errors import UserError
from uniquery.training.distributed import is_lost_connection

COMMANDS = (demo, train, eval, predict, diagnose, report, config, data)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="uniquery", description="Train, evaluate and use query-based instance segmenters on COCO-format data."
    )
    parser.add_argument("--version", action="version", version=f"uniquery {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a command: 0 done, 1 a check found something, 2 bad input, 130 interrupted."""
    args = build_parser().parse_args(arguments)
    try:
        return int(args.run(args) or 0)
    except UserError as error:
        print(f"error{_of_process()}: {error}", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"error: No permission for {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        print(f"error{_of_process()}: Another process ended first; what it says is the cause.", file=sys.stderr)
        return 1


def _of_process() -> str:
    """Which of torchrun's processes speaks, if there are several."""
    return f" in process {os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
