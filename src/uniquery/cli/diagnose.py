"""`uniquery diagnose`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from uniquery.cli.options import MODEL_HELP, add_device, add_split, command, positive, progress_bar
from uniquery.files import write_atomically

if TYPE_CHECKING:
    from uniquery.evaluation.diagnose import Diagnosis

GROUPS = {
    "inside the own footprint": "inside",
    "outside of it": "outside",
    "same class": "same_class",
    "other class": "other_class",
}
"""Name → field of `CrossScene`."""


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "diagnose",
        run,
        example="uniquery diagnose runs/cells --data val.json images --picture response.png",
    )
    parser.add_argument("model", type=Path, help=MODEL_HELP)
    add_split(parser, "--data", "COCO json and image folder (default: the run's validation data)")
    parser.add_argument("--images", type=positive, default=32, help="how many images to measure (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the numbers (default: in the run folder, without --data)")
    parser.add_argument(
        "--picture",
        type=Path,
        help="file for a picture of a query's response on its own and on eight other images "
        "(default: in the run folder, without --data)",
    )
    parser.add_argument("--no-sweep", dest="sweep", action="store_false", help="do not measure AP at mask thresholds")
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    from uniquery.evaluation.diagnose import diagnose
    from uniquery.evaluation.sweep import sweep_mask_thresholds
    from uniquery.evaluation.tables import sweep_table
    from uniquery.parallel import choose_device
    from uniquery.report.drawings import png_bytes
    from uniquery.report.responses import OTHERS, response_picture
    from uniquery.training.model_and_data import open_model_and_data

    console = Console()
    trained = open_model_and_data(args.model, args.data, choose_device(args.device))
    diagnosis = diagnose(trained.model, trained.data, trained.info.test_size, args.images)
    console.print(_cross_scene_table(diagnosis), _equivariance_table(diagnosis))
    if args.sweep and not trained.is_panoptic:
        with progress_bar("predicting", console) as progress:
            sweep = sweep_mask_thresholds(
                trained.model,
                trained.data,
                trained.classes,
                trained.info.test_size,
                max_detections=trained.max_detections,
                protocol=trained.protocol,
                progress=progress,
            )
        diagnosis = replace(diagnosis, sweep=sweep)
        console.print(sweep_table(sweep))
    numbers_file, picture_file = _output_files(args)
    if numbers_file:
        write_atomically(numbers_file, json.dumps(diagnosis.to_dict(), indent=2))
    if picture_file:
        write_atomically(picture_file, png_bytes(response_picture(trained.model, diagnosis.images)))
        console.print(f"{picture_file}: a query on its own image, then on {OTHERS} others.")


def _output_files(args: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Where numbers and picture go: as asked for, or into the run folder if its own data was measured."""
    from uniquery.training.run_folder import RunFolder

    folder = RunFolder(args.model)
    if args.data or not folder.is_run():
        return args.json, args.picture
    return args.json or folder.diagnosis_file, args.picture or folder.response_file


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.2f} %"


def _cross_scene_table(diagnosis: Diagnosis) -> Table:
    table = Table("", "response", "above 0.5", "pairs", "of instances", title="Queries on pixels, as probabilities")
    cross = diagnosis.cross_scene
    if cross is None:
        table.add_row("n/a", "no matched query, or no other image")
        return table
    table.add_row(f"own instance ({cross.queries} queries)", _percent(cross.own))
    pairs = cross.inside.pairs + cross.outside.pairs
    others = f"instances of other images ({cross.instances} instances)"
    table.add_row(others, _percent(cross.mean), _percent(cross.above_half), f"{pairs:,}")
    for name, group in GROUPS.items():
        response = getattr(cross, group)
        table.add_row(
            f"… {name}",
            _percent(response.mean),
            _percent(response.above_half),
            f"{response.pairs:,}",
            str(response.instances),
        )
    table.add_row("… 99th percentile", _percent(cross.p99))
    return table


def _equivariance_table(diagnosis: Diagnosis) -> Table:
    table = Table("transformation", "mask error, 1 − IoU", "instances", "feature error", "images", title="Equivariance")
    for name, error in diagnosis.equivariance.items():
        if error is None:
            table.add_row(name, "n/a", "0", "n/a", "0")
        else:
            masks, features = _percent(error.mask_error), _percent(error.feature_error)
            table.add_row(name, masks, str(error.instances), features, str(error.images))
    return table
