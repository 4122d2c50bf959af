"""`uniquery report`."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from uniquery.cli.options import command
from uniquery.data.coco import CocoData
from uniquery.errors import DataError
from uniquery.report.drawings import Drawn
from uniquery.report.page import Example, render, write_report
from uniquery.report.runs import load_run
from uniquery.training.config import Config, parse_config, read_yaml

PICTURES = 12
SHOWN_SCORE = 0.5


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        run,
        help="write one page of curves, tables and pictures of a run, or compare several",
        example="uniquery report runs/base runs/ours -o comparison.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("-o", "--output", type=Path, help="the page; by default report.html in the first run's folder")


def run(args: argparse.Namespace) -> None:
    page = report_runs(args.runs, args.output or args.runs[0] / "report.html")
    Console().print(f"Open {page} in a browser.")


def report_runs(folders: Sequence[Path], page: Path) -> Path:
    """Writes the page of one or several runs."""
    runs = [(load_run(folder), examples(folder)) for folder in folders]
    write_report(page, render(runs, " and ".join(folder.resolve().name for folder in folders)))
    return page


def examples(folder: Path) -> list[Example]:
    """Validation images of a run with ground truth and predictions; none if the data has moved away."""
    file = folder / "config.yaml"
    predictions = folder / "predictions.json"
    if not file.is_file() or not predictions.is_file():
        return []
    config = parse_config(read_yaml(file), where=str(file))
    try:
        return _examples(config, json.loads(predictions.read_text()))
    except (DataError, ValueError, KeyError) as error:  # data or predictions that are no longer what they were
        Console(stderr=True).print(f"no pictures: {error}")
        return []


def _examples(config: Config, results: list[dict[str, Any]]) -> list[Example]:
    if config.data.val is None:
        return []
    val = CocoData(config.data.val.annotations, config.data.val.images, classes=config.data.classes)
    by_image: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_image[result["image_id"]].append(result)
    names = {c.id: c.name for c in val.categories}
    spread = range(0, len(val), max(1, len(val) // PICTURES))
    pictures = []
    for index in list(spread)[:PICTURES]:
        truth = [Drawn(mask, val.classes[label]) for label, mask in val.instances(index)]
        found = [
            Drawn(r["segmentation"], names[r["category_id"]], r["score"])
            for r in by_image[int(val.image_ids[index])]
            if r["score"] >= SHOWN_SCORE
        ]
        pictures.append(Example(val.path(index).name, val.read(index), truth, found))
    return pictures
