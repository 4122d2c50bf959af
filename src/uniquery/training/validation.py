"""Scores a run on its validation data, and keeps its best model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from uniquery.data.dataset import Dataset, Row, is_panoptic
from uniquery.evaluation import Metrics, evaluate
from uniquery.evaluation.inference import Progress, predict_dataset
from uniquery.evaluation.panoptic import PanopticMetrics, evaluate_panoptic, predict_panoptic_dataset
from uniquery.evaluation.tables import format_percent
from uniquery.parallel import broadcast_from_first, gather_lists, get_rank, get_world_size
from uniquery.training.checkpoint import save_checkpoint
from uniquery.training.log import EvalLine, MetricsLog
from uniquery.training.run import TrainingRun


def evaluation_is_due(run: TrainingRun) -> bool:
    """Whether the run is at a step after which it is evaluated, and was not evaluated there yet."""
    every = run.config.train.eval_every or run.steps
    return run.step > run.eval_step and (run.step == run.steps or run.step % every == 0)


def evaluate_run(run: TrainingRun, val: Dataset, log: MetricsLog, console: Console, progress: Progress) -> None:
    """Scores the weights that are to be saved, and keeps them if their score is the best so far.

    Each process predicts its share of the images; the first process scores them all.
    """
    start = time.perf_counter()
    with _evaluated_weights(run):
        results, unreadable = (gather_lists(rows) for rows in _predict(run, val, progress))
    run.eval_step = run.step
    if get_rank():
        return
    for sentence in unreadable:
        console.print(f"[yellow]warning:[/] {escape(sentence)} Its instances count as not found.", soft_wrap=True)
    metrics, not_scored = _score(run, val, results)
    for sentence in not_scored:
        console.print(f"[yellow]warning:[/] {escape(sentence)} Its image is not scored.", soft_wrap=True)
    log.write(
        EvalLine(
            step=run.step,
            weights="ema" if run.ema else "model",
            headline=metrics.headline,
            metrics=metrics.values,
            per_class=metrics.per_class,
            instances=metrics.per_class_instances,
            seconds=time.perf_counter() - start,
        )
    )
    values = {name: value for name, value in metrics.values.items() if name.startswith(metrics.headline)}
    console.print(f"step {run.step}: " + "  ".join(f"{name} {format_percent(v, 1)}" for name, v in values.items()))
    run.evals_since_best += 1
    if metrics.score is None or metrics.score > run.best:
        run.evals_since_best = 0
        if metrics.score is not None:
            score = f"{metrics.headline} {format_percent(metrics.score, 1)}"
            console.print(f"step {run.step}: new best {score}, saved in {run.folder.best}", soft_wrap=True)
        run.best = -math.inf if metrics.score is None else metrics.score
        save_checkpoint(run.folder.best, run.eval_state_dict(), run.info)
        run.folder.write_predictions(results)


def _score(run: TrainingRun, val: Dataset, results: list[Row]) -> tuple[Metrics | PanopticMetrics, list[str]]:
    """Mask AP, or panoptic quality for data with things and stuff; and a sentence for each image that has none."""
    settings, not_scored = run.config.eval, list[str]()
    if is_panoptic(val.categories):
        truth = val.ground_truth(not_scored.append if run.config.data.on_unreadable == "skip" else None)
        return evaluate_panoptic(truth, results), not_scored
    metrics = evaluate(
        val.ground_truth(),
        results,
        max_detections=settings.max_detections,
        backend=settings.backend,
        protocol=settings.protocol,
    )
    return metrics, not_scored


def _predict(run: TrainingRun, val: Dataset, progress: Progress) -> tuple[list[Row], list[str]]:
    """COCO results on this process's share of the images, and a sentence for each image that cannot be read."""
    config, unreadable = run.config, list[str]()
    on_unreadable = unreadable.append if config.data.on_unreadable == "skip" else None
    if is_panoptic(val.categories):
        segments = predict_panoptic_dataset(
            run.model,
            val,
            run.info.categories,
            config.data.test_size,
            batch_size=config.eval.batch_size,
            workers=config.data.workers,
            rank=get_rank(),
            ranks=get_world_size(),
            progress=progress,
            on_unreadable=on_unreadable,
        )
        return segments, unreadable
    (results,) = predict_dataset(
        run.model,
        val,
        [c.name for c in run.info.categories],
        config.data.test_size,
        batch_size=config.eval.batch_size,
        workers=config.data.workers,
        rank=get_rank(),
        ranks=get_world_size(),
        progress=progress,
        on_unreadable=on_unreadable,
    ).values()
    return results, unreadable


@contextmanager
def _evaluated_weights(run: TrainingRun) -> Iterator[None]:
    """Puts the EMA weights into the model, if there are any, until the block ends.

    Buffers such as batch statistics are those of the first process, whose model is the one that is saved.
    """
    if run.ema is None:
        broadcast_from_first(run.model.buffers())  # as the next training forward does
        yield
        return
    training = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(run.ema.state_dict())
    broadcast_from_first(run.model.buffers())
    try:
        yield
    finally:
        run.model.load_state_dict(training)
