"""`uniquery study`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from uniquery.cli.options import add_set, add_split, command, not_negative, positive, progress_bar
from uniquery.errors import ConfigError

if TYPE_CHECKING:
    from uniquery.study.plan import PlannedRun, StudySettings


def add_parser(commands: Any) -> None:
    parser = command(
        commands, "study", run, example="uniquery study table3 --train train.json images --val val.json images"
    )
    parser.add_argument("study", help="a yaml file or the name of a shipped study")
    parser.add_argument("--scale", default="small", help="small, or paper: full-size recipes (default: %(default)s)")
    add_split(parser, "--train", "training data for all runs (default: the study's, or drawn scenes)")
    add_split(parser, "--val", "validation data for all runs (default: the study's, or drawn scenes)")
    parser.add_argument(
        "--output", type=Path, default=Path("studies"), help="folder for studies (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="trainings at the same time (default: %(default)s)")
    parser.add_argument("--seeds", type=not_negative, nargs="+", help="run only these seeds (default: the study's)")
    parser.add_argument(
        "--only", nargs="+", metavar="VARIANT", help="run only these variants, and their controls (default: all)"
    )
    parser.add_argument("--table", action="store_true", help="train nothing: table and page of the results so far")
    parser.add_argument("--dry-run", action="store_true", help="list the runs with their estimated time, train nothing")
    add_set(parser)


def run(args: argparse.Namespace) -> int:
    from uniquery.study.page import study_table, write_page, write_summary
    from uniquery.study.plan import plan_runs, study_data
    from uniquery.study.results import add_image_intervals, compare_runs, result_seeds
    from uniquery.study.run import finished_result, run_study
    from uniquery.training.run_folder import REPORT_FILE

    console = Console()
    study = _study(args)
    output: Path = args.output / study.name
    seeds = args.seeds or study.seeds
    study = study.model_copy(update={"seeds": tuple(dict.fromkeys([*seeds, *result_seeds(output)]))})
    with progress_bar("drawing scenes", console) as progress:
        data = study_data(study, output, progress)
    runs = plan_runs(study, data, output)
    chosen = _chosen(study, runs, args.only, seeds)
    for planned in runs:
        finished_result(planned, output)  # results of other settings are refused now, not after hours of training
    if args.dry_run:
        _print_plan(console, chosen, output, args.jobs)
        return 0
    total = len(chosen)
    failures = run_study(
        [] if args.table else chosen,
        output,
        diagnose_images=study.diagnose_images,
        jobs=args.jobs,
        report=lambda planned, event: console.print(f"{chosen.index(planned) + 1}/{total} {planned.name}: {event}"),
    )
    results = [result for planned in runs if (result := finished_result(planned, output))]
    summary = output / "study.json"
    rows = add_image_intervals(compare_runs(study, results), runs, summary)
    console.print(study_table(study, rows))
    write_summary(study, rows, summary)
    page = output / REPORT_FILE
    write_page(study, rows, runs, page, failures)
    for failure in failures:
        console.print(f"[red]failed:[/] {failure.run.name}: {escape(failure.reason)} (see {failure.log})")
    console.print(f"Everything is in {output}; open {page} in a browser.")
    return 1 if failures else 0


def _study(args: argparse.Namespace) -> StudySettings:
    """The study with the options for its scale, data and settings."""
    from uniquery.study.plan import DataSettings, read_study
    from uniquery.training.config import SplitConfig
    from uniquery.training.config_files import parse_override

    study = read_study(args.study).at_scale(args.scale)
    update: dict[str, Any] = {"set": {**study.set, **dict(parse_override(text) for text in args.set)}}
    if bool(args.train) != bool(args.val):
        raise ConfigError("Give both --train and --val, or neither.")
    if args.train:
        train, val = (SplitConfig(annotations=pair[0], images=pair[1]) for pair in (args.train, args.val))
        update["data"] = {"data": DataSettings(train=train, val=val)}
    return study.model_copy(update=update)


def _chosen(
    study: StudySettings, runs: Sequence[PlannedRun], only: Sequence[str] | None, seeds: Sequence[int]
) -> list[PlannedRun]:
    """The runs of some variants, with their controls, and of some seeds; bases always."""
    only = only or list(study.variants)
    unknown = [name for name in only if name not in study.variants]
    if unknown:
        raise ConfigError(f"The study has no variant '{unknown[0]}'; it has {', '.join(study.variants)}.")
    kept = {None, *only, *(study.control_of(name) for name in only)}
    return [run for run in runs if run.variant in kept and (run.variant is None or run.seed in seeds)]


def _print_plan(console: Console, runs: Sequence[PlannedRun], output: Path, jobs: int) -> None:
    from uniquery.report.tables import duration
    from uniquery.study.estimate import estimate_runs, total_seconds
    from uniquery.study.run import runs_left, threads_per_run

    left = runs_left(runs, output)
    with console.status("measuring a few steps of each variant"):
        seconds = estimate_runs(left, threads_per_run(jobs))
    table = Table("run", "steps", "estimated training time")
    for planned in runs:
        estimate = duration(seconds[planned.name]) if planned.name in seconds else "done"
        table.add_row(
            planned.name, str(planned.config.train.steps or f"{planned.config.train.epochs:g} epochs"), estimate
        )
    console.print(table)
    console.print(
        f"{len(left)} of {len(runs)} runs are left: about {duration(total_seconds(left, seconds, jobs))} of training "
        f"with --jobs {jobs}, plus evaluations."
    )
