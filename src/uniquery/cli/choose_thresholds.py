"""`uniquery eval --choose-thresholds`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from uniquery.cli.options import print_warning, progress_bar
from uniquery.errors import UserError, list_some
from uniquery.files import write_atomically

if TYPE_CHECKING:
    from uniquery.evaluation.operating_points import Rule
    from uniquery.training.model_and_data import ModelAndData


def read_rule(args: argparse.Namespace) -> Rule | None:
    """How to choose thresholds, if they are to be chosen."""
    from uniquery.evaluation.operating_points import parse_rule
    from uniquery.weights.hub import is_hub_address

    if args.choose_thresholds is None:
        return None
    options = {
        "--sweep-threshold": args.sweep_threshold,
        "--mask-threshold": args.mask_threshold is not None,
        "--save": args.save is not None,
        "--type": args.type != "both",
        "--backend": args.backend != "hotcoco",
    }
    given = [name for name, is_given in options.items() if is_given]
    if given:
        raise UserError(f"--choose-thresholds tries several thresholds for masks: leave out {', '.join(given)}.")
    if is_hub_address(args.model):
        raise UserError(f"{args.model} is shared: choose thresholds for the model of your run, then push that.")
    return parse_rule(args.choose_thresholds)


def choose_thresholds(console: Console, args: argparse.Namespace, trained: ModelAndData, rule: Rule) -> None:
    """Chooses the thresholds of a model, prints them and stores them in its file."""
    from uniquery.evaluation import choose_thresholds as choosing
    from uniquery.evaluation.tables import sweep_table
    from uniquery.weights.model_file import store_thresholds

    with progress_bar("predicting", console) as progress:
        chosen = choosing.choose_thresholds(
            trained.model,
            trained.data,
            trained.classes,
            trained.info.test_size,
            rule,
            max_detections=args.max_detections or trained.max_detections,
            protocol=args.protocol or trained.protocol,
            workers=args.workers,
            progress=progress,
        )
    console.print(sweep_table(chosen.sweep), choosing.thresholds_table(chosen.points))
    for problem, names in chosen.problems.items():
        print_warning(f"{problem}: {list_some(names)}.")
    file = store_thresholds(args.model, chosen.thresholds)
    console.print(
        f"Mask threshold {chosen.thresholds.mask} and score thresholds by {rule}, stored in {file}.", soft_wrap=True
    )
    if args.json:
        write_atomically(args.json, json.dumps(asdict(chosen.thresholds), indent=2))
