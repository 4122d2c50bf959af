"""A training step in bfloat16 against one in float32, for every segmenter, in turns.

    python benchmarks/precision.py [--model solov2] [--repeats 5]

An R50 on one 512×512 image, as in `step_time.py`. A CPU without instructions for bfloat16 (avx512_bf16, amx)
is slower with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from measure import seconds
from step_time import training_step
from uniquery.segmenters import SEGMENTERS


def in_bfloat16(step: Callable[[], None]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step()


def ratios(model: str, size: int, repeats: int) -> list[float]:
    """Time in bfloat16 against time in float32, sorted."""
    step = training_step(model, size)
    step(), in_bfloat16(step)
    times = [(seconds(step), seconds(lambda: in_bfloat16(step))) for _ in range(repeats)]
    return sorted(lower / full for full, lower in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SEGMENTERS), action="append", help="by default each")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    table = Table("segmenter", "bfloat16 against float32", title=f"R50, one {args.size}×{args.size} image")
    figures = {}
    for model in args.model or SEGMENTERS:
        figures[model] = found = ratios(model, args.size, args.repeats)
        table.add_row(model, f"{statistics.median(found):.2f}× ({found[0]:.2f}–{found[-1]:.2f})")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
