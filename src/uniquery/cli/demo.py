"""`uniquery demo`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from uniquery.cli.options import add_set, command, progress_bar, split_overrides
from uniquery.cli.report import report_runs
from uniquery.data.scenes import ScenesConfig, make_scenes
from uniquery.files import make_folder
from uniquery.report.runs import load_run
from uniquery.training.config import load_config
from uniquery.training.loop import train

DEMO_SCENES = ScenesConfig(train_images=600, val_images=80)


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "demo",
        run,
        help="draw a data set, train a segmenter on it, and write a page of pictures and numbers",
        example="uniquery demo",
    )
    parser.add_argument("--data", type=Path, default=Path("data/scenes"), help="where the drawn scenes go")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where the run's folder goes")
    add_set(parser)


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    console = Console()
    make_folder(args.data.parent)
    with progress_bar("drawing scenes", console) as progress:
        files = make_scenes(args.data, DEMO_SCENES, progress)
    splits = [
        override
        for split in ("train", "val")
        for override in split_overrides(split, (files.annotations(split), files.images(split)))
    ]
    place = [("output", str(args.output)), ("name", _free_name(args.output))]
    config = load_config("demo", [*splits, *place, *args.set])
    folder = train(config, console=console)
    page = report_runs([folder], folder / "report.html")
    final = load_run(folder).final
    ap = None if final is None else final.metric("AP")
    minutes = (time.perf_counter() - began) / 60
    console.print(
        f"[bold]mask AP {'n/a' if ap is None else f'{ap:.1f}'}[/] on held-out scenes after {minutes:.1f} minutes."
    )
    console.print(f"Open {page} in a browser.")


def _free_name(output: Path) -> str:
    """`demo`, or the first of `demo-2`, `demo-3`, … that is free: an earlier demo is kept."""
    name, number = "demo", 2
    while (output / name).exists():
        name, number = f"demo-{number}", number + 1
    return name
