"""`uniquery explore`."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from uniquery.cli.options import add_device, add_split, command, print_warning
from uniquery.errors import UserError


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "explore",
        run,
        example="uniquery explore runs/base runs/ours\n  uniquery explore --data val.json images",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, help="run folders, checkpoint folders or model files, shown side by side"
    )
    add_split(parser, "--data", "COCO json and image folder (default: the validation data of the first run)")
    parser.add_argument("--port", type=_port, default=0, help="port on 127.0.0.1; 0 takes a free one (default: 0)")
    add_device(parser)


def _port(text: str) -> int:
    """A port, for argparse."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 0 to 65535")
    return value


def run(args: argparse.Namespace) -> None:
    try:
        from uniquery.explore.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError("explore needs packages that are missing: pip install 'uniquery[explore]'.") from None
    from uniquery.explore.exploration import open_exploration
    from uniquery.explore.runs import open_runs
    from uniquery.parallel import choose_device

    if not args.runs and not args.data:
        raise UserError("There is nothing to show: give run folders, --data ANNOTATIONS IMAGES, or both.")
    choose_device(args.device)
    exploration = open_exploration(open_runs(args.runs, args.device), args.data)
    for warning in exploration.data.warnings[:3]:
        print_warning(warning)
    count = len(exploration.runs)
    print(f"{len(exploration.data)} images, {count} run{'s' * (count != 1)}. Press Ctrl+C to stop.")
    with suppress(KeyboardInterrupt):  # how a server is meant to end
        serve(exploration, args.port, lambda address: print(f"Open {address} in a browser.", flush=True))
    print("Stopped.")
