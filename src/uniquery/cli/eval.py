"""`uniquery eval`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from uniquery.cli.options import add_split, command, not_negative, positive, progress_bar
from uniquery.data.batch import EvaluationSamples
from uniquery.data.coco import CocoData
from uniquery.errors import UserError
from uniquery.evaluation import Metrics, class_table, evaluate, table
from uniquery.evaluation.inference import category_ids_by_name, coco_results, predict_data
from uniquery.files import write_atomically
from uniquery.querying import Segmenter
from uniquery.training.config import Config, SplitConfig, parse_config, read_yaml
from uniquery.training.run import choose_device
from uniquery.weights.model_file import ModelCard, check_classes, load_model

COCO_DETECTIONS = 100
SWEEP = (0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7)


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "eval",
        run,
        help="score a model on a COCO data set, or a results json from anywhere",
        example="uniquery eval runs/cells --data val.json images --sweep-threshold",
    )
    parser.add_argument("model", nargs="?", type=Path, help="a run folder, a checkpoint folder or a model file")
    add_split(parser, "--data", "the data; by default the run's own validation data")
    parser.add_argument("--results", type=Path, help="score this COCO results json instead of a model")
    parser.add_argument("--annotations", type=Path, help="the ground truth for --results")
    parser.add_argument("--type", choices=("segm", "bbox", "both"), default="both", help="masks, boxes or both")
    parser.add_argument(
        "--max-detections",
        type=positive,
        help="best detections of an image that count; by default the run's own, or 100",
    )
    parser.add_argument("--backend", choices=("hotcoco", "pycocotools"), default="hotcoco")
    parser.add_argument("--mask-threshold", type=float, help="instead of the model's own")
    parser.add_argument("--sweep-threshold", action="store_true", help="table AP over mask thresholds")
    parser.add_argument("--save", type=Path, help="write the results as COCO json")
    parser.add_argument("--json", type=Path, help="write the metrics as json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=not_negative, default=2)


def run(args: argparse.Namespace) -> None:
    console = Console()
    if args.results is not None:
        truth = args.annotations or (args.data[0] if args.data else None)
        if truth is None:
            raise UserError("--results needs the ground truth: add --annotations val.json.")
        _show(console, args, _score(args, truth, args.results))
        return
    if args.model is None:
        raise UserError("Give a model to score, or --results with --annotations.")
    if args.sweep_threshold and (args.save or args.mask_threshold is not None):
        raise UserError("--sweep-threshold tries several thresholds: leave --save and --mask-threshold out.")
    model, card, data = open_model_and_data(args)
    if args.sweep_threshold:
        sweep = sweep_thresholds(args, model, card, data, console)
        console.print(sweep_table(sweep))
        if args.json:
            write_atomically(args.json, json.dumps({str(t): m.values for t, m in sweep.items()}, indent=2))
        return
    (results,) = _predict(args, model, card, data, (args.mask_threshold,), console).values()
    if args.save:
        write_atomically(args.save, json.dumps(results))
    _show(console, args, _score(args, data.annotations, results, data))


def open_model_and_data(args: argparse.Namespace) -> tuple[Segmenter[Any, Any, Any], ModelCard, CocoData]:
    """The model, what it says of itself, and the data to look at: the given one, or its run's own."""
    model, card = load_model(args.model, choose_device(args.device))
    config = _config_of_run(args.model)
    split = config.data.val if config else None
    if args.data:
        split = SplitConfig(annotations=args.data[0], images=args.data[1])
    if split is None:
        raise UserError(f"{args.model} does not say what to score it on: add --data ANNOTATIONS IMAGES.")
    if args.max_detections is None:
        args.max_detections = config.eval.max_detections if config else COCO_DETECTIONS
    classes = config.data.classes if config and not args.data else None
    data = CocoData(split.annotations, split.images, classes=classes)
    data.check_files_exist()
    check_classes(card, data.classes, str(split.annotations))
    return model, card, data


def _config_of_run(model: Path) -> Config | None:
    for folder in (model, model.parent, model.parent.parent):
        file = folder / "config.yaml"
        if file.is_file() and (folder / "metrics.jsonl").is_file():
            return parse_config(read_yaml(file), where=str(file))
    return None


def sweep_thresholds(
    args: argparse.Namespace, model: Segmenter[Any, Any, Any], card: ModelCard, data: CocoData, console: Console
) -> dict[float | None, Metrics]:
    """Mask AP at each of several mask thresholds, from one pass over the data."""
    results = _predict(args, model, card, data, SWEEP, console)
    return {t: _score_one(args, data.annotations, r, "segm", data) for t, r in results.items()}


def _predict(
    args: argparse.Namespace,
    model: Segmenter[Any, Any, Any],
    card: ModelCard,
    data: CocoData,
    thresholds: Sequence[float | None],
    console: Console,
) -> dict[float | None, list[dict[str, Any]]]:
    ids = category_ids_by_name([c.name for c in card.categories], data)
    results: dict[float | None, list[dict[str, Any]]] = {t: [] for t in thresholds}
    items = EvaluationSamples(data, card.test_size.short, card.test_size.longest)
    with progress_bar("predicting", console) as progress:
        predictions = predict_data(model, items, thresholds=thresholds, workers=args.workers, progress=progress)
        for image_id, versions in predictions:
            for threshold, instances in zip(thresholds, versions, strict=True):
                results[threshold] += coco_results(image_id, instances, ids)
    return results


def _score(args: argparse.Namespace, truth: Path, results: Any, data: CocoData | None = None) -> list[Metrics]:
    kinds = ("segm", "bbox") if args.type == "both" else (args.type,)
    return [_score_one(args, truth, results, kind, data) for kind in kinds]


def _score_one(args: argparse.Namespace, truth: Path, results: Any, kind: Any, data: CocoData | None = None) -> Metrics:
    return evaluate(
        truth,
        results,
        iou_type=kind,
        max_detections=args.max_detections or COCO_DETECTIONS,
        backend=args.backend,
        image_ids=data.image_ids.tolist() if data else None,
        category_ids=[c.id for c in data.categories] if data else None,
    )


def _show(console: Console, args: argparse.Namespace, metrics: list[Metrics]) -> None:
    console.print(table(*metrics))
    console.print(class_table(*metrics))
    for note in metrics[0].notes:
        console.print(f"[yellow]note:[/] {note}")
    if args.json:
        content = {m.iou_type: {"metrics": m.values, "per_class": m.per_class} for m in metrics}
        write_atomically(args.json, json.dumps(content, indent=2))


def sweep_table(sweep: dict[float | None, Metrics]) -> Table:
    """A row for each threshold, the best in bold."""
    shown = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    out = Table("mask threshold", *shown, title="mask AP over the mask threshold")
    best = max(sweep, key=lambda t: sweep[t].values["AP"] or 0)
    for threshold, metrics in sweep.items():
        cells = ["n/a" if (v := metrics.values[name]) is None else f"{v:.1f}" for name in shown]
        out.add_row(f"{threshold}", *cells, style="bold" if threshold == best else None)
    return out
