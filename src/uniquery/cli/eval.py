"""`uniquery eval`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from uniquery.cli.options import add_device, add_split, command, not_negative, positive, probability, progress_bar
from uniquery.errors import UserError
from uniquery.files import write_atomically

if TYPE_CHECKING:
    from uniquery.data.dataset import GroundTruth, Row
    from uniquery.evaluation import Metrics
    from uniquery.evaluation.entries import IouType
    from uniquery.training.model_and_data import ModelAndData


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "eval",
        run,
        example="uniquery eval runs/cells --data val.json images --sweep-threshold",
    )
    parser.add_argument("model", nargs="?", type=Path, help="a run folder, a checkpoint folder or a model file")
    add_split(parser, "--data", "COCO json and image folder (default: the run's validation data)")
    parser.add_argument("--results", type=Path, help="score this COCO results json instead of a model (default: none)")
    parser.add_argument("--annotations", type=Path, help="the ground truth for --results (default: that of --data)")
    parser.add_argument(
        "--type",
        choices=("segm", "bbox", "both"),
        default="both",
        help="score masks, boxes or both (default: %(default)s)",
    )
    parser.add_argument(
        "--max-detections",
        type=positive,
        help="how many detections are scored, best first (default: the run's setting, else 100 per image and class, or "
        "300 per image for LVIS)",
    )
    parser.add_argument(
        "--backend",
        choices=("hotcoco", "pycocotools"),
        default="hotcoco",
        help="what computes the metrics; pycocotools is the slow reference (default: %(default)s)",
    )
    parser.add_argument(
        "--protocol",
        choices=("coco", "lvis"),
        help="whose metrics (default: the run's setting, else lvis if every category has a frequency)",
    )
    parser.add_argument(
        "--mask-threshold",
        type=probability,
        help="probability above which a pixel belongs to a mask (default: the model's)",
    )
    parser.add_argument("--sweep-threshold", action="store_true", help="show AP at several mask thresholds")
    parser.add_argument("--save", type=Path, help="write the results as COCO json (default: not written)")
    parser.add_argument("--json", type=Path, help="write the metrics as json (default: not written)")
    add_device(parser)
    parser.add_argument(
        "--workers", type=not_negative, default=2, help="processes that load images (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    from uniquery.parallel import choose_device
    from uniquery.training.model_and_data import open_model_and_data

    console = Console()
    if args.results is not None:
        truth = args.annotations or (args.data[0] if args.data else None)
        if truth is None:
            raise UserError("--results needs the ground truth: add --annotations val.json.")
        _report(console, args, _score(args, truth, args.results))
        return
    if args.model is None:
        raise UserError("Give a model to score, or --results with --annotations.")
    if args.sweep_threshold and (args.save or args.mask_threshold is not None):
        raise UserError("--sweep-threshold tries several thresholds: leave --save and --mask-threshold out.")
    trained = open_model_and_data(args.model, args.data, choose_device(args.device))
    if args.sweep_threshold:
        _sweep(console, args, trained)
    else:
        _evaluate(console, args, trained)


def _sweep(console: Console, args: argparse.Namespace, trained: ModelAndData) -> None:
    from uniquery.evaluation.sweep import sweep_mask_thresholds
    from uniquery.evaluation.tables import sweep_table

    with progress_bar("predicting", console) as progress:
        sweep = sweep_mask_thresholds(
            trained.model,
            trained.data,
            trained.classes,
            trained.info.test_size,
            max_detections=args.max_detections or trained.max_detections,
            backend=args.backend,
            protocol=args.protocol or trained.protocol,
            workers=args.workers,
            progress=progress,
        )
    console.print(sweep_table(sweep))
    if args.json:
        write_atomically(args.json, json.dumps({str(t): m.values for t, m in sweep.items()}, indent=2))


def _evaluate(console: Console, args: argparse.Namespace, trained: ModelAndData) -> None:
    from uniquery.evaluation.inference import predict_dataset

    with progress_bar("predicting", console) as progress:
        (results,) = predict_dataset(
            trained.model,
            trained.data,
            trained.classes,
            trained.info.test_size,
            mask_thresholds=(args.mask_threshold,),
            workers=args.workers,
            progress=progress,
        ).values()
    if args.save:
        write_atomically(args.save, json.dumps(results))
    _report(console, args, _score(args, trained.data.ground_truth(), results, trained))


def _score(
    args: argparse.Namespace,
    truth: GroundTruth | Path,
    results: list[Row] | Path,
    trained: ModelAndData | None = None,
) -> list[Metrics]:
    from uniquery.evaluation import evaluate

    iou_types: tuple[IouType, ...] = ("segm", "bbox") if args.type == "both" else (args.type,)
    return [
        evaluate(
            truth,
            results,
            iou_type=iou_type,
            max_detections=args.max_detections or (trained.max_detections if trained else None),
            backend=args.backend,
            protocol=args.protocol or (trained.protocol if trained else None),
        )
        for iou_type in iou_types
    ]


def _report(console: Console, args: argparse.Namespace, metrics: list[Metrics]) -> None:
    from uniquery.evaluation import class_table, table

    console.print(table(*metrics))
    console.print(class_table(*metrics))
    for note in metrics[0].notes:
        console.print(f"[yellow]note:[/] {note}")
    if args.json:
        content = {m.iou_type: {"metrics": m.values, "per_class": m.per_class} for m in metrics}
        write_atomically(args.json, json.dumps(content, indent=2))
