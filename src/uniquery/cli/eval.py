"""`uniquery eval`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from uniquery.cli.choose_thresholds import choose_thresholds, read_rule
from uniquery.cli.options import (
    MODEL_HELP,
    add_device,
    add_split,
    command,
    not_negative,
    positive,
    print_warning,
    probability,
    progress_bar,
)
from uniquery.errors import UserError
from uniquery.files import write_atomically

if TYPE_CHECKING:
    from uniquery.data.dataset import GroundTruth, Row
    from uniquery.evaluation import Metrics
    from uniquery.evaluation.entries import IouType
    from uniquery.evaluation.panoptic import PanopticMetrics
    from uniquery.training.model_and_data import ModelAndData


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "eval",
        run,
        example="uniquery eval runs/cells --data val.json images --sweep-threshold",
    )
    parser.add_argument("model", nargs="?", type=Path, help=MODEL_HELP)
    add_split(parser, "--data", "COCO json and image folder (default: the run's validation data)")
    parser.add_argument(
        "--pngs", type=Path, help="the PNG files of panoptic --data (default: the path of the json without its ending)"
    )
    parser.add_argument(
        "--results",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="score this COCO results json instead of a model; panoptic: and its PNG folder (default: none)",
    )
    parser.add_argument(
        "--annotations",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="the ground truth for --results; panoptic: and its PNG folder (default: that of --data)",
    )
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
    parser.add_argument(
        "--choose-thresholds",
        metavar="RULE",
        help="find the mask threshold and a score threshold for each class, and store them in the model file, where "
        "predict finds them: best-f1, or for example precision=0.95 (default: not chosen)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        help="write the results as COCO json; a name that ends in .zip: as the zip that the COCO server takes "
        "(default: not written)",
    )
    parser.add_argument("--json", type=Path, help="write the metrics as json (default: not written)")
    add_device(parser)
    parser.add_argument(
        "--workers", type=not_negative, default=2, help="processes that load images (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    from uniquery.parallel import choose_device, keep_freed_memory
    from uniquery.training.model_and_data import open_model_and_data

    console = Console()
    if args.results is not None:
        if args.choose_thresholds is not None:
            raise UserError("--choose-thresholds stores thresholds in a model file: give a model instead of --results.")
        _evaluate_results(console, args)
        return 0
    if args.model is None:
        raise UserError("Give a model to score, or --results with --annotations.")
    if args.sweep_threshold and (args.save or args.mask_threshold is not None):
        raise UserError("--sweep-threshold tries several thresholds: leave --save and --mask-threshold out.")
    rule = read_rule(args)
    if args.pngs and not args.data:
        raise UserError("--pngs is the folder of --data: add --data ANNOTATIONS IMAGES.")
    device = choose_device(args.device)
    keep_freed_memory(device)
    trained = open_model_and_data(args.model, args.data, device, pngs=args.pngs, needs_annotations=args.save is None)
    unreadable = UnreadableFiles(len(trained.data))
    if trained.is_panoptic:
        _evaluate_panoptic(console, args, trained, unreadable)
    elif rule:
        choose_thresholds(console, args, trained, rule)
    elif args.sweep_threshold:
        _sweep(console, args, trained, unreadable)
    else:
        _evaluate(console, args, trained, unreadable)
    for sentence in unreadable.sentences:
        print_warning(sentence)
    return 1 if unreadable.sentences else 0


class UnreadableFiles:
    """Files that cannot be read, as sentences; if it is those of all images, the error of the last one is raised."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.sentences: list[str] = []
        self._counts = Counter[str]()

    def add(self, sentence: str, effect: str = "Its instances count as not found.") -> None:
        self._counts[effect] += 1
        if self._counts[effect] == self.images:
            raise UserError(sentence)
        self.sentences.append(f"{sentence} {effect}")


