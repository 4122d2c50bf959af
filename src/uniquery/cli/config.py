"""`uniquery config`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from uniquery.cli.options import add_set, command
from uniquery.training.config_files import PAPER, shipped_configs


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
    explain = command(
        actions,
        "explain",
        run_explain,
        help="print what a setting means, which values it takes, and its default",
        example="uniquery config explain train.steps",
    )
    explain.add_argument("key", nargs="?", help="a setting, or a table of settings such as optim; without it, all")
    command(actions, "list", run_list, help="name the shipped configurations", example="uniquery config list")


def run_explain(args: argparse.Namespace) -> None:
    from uniquery.settings_reference import explain, list_settings
    from uniquery.training.config import Config

    console = Console()
    for setting in explain(Config, args.key) if args.key else list_settings(Config):
        name = escape(setting.key) + (f" [dim]({setting.variant})[/]" if setting.variant else "")
        default = "must be set" if setting.default is None else f"default {setting.default}"
        is_filled = setting.is_table and setting.default not in (None, "null")  # its keys have defaults of their own
        values = setting.type if is_filled else f"{setting.type}; {default}"
        console.print(f"[bold]{name}[/]: {escape(values)}", highlight=False, soft_wrap=True)
        if setting.description:
            console.print(f"    {escape(setting.description)}", highlight=False, soft_wrap=True)


def run_show(args: argparse.Namespace) -> None:
    from rich.syntax import Syntax

    from uniquery.training.config import load_config, to_yaml  # imports torch, which `list` does not need

    text = to_yaml(load_config(args.config, args.set))
    console = Console()
    console.print(Syntax(text, "yaml", background_color="default") if console.is_terminal else text, soft_wrap=True)


def run_list(_: argparse.Namespace) -> None:
    table = Table("name", "what it is", box=None)
    for name, path in shipped_configs().items():
        if name.startswith(f"{PAPER}/"):  # listed with their figures by `uniquery paper`
            continue
        first = path.read_text().partition("\n")[0]
        table.add_row(name, first.removeprefix("#").strip())
    table.add_row(f"{PAPER}/…", "The rows of the paper's tables: uniquery paper")
    Console().print(table)
