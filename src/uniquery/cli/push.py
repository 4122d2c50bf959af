"""`uniquery push`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from uniquery.cli.options import command


def add_parser(commands: Any) -> None:
    parser = command(commands, "push", run, example="uniquery push runs/cells user/cells")
    parser.add_argument("model", type=Path, help="a run folder (its best model), a checkpoint folder or a model file")
    parser.add_argument("repository", help="user/name on the Hub; it is made if there is none, for all to see")


def run(args: argparse.Namespace) -> None:
    from uniquery.hub.push import push_model

    address = push_model(args.model, args.repository)
    print(f"Uploaded. Anyone who may read it can now use it:\n  uniquery.load('hf://{args.repository}')\n  {address}")
