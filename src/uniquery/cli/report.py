"""`uniquery report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from uniquery.cli.options import command, print_warning, progress_bar


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        run,
        example="uniquery report runs/base runs/ours -o comparison.html\n"
        "  uniquery report runs/ours-0 runs/ours-1 runs/ours-2 --against runs/base-0 runs/base-1 runs/base-2",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; several are compared with the first")
    parser.add_argument(
        "--against",
        nargs="+",
        type=Path,
        default=[],
        metavar="RUN",
        help="compare the runs with these instead, paired by seed, with intervals over seeds (default: not paired)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the page to write (default: report.html in the first run's folder)"
    )


def run(args: argparse.Namespace) -> None:
    from uniquery.report.build import build_report

    with progress_bar("analyzing") as progress:
        page = build_report(args.runs, args.output, against=args.against, warn=print_warning, progress=progress)
    print(f"Open {page} in a browser.")
