"""`uniquery paper`."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from uniquery.cli.options import add_set, command, positive
from uniquery.errors import UserError

if TYPE_CHECKING:
    from uniquery.paper import PaperTable
    from uniquery.training.config import Config, SplitConfig


def add_parser(commands: Any) -> None:
    parser = command(commands, "paper", run, example="uniquery paper table1 --row solov2-r50 --dry-run")
    parser.add_argument("table", nargs="?", help="one table, such as table1 (default: all)")
    parser.add_argument("--row", help="print the commands of this row (default: list all rows)")
    parser.add_argument(
        "--gpus", type=positive, help="processes of the command (default: the GPUs of this machine, else 8)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="also measure a few steps of the row here, and print memory and time"
    )
    add_set(parser)


def run(args: argparse.Namespace) -> None:
    from uniquery.paper import read_paper

    console = Console()
    if args.row is not None:
        _print_row(console, args)
        return
    if args.dry_run or args.set or args.gpus:
        raise UserError("--dry-run, --set and --gpus are for one row: add a table and --row ROW.")
    paper = read_paper()
    for name in [args.table] if args.table else paper.tables:
        _print_table(console, name, paper.table(name), paper.data[paper.table(name).data].title)
    console.print(
        "Figures are the paper's; –: not measured by us. The commands of a row: uniquery paper TABLE --row ROW; with "
        "--dry-run its memory and time.",
        soft_wrap=True,
        highlight=False,
    )


def _print_table(console: Console, name: str, table: PaperTable, data: str) -> None:
    from uniquery.paper import config_name, our_figures

    console.print(f"[bold]{name}[/]  {escape(table.title)}  (data: {data})", soft_wrap=True, highlight=False)
    headline = table.metrics[0]
    columns = ["row", *table.metrics, f"our {headline}"]
    shown = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.columns[0].no_wrap = True
    for row in table.rows:
        ours = our_figures(name, row.row).get(headline) if row.row else None
        first = row.row or f"[dim]{row.method}, {row.backbone}[/]"
        missing = "–" if row.row else ""
        shown.add_row(first, *table.format_figures(row), missing if ours is None else f"{ours:.1f}")
    console.print(shown)
    console.print(f"train a row: uniquery train {config_name(name, 'ROW')}\n", soft_wrap=True, highlight=False)


def _print_row(console: Console, args: argparse.Namespace) -> None:
    from uniquery.paper import config_name, read_paper
    from uniquery.paper.forecast import default_processes, row_config, split_batch

    if args.table is None:
        raise UserError("--row needs its table: uniquery paper table1 --row solov2-r50.")
    paper = read_paper()
    table = paper.table(args.table)
    row, data = table.row(args.row), paper.data[table.data]
    config, processes = row_config(args.table, args.row, args.set), args.gpus or default_processes()
    batch = split_batch(config, processes).train.batch_size
    figures = ", ".join(
        f"{name} {figure}" for name, figure in zip(table.metrics, table.format_figures(row), strict=True)
    )
    source = config_name(args.table, args.row)
    length = f"{config.train.steps} steps" if config.train.steps else f"{config.train.epochs:g} epochs"
    lines = {
        "table": table.title,
        "row": f"{row.method} ({config.model.name}, {config.backbone.name}, {length})",
        "paper": figures,
        "configuration": source,
        "data": f"{data.title}: {_files(config)}",
        "train": _train_command(source, args.set, processes, batch),
        **_score_commands(table, config),
    }
    for key, text in lines.items():
        console.print(f"[bold]{key}:[/] {escape(text)}", soft_wrap=True, highlight=False)
    if args.dry_run:
        _print_forecast(console, args, config, processes)


def _files(config: Config) -> str:
    splits: list[SplitConfig] = [split for split in (config.data.train, config.data.val) if split is not None]
    return ", ".join(dict.fromkeys(str(path) for split in splits for path in (split.annotations, split.images)))


def _train_command(source: str, overrides: list[str], processes: int, batch: int) -> str:
    program = f"torchrun --standalone --nproc-per-node {processes} -m uniquery" if processes > 1 else "uniquery"
    sets = [*overrides, f"train.batch_size={batch}"] if processes > 1 else overrides
    return shlex.join([*program.split(), "train", source, *(part for text in sets for part in ("--set", text))])


def _score_commands(table: PaperTable, config: Config) -> dict[str, str]:
    run = f"uniquery eval {config.folder}"
    if not table.test_dev:
        return {"score": run}
    test = "data/coco/annotations/image_info_test-dev2017.json data/coco/test2017"
    return {"score on val2017": run, "submit to test-dev": f"{run} --data {test} --save {config.name}.zip"}


def _print_forecast(console: Console, args: argparse.Namespace, config: Config, processes: int) -> None:
    from uniquery.paper import read_paper
    from uniquery.paper.forecast import forecast_row
    from uniquery.report.forecast import forecast_lines

    paper = read_paper()
    data = paper.data[paper.table(args.table).data]
    with console.status("measuring a few steps and predictions"):
        result = forecast_row(config, data, processes)
    if result.is_drawn:
        console.print(
            f"The data is not there, so drawn images were measured, and {data.train_images} training images counted."
        )
        if config.data.sampling:
            console.print("Repeat factors make an epoch longer than that: the real number of steps is larger.")
    console.print(f"Measured in one process with the batch of one of {processes}; communication is not included:")
    for line in forecast_lines(result.forecast):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
