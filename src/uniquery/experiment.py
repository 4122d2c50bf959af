"""`uniquery.train`: a training and its report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from uniquery.report.build import build_report
from uniquery.training import loop
from uniquery.training.config import Config
from uniquery.training.distributed import is_main_process
from uniquery.training.resume import Resume


def train(
    config: Config,
    *,
    resume: Resume = False,
    console: Console | None = None,
    warn: Callable[[str], object] = warnings.warn,
) -> Path:
    """Trains and evaluates a model, and returns the folder of the run, where everything is written, with a report.

    The first SIGINT or SIGTERM ends it after the current step, with a checkpoint; a second SIGINT ends it at once.

        folder = uniquery.train(uniquery.load_config("mine.yaml", ["train.steps=1000"]))
        model = uniquery.load(folder)

    Args:
        config: the experiment, from `load_config` or built in Python.
        resume: continue from the last checkpoint of the run; "auto": if there is one.
        console: where to print; by default the standard output.
        warn: called with a sentence if the report has no pictures.

    Raises:
        UserError: configuration, data or folder are wrong, or memory or disk space ran out.
        KeyboardInterrupt: SIGINT came, and the run is saved.
        SystemExit: SIGTERM came, and the run is saved.
    """
    folder = loop.train(config, resume=resume, console=console)
    if is_main_process():
        build_report([folder], warn=warn)
    return folder
