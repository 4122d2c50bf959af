"""`uniquery train`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from uniquery.cli.options import add_set, add_split, command, print_warning, split_overrides
from uniquery.errors import ConfigError, UserError

if TYPE_CHECKING:
    from uniquery.training.config import Config
    from uniquery.training.config_files import Override
    from uniquery.training.resume import Resume


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        run,
        example="uniquery train condinst_lite0 --train train.json images --val val.json images --name cells",
    )
    parser.add_argument(
        "config",
        help="a yaml file, the name of a shipped configuration (uniquery config list), or with --resume a run folder",
    )
    add_split(
        parser, "--train", "training data: a COCO json and its image folder (default: data.train of the configuration)"
    )
    add_split(parser, "--val", "validation data (default: data.val of the configuration)")
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="FOLDER",
        help="find training and validation data in a folder: Roboflow's or COCO's layout, or one json and images "
        "(default: --train and --val)",
    )
    parser.add_argument("--name", help="name of the run folder (default: name of the configuration)")
    parser.add_argument(
        "--output", type=Path, help="folder for run folders (default: output of the configuration, runs)"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="must",
        choices=("must", "auto"),
        help="continue from the last checkpoint; auto: if there is one (default: start a new run)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run a few steps on the most crowded and the largest images, print memory and time, and write nothing",
    )
    add_set(parser)


def overrides(args: argparse.Namespace) -> list[Override]:
    """The options that stand for settings; `--set` comes last and wins."""
    given: list[Override] = _dataset_overrides(args.dataset) if args.dataset else []
    given += [*split_overrides("train", args.train), *split_overrides("val", args.val)]
    given += [(key, str(getattr(args, key))) for key in ("name", "output") if getattr(args, key)]
    return given + list(args.set)


def _dataset_overrides(folder: Path) -> list[Override]:
    """The data that is found in a folder, as settings; prints what it is."""
    from uniquery.data.layouts import find_dataset

    found = find_dataset(folder)
    given: list[Override] = []
    console = Console(quiet=bool(int(os.environ.get("RANK", "0"))))
    for name, split in (("train", found.train), ("val", found.val)):
        if split is None:
            given.append((f"data.{name}", None))
            hint = f"divide the data with 'uniquery data split {found.train.annotations}'"
            console.print(f"{name}: none is found, and the model is not evaluated: {hint}", soft_wrap=True)
        else:
            given += split_overrides(name, (split.annotations, split.images))
            console.print(f"{name}: {split}", soft_wrap=True, highlight=False)
    if found.test:
        console.print(f"test: {found.test} is not used; score it later with uniquery eval --data", soft_wrap=True)
    return given


def _load_config(args: argparse.Namespace) -> Config:
    from uniquery.training.config import load_config
    from uniquery.training.run_folder import RunFolder

    run_folder = RunFolder(Path(args.config))
    if not run_folder.config_file.is_file():
        config = load_config(args.config, overrides(args))
        _warn_of_another_model(args.config, config)
        return config
    if args.resume is None:
        raise UserError(f"{run_folder} is a run: continue it with --resume.")
    return run_folder.config_to_resume(overrides(args))


def _warn_of_another_model(source: str, config: Config) -> None:
    """Warns if `--set model=…` leaves settings that were made for another segmenter."""
    from uniquery.training.config import load_config

    try:
        before, now = load_config(source).model.name, config.model.name
    except ConfigError:  # complete only with the options
        return
    if before != now:
        print_warning(
            f"{source} is a configuration of {before}: {now} gets its default size, and optim, schedule and data stay "
            f"as they were set for {before}. 'uniquery config list' shows configurations of {now}."
        )


def run(args: argparse.Namespace) -> None:
    from uniquery.experiment import train
    from uniquery.training.distributed import is_main_process
    from uniquery.training.run_folder import RunFolder

    console = Console()
    config = _load_config(args)
    resume: Resume = "auto" if args.resume == "auto" else args.resume is not None
    if args.dry_run:
        _dry_run(console, config, resume)
        return
    folder = train(config, resume=resume, console=console, warn=print_warning)
    if is_main_process():
        console.print(f"Everything is in {folder}; open {RunFolder(folder).report_file} in a browser.", soft_wrap=True)


def _dry_run(console: Console, config: Config, resume: Resume) -> None:
    from uniquery.report.forecast import forecast_lines
    from uniquery.training.distributed import is_main_process
    from uniquery.training.dry_run import dry_run

    with console.status("measuring a few steps and predictions"):
        forecast = dry_run(config, resume=resume)
    if is_main_process():
        for line in forecast_lines(forecast):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
