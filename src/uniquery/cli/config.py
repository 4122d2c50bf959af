"""`uniquery config`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from uniquery.cli.options import add_set, command
from uniquery.training.config_files import shipped_configs


def add_parser(commands: Any) -> None:
    parser = command(commands, "config", run_list, example="uniquery config show demo")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = command(
        actions,
        "show",
        run_show,
        help="print a configuration with every default and override in place",
        example="uniquery config show demo --set train.steps=10",
    )
    show.add_argument("config", help="a yaml file or the name of a shipped configuration")
    add_set(show)
    command(actions, "list", run_list, help="name the shipped configurations", example="uniquery config list")


def run_show(args: argparse.Namespace) -> None:
    from uniquery.training.config import load_config, to_yaml  # imports torch, which `list` does not need

    text = to_yaml(load_config(args.config, args.set))
    console = Console()
    console.print(Syntax(text, "yaml", background_color="default") if console.is_terminal else text, soft_wrap=True)


def run_list(_: argparse.Namespace) -> None:
    table = Table("name", "what it is", box=None)
    for name, path in shipped_configs().items():
        first = path.read_text().partition("\n")[0]
        table.add_row(name, first.removeprefix("#").strip())
    Console().print(table)
