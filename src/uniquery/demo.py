"""The demo: drawn scenes, a small segmenter trained on them without and with the method, and a page about both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from uniquery.data.scenes import DEMO_SCENES, SceneFiles, ScenesConfig, make_scenes
from uniquery.evaluation.diagnose import diagnose
from uniquery.evaluation.inference import Progress
from uniquery.files import make_folder, write_atomically
from uniquery.model import load
from uniquery.report.build import build_report
from uniquery.report.drawings import png_bytes
from uniquery.report.responses import response_picture
from uniquery.training.batches import open_validation_data
from uniquery.training.config import load_config
from uniquery.training.config_files import Override
from uniquery.training.loop import train
from uniquery.training.run_folder import REPORT_FILE, RunFolder

QUICK_SCENES = ScenesConfig(train_images=48, val_images=12)
QUICK_SETTINGS: tuple[Override, ...] = (
    ("train.steps", 20), ("train.eval_every", 20), ("train.save_every", 20), ("train.log_every", 5)
)  # fmt: skip
DIAGNOSED_IMAGES = 16
# Run name → settings of `querying`. "paper" is the published method with less than its settings, for a CPU: some of the
# queries, on a part of the memory.
OBJECTIVES: dict[str, Any] = {
    "plain": "recommended",
    "paper": {"preset": "paper", "inter": {"max_queries": 64, "negatives_per_step": 4096}},
}
INTRO = (
    "Two trainings of the same small SOLOv2 on drawn scenes, with the same number of image forwards. The run plain has "
    "the segmenter's own objective, which is also our recommended setting. The run paper adds both parts of the "
    "published method. The paper reports gains on COCO; in our measurements on real images, which are smaller, AP "
    "falls or stays (docs/evidence.md). The difference in this demo is below. One short training on drawn scenes "
    "proves little about your data: 'uniquery study' measures any setting there."
)
QUICK_INTRO = (
    "This is the quick demo: two trainings of a small SOLOv2, without and with the published method, of only 20 steps "
    "on 48 drawn scenes. It shows that everything works. It is far too short to learn anything: its figures say "
    "nothing about the model or the method. 'uniquery demo' without --quick trains longer."
)


@dataclass(frozen=True)
class Demo:
    """What the demo wrote: a run folder for each objective, and the page."""

    runs: tuple[Path, ...]
    page: Path


def make_demo_scenes(folder: Path, progress: Progress = lambda *_: None, *, quick: bool = False) -> SceneFiles:
    """Draws the demo's data set, or takes the one that is there; `quick` has fewer scenes."""
    make_folder(folder.parent)
    return make_scenes(folder, QUICK_SCENES if quick else DEMO_SCENES, progress)


def run_demo(
    scenes: SceneFiles,
    output: Path,
    overrides: Sequence[Override] = (),
    *,
    quick: bool = False,
    console: Console | None = None,
    warn: Callable[[str], object] = warnings.warn,
) -> Demo:
    """Trains and diagnoses a run for each objective, and writes a page that compares them.

    Args:
        scenes: the data.
        output: the folder in which a folder `demo` is made, or `demo-2`, … if there is one already.
        overrides: changes to the configuration `demo`.
        quick: train a few steps only.
        console: where the training prints.
        warn: called with a sentence if pictures of the page cannot be drawn.
    """
    console = Console(quiet=True) if console is None else console
    folder = _new_folder(output)
    splits: list[Override] = [
        (f"data.{split}", {"annotations": str(scenes.annotations(split)), "images": str(scenes.images(split))})
        for split in ("train", "val")
    ]
    shorter = QUICK_SETTINGS if quick else ()
    runs = []
    for name, querying in OBJECTIVES.items():
        console.rule(name)
        place: list[Override] = [("output", str(folder)), ("name", name), ("querying", querying)]
        runs.append(_train_and_diagnose([*splits, *place, *shorter, *overrides], console))
    intro = QUICK_INTRO if quick else INTRO
    return Demo(tuple(runs), build_report(runs, folder / REPORT_FILE, intro=intro, warn=warn))


def _train_and_diagnose(overrides: Sequence[Override], console: Console) -> Path:
    config = load_config("demo", overrides)
    folder = train(config, console=console)
    run = RunFolder(folder)
    model = load(run.last, device="cpu")
    assert config.data.val is not None
    data = open_validation_data(config.data.val, model.classes, model.info.bit_depth)
    diagnosis = diagnose(model.segmenter, data, model.info.test_size, DIAGNOSED_IMAGES)
    run.write_diagnosis(diagnosis.to_dict())
    if any(len(image.queries) for image in diagnosis.images):
        write_atomically(run.response_file, png_bytes(response_picture(model.segmenter, diagnosis.images)))
    return folder


def _new_folder(output: Path) -> Path:
    """`demo`, or the first of `demo-2`, `demo-3`, … that does not exist: an earlier demo is kept."""
    folder, number = output / "demo", 2
    while folder.exists():
        folder, number = output / f"demo-{number}", number + 1
    return folder
