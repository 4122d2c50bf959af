"""`uniquery demo`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from uniquery.cli.options import add_set, command, print_warning, progress_bar


def add_parser(commands: Any) -> None:
    parser = command(commands, "demo", run, example="uniquery demo")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps on a few scenes: about a minute, to see that everything works"
    )
    parser.add_argument(
        "--data", type=Path, help="the folder of the drawn scenes (default: data/scenes, or data/scenes_quick)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), help="where the demo's folder is made (default: %(default)s)"
    )
    add_set(parser)


def run(args: argparse.Namespace) -> None:
    from uniquery.demo import make_demo_scenes, run_demo

    start = time.perf_counter()
    data = args.data or Path("data/scenes_quick" if args.quick else "data/scenes")
    console = Console()
    with progress_bar("drawing scenes", console) as progress:
        scenes = make_demo_scenes(data, progress, quick=args.quick)
    demo = run_demo(scenes, args.output, args.set, quick=args.quick, console=console, warn=print_warning)
    console.print(_summary(demo.runs))
    if args.quick:
        print("Too few steps to learn anything: this only shows that everything works.")
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes. Open {demo.page} in a browser.")


def _summary(folders: Sequence[Path]) -> Table:
    from uniquery.report.runs import load_run
    from uniquery.report.tables import number

    table = Table(
        "objective", "mask AP", "AP50", "image forwards", "response to other images", title="On validation scenes"
    )
    for folder in folders:
        run = load_run(folder)
        scores = [number(run.final.metric(m) if run.final else None, 1) for m in ("AP", "AP50")]
        cross = run.diagnosis.get("cross_scene") or {}
        response = f"{100 * cross['mean']:.2f} %" if cross else "n/a"
        table.add_row(folder.name, *scores, f"{run.images:,}", response)
    return table