def _evaluate_results(console: Console, args: argparse.Namespace) -> None:
    """Scores a file of results."""
    from uniquery.data.panoptic_json import has_segments
    from uniquery.evaluation.entries import read_ground_truth
    from uniquery.evaluation.panoptic import evaluate_panoptic
    from uniquery.evaluation.panoptic_files import decode_panoptic_truth, read_panoptic_results

    given = args.annotations or (args.data[:1] if args.data else None)
    if given is None:
        raise UserError("--results needs the ground truth: add --annotations val.json.")
    for option, paths in (("--results", args.results), ("--annotations", given)):
        if len(paths) > 2:
            raise UserError(f"{option} takes a json and, if it is panoptic, its PNG folder, not {len(paths)} paths.")
    (annotations, *truth_pngs), (results, *result_pngs) = given, args.results
    truth = read_ground_truth(annotations)
    if has_segments(truth.annotations):
        _check_panoptic_options(args)
        truth = decode_panoptic_truth(truth, annotations, next(iter(truth_pngs), args.pngs))
        rows = read_panoptic_results(results, truth, next(iter(result_pngs), None))
        _report_panoptic(console, args, evaluate_panoptic(truth, rows))
        return
    if truth_pngs or result_pngs:
        raise UserError(f"{annotations} is not panoptic, it has no 'segments_info': leave out the PNG folders.")
    _report(console, args, _score(args, truth, results))


def _evaluate_panoptic(
    console: Console, args: argparse.Namespace, trained: ModelAndData, unreadable: UnreadableFiles
) -> None:
    from uniquery.evaluation.panoptic import evaluate_panoptic, predict_panoptic_dataset
    from uniquery.evaluation.panoptic_files import write_panoptic_results

    _check_panoptic_options(args)
    with progress_bar("predicting", console) as progress:
        rows = predict_panoptic_dataset(
            trained.model,
            trained.data,
            trained.info.categories,
            trained.info.test_size,
            workers=args.workers,
            progress=progress,
            on_unreadable=unreadable.add,
        )
    truth = trained.data.ground_truth(partial(unreadable.add, effect="Its image is not scored."))
    if args.save:
        write_panoptic_results(args.save, rows, truth)
    _report_panoptic(console, args, evaluate_panoptic(truth, rows))


def _check_panoptic_options(args: argparse.Namespace) -> None:
    """Raises if an option is given that panoptic quality does not have."""
    options = {
        "--type": args.type != "both",
        "--max-detections": args.max_detections is not None,
        "--backend": args.backend != "hotcoco",
        "--protocol": args.protocol is not None,
        "--mask-threshold": args.mask_threshold is not None,
        "--sweep-threshold": args.sweep_threshold,
        "--choose-thresholds": args.choose_thresholds is not None,
        "--save with the ending .zip": args.save is not None and args.save.suffix == ".zip",
    }
    given = [name for name, is_given in options.items() if is_given]
    if given:
        raise UserError(f"{', '.join(given)} is for instances, but the annotations are panoptic: leave it out.")


def _report_panoptic(console: Console, args: argparse.Namespace, metrics: PanopticMetrics) -> None:
    from uniquery.evaluation.tables import panoptic_class_table, panoptic_table

    console.print(panoptic_table(metrics))
    console.print(panoptic_class_table(metrics))
    if args.json:
        per_class = {"PQ": metrics.per_class, "SQ": metrics.per_class_sq, "RQ": metrics.per_class_rq}
        content = {"panoptic": {"metrics": metrics.values, "per_class": per_class}}
        write_atomically(args.json, json.dumps(content, indent=2))


def _sweep(console: Console, args: argparse.Namespace, trained: ModelAndData, unreadable: UnreadableFiles) -> None:
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
            on_unreadable=unreadable.add,
        )
    console.print(sweep_table(sweep))
    if args.json:
        write_atomically(args.json, json.dumps({str(t): m.values for t, m in sweep.items()}, indent=2))


def _evaluate(console: Console, args: argparse.Namespace, trained: ModelAndData, unreadable: UnreadableFiles) -> None:
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
            on_unreadable=unreadable.add,
        ).values()
    if args.save:
        _save(console, args.save, results, trained)
    truth = trained.data.ground_truth()
    if args.save and not truth.annotations:
        console.print(f"{truth.source} has no annotations: nothing is scored.", soft_wrap=True)
        return
    _report(console, args, _score(args, truth, results, trained))


def _save(console: Console, path: Path, results: list[Row], trained: ModelAndData) -> None:
    from uniquery.evaluation.submission import write_submission

    if path.suffix == ".zip":
        path = write_submission(path, results, trained.data.annotations)
        console.print(f"Masks for the evaluation server are in {path}.", soft_wrap=True)
    else:
        write_atomically(path, json.dumps(results))


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
