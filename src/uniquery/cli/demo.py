"""`uniquery demo`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from uniquery.cli.options import add_set, command, progress_bar, split_overrides
from uniquery.cli.report import report_runs
from uniquery.data.coco import CocoData
from uniquery.data.scenes import ScenesConfig, make_scenes
from uniquery.evaluation.diagnose import diagnose
from uniquery.files import make_folder, write_atomically
from uniquery.report.drawings import png_bytes
from uniquery.report.responses import response_picture
from uniquery.report.runs import FIGURES_FILE, PICTURE_FILE, load_run
from uniquery.report.tables import number
from uniquery.training.config import Override, load_config
from uniquery.training.loop import train
from uniquery.weights.model_file import load_model

DEMO_SCENES = ScenesConfig(train_images=600, val_images=80)
DIAGNOSED_IMAGES = 16
# The paper's settings, but for a CPU: some of the queries on a part of the memory.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unique-querying": {"inter": {"max_queries": 64, "negatives_per_step": 4096}, "equivariance": {}},
}


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "demo",
        run,
        help="draw a data set, train a segmenter on it without and with the algorithm, and write a page about both",
        example="uniquery demo",
    )
    parser.add_argument("--data", type=Path, default=Path("data/scenes"), help="where the drawn scenes go")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where the demo's folder goes")
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
    demo = _free_folder(args.output)
    folders = []
    for name, querying in OBJECTIVES.items():
        console.rule(name)
        place = [("output", str(demo)), ("name", name), ("querying", querying)]
        folders.append(_trained([*splits, *place, *args.set], console))
    page = report_runs(folders, demo / "report.html")
    console.print(_summary(folders))
    console.print(f"{(time.perf_counter() - began) / 60:.1f} minutes. Open {page} in a browser.")


def _trained(overrides: Sequence[Override], console: Console) -> Path:
    """A run's folder, with its diagnosis."""
    config = load_config("demo", overrides)
    folder = train(config, console=console)
    model, card = load_model(folder / "last")
    assert config.data.val is not None
    data = CocoData(config.data.val.annotations, config.data.val.images)
    diagnosis = diagnose(model, data, card.test_size, DIAGNOSED_IMAGES)
    write_atomically(folder / FIGURES_FILE, json.dumps(diagnosis.to_dict(), indent=2))
    if any(len(image.queries) for image in diagnosis.images):
        write_atomically(folder / PICTURE_FILE, png_bytes(response_picture(model, diagnosis.images)))
    return folder


def _summary(folders: Sequence[Path]) -> Table:
    table = Table(
        "objective", "mask AP", "AP50", "image forwards", "response to other images", title="On held-out scenes"
    )
    for folder in folders:
        run = load_run(folder)
        scores = [number(run.final.metric(m) if run.final else None, 1) for m in ("AP", "AP50")]
        cross = run.diagnosis.get("cross_scene") or {}
        response = f"{100 * cross['mean']:.2f} %" if cross else "n/a"
        table.add_row(folder.name, *scores, f"{run.images:,}", response)
    return table


def _free_folder(output: Path) -> Path:
    """`demo`, or the first of `demo-2`, `demo-3`, … that is free: an earlier demo is kept."""
    folder, number = output / "demo", 2
    while folder.exists():
        folder, number = output / f"demo-{number}", number + 1
    return folder
