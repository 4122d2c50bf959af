"""A run scored on its validation data, and its best model kept."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from uniquery.data.batch import EvaluationSamples
from uniquery.data.coco import CocoData
from uniquery.evaluation import Metrics, evaluate
from uniquery.evaluation.inference import Progress, category_ids_by_name, coco_results, predict_data
from uniquery.files import write_atomically
from uniquery.parallel import broadcast_from_first, gather_lists, get_rank, get_world_size
from uniquery.querying.contract import Segmenter
from uniquery.training.checkpoint import save_checkpoint
from uniquery.training.config import Config
from uniquery.training.log import MetricsLog
from uniquery.training.run import Run
from uniquery.weights.model_file import ModelCard


def evaluation_is_due(run: Run) -> bool:
    """Whether the run has come to a step at which it is evaluated, and has not been yet."""
    every = run.config.train.eval_every or run.steps
    return run.step > run.evaluated and (run.step == run.steps or run.step % every == 0)


def evaluate_run(run: Run, val: CocoData, folder: Path, log: MetricsLog, console: Console, progress: Progress) -> None:
    """Scores the weights that count, and keeps them if none before were better.

    Each process predicts its part of the images; the first scores all.
    """
    began = time.perf_counter()
    with _evaluated_weights(run):
        results = gather_lists(predict_part(run.model, run.card, val, run.config, progress))
    run.evaluated = run.step
    if get_rank():
        return
    metrics = score(val, results, run.config)
    log.write(
        "eval",
        run.step,
        weights="ema" if run.average else "model",
        metrics=metrics.values,
        per_class=metrics.per_class,
        instances=metrics.per_class_instances,
        seconds=time.perf_counter() - began,
    )
    shown = "  ".join(
        f"{k} {'n/a' if v is None else f'{v:.1f}'}" for k, v in metrics.values.items() if k.startswith("AP")
    )
    console.print(f"step {run.step}: {shown}")
    ap = metrics.values["AP"]
    if ap is None or ap > run.best:
        run.best = -math.inf if ap is None else ap
        save_checkpoint(folder / "best", run.evaluated_state(), run.card)
        write_atomically(folder / "predictions.json", json.dumps(results))


@contextmanager
def _evaluated_weights(run: Run) -> Iterator[None]:
    """The averaged weights in the model's place, if there are any, for as long as the block.

    Batch statistics are those of the first process, whose model is the one that is saved.
    """
    if run.average is None:
        broadcast_from_first(run.model.buffers())  # as the next training forward does
        yield
        return
    training = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(run.average.state_dict())
    broadcast_from_first(run.model.buffers())
    try:
        yield
    finally:
        run.model.load_state_dict(training)


def predict_part(
    model: Segmenter[Any, Any, Any], card: ModelCard, val: CocoData, config: Config, progress: Progress
) -> list[dict[str, Any]]:
    """COCO results of a model on this process's part of a data set: every image is in one part."""
    size = config.data.test_size
    items = EvaluationSamples(val, size.short, size.longest, get_rank(), get_world_size())
    ids = category_ids_by_name([c.name for c in card.categories], val)
    predictions = predict_data(
        model, items, batch_size=config.eval.batch_size, workers=config.data.workers, progress=progress
    )
    return [r for image_id, (instances,) in predictions for r in coco_results(image_id, instances, ids)]


def score(val: CocoData, results: list[dict[str, Any]], config: Config) -> Metrics:
    """COCO metrics of results on the images of a data set."""
    return evaluate(
        val.annotations,
        results,
        max_detections=config.eval.max_detections,
        backend=config.eval.backend,
        image_ids=val.image_ids.tolist(),
        category_ids=[c.id for c in val.categories],
    )
