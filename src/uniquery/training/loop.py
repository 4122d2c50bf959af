"""The trainer: from a configuration to a trained model and its metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader

from uniquery.data.batch import Batch, EndlessBatches, EvaluationItems, TrainingItems, collate, raise_errors
from uniquery.data.coco import CocoData
from uniquery.errors import ConfigError, UserError
from uniquery.evaluation import Metrics, evaluate
from uniquery.evaluation.inference import category_ids_by_name, coco_results, predict_data
from uniquery.files import write_atomically
from uniquery.querying.contract import Segmenter
from uniquery.training.checkpoint import (
    ModelCard,
    check_classes_unchanged,
    init_from,
    load_trainer_state,
    read_card,
    save_checkpoint,
)
from uniquery.training.config import Config
from uniquery.training.folder import check_folder, introduce, open_folder
from uniquery.training.log import MetricsLog, PhaseClock
from uniquery.training.optim import AveragedWeights, lr_factor, set_learning_rate
from uniquery.training.run import Run, build_run, restore, trainer_state


def train(config: Config, *, resume: bool = False, console: Console | None = None) -> Path:
    """Trains, evaluates and leaves everything in the run's folder, which is returned.

    Args:
        config: the experiment.
        resume: go on from the run's last checkpoint.
        console: where to talk to.

    Raises:
        UserError: anything that is wrong with configuration, data or folder.
    """
    console = console or Console()
    folder = config.folder
    check_folder(config, resume)
    torch.manual_seed(config.seed)
    data, val = load_splits(config)
    run = build_run(config, data, pretrained=not resume)
    if resume:
        saved = load_trainer_state(folder / "last")
        check_classes_unchanged(read_card(folder / "last"), data)
        restore(run, saved)
    else:
        if config.train.init_from:
            console.print(f"init_from {config.train.init_from}: {init_from(run.model, config.train.init_from)}")
            run.average = AveragedWeights(run.model, config.train.ema) if config.train.ema else None
        open_folder(config)
    introduce(run, data, val, console)
    log = MetricsLog(folder, tensorboard=config.train.tensorboard, keep_until=run.step)
    try:
        _fit(run, data, val, folder, log, console)
    finally:
        log.close()
    return folder


def _fit(run: Run, data: CocoData, val: CocoData | None, folder: Path, log: MetricsLog, console: Console) -> None:
    settings = run.config.train
    clock = PhaseClock(run.device)
    batches = _batches(run, data)
    sums: dict[str, Tensor] = {}
    with _progress(console) as progress:
        task = progress.add_task("train", total=run.steps, completed=run.step, note="")
        while run.step < run.steps:
            losses, norm, images = _train_step(run, batches, clock)
            sums = {name: sums.get(name, 0) + loss for name, loss in losses.items()}
            run.step += 1
            is_last = run.step == run.steps
            to_save = is_last or run.step % settings.save_every == 0
            to_evaluate = val is not None and (is_last or run.step % (settings.eval_every or run.steps) == 0)
            # Logging looks for losses that are not finite, so it comes before anything is kept.
            if run.step % settings.log_every == 0 or to_save or to_evaluate:
                note = _log_training(run, log, clock, sums, norm, images)
                sums = {}
                progress.update(task, note=note)
                if not console.is_terminal:
                    console.print(f"step {run.step}/{run.steps}  {note}")
            progress.update(task, completed=run.step)
            if val is not None and to_evaluate:
                _evaluate_and_keep_best(run, val, folder, log, console, progress)
            if to_save:
                save_checkpoint(folder / "last", run.evaluated_state(), run.card, trainer_state(run))


def _train_step(run: Run, batches: Iterator[Batch], clock: PhaseClock) -> tuple[dict[str, Tensor], Tensor, list[int]]:
    """One optimiser step: mean losses of its forwards, the gradient's norm, and the images seen."""
    settings = run.config.train
    totals: dict[str, Tensor] = {}
    images: list[int] = []
    run.objective.train()
    run.optimizer.zero_grad(set_to_none=True)
    for _ in range(settings.accumulate):
        with clock("data"):
            batch = next(batches).to(run.device)
        images += [t.image_id for t in batch.targets]
        with torch.autocast(run.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
            losses = run.objective(batch.images, batch.targets, clock)
        with clock("backward"):
            torch.stack(list(losses.values())).sum().div(settings.accumulate).backward()
        for name, loss in losses.items():
            totals[name] = totals.get(name, 0) + loss.detach() / settings.accumulate
    with clock("step"):
        parameters = [p for p in run.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, run.config.optim.clip_norm or math.inf)
        set_learning_rate(run.optimizer, lr_factor(run.config.schedule, run.step, run.steps))
        run.optimizer.step()
        if run.average:
            run.average.update(run.model)
    clock.steps += 1
    return totals, norm, images


def _log_training(
    run: Run, log: MetricsLog, clock: PhaseClock, sums: dict[str, Tensor], norm: Tensor, images: list[int]
) -> str:
    """Writes a line, and stops a run that has gone astray."""
    count = clock.steps
    losses = {name: (total / count).item() for name, total in sums.items()}
    total, gradient = sum(losses.values()), norm.item()
    if not math.isfinite(total) or not math.isfinite(gradient):
        terms = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
        raise UserError(
            f"Training went astray by step {run.step}: {terms}, gradient norm {gradient:.4g}, last images {images}. "
            "The last checkpoint is unharmed: lower optim.lr, lengthen schedule.warmup_steps or set optim.clip_norm."
        )
    lr = max(group["lr"] for group in run.optimizer.param_groups)
    seconds = clock.take()
    watched = run.objective.watch()
    extra = {"querying": watched} if watched else {}
    seen = run.step * run.config.train.batch_size * run.config.train.accumulate
    log.write("train", run.step, images=seen, losses=losses, lr=lr, grad_norm=gradient, seconds=seconds, **extra)
    return f"loss {total:.3f}  lr {lr:.2g}  {sum(seconds.values()):.2f} s/step (data {seconds['data']:.2f})"


def _evaluate_and_keep_best(
    run: Run, val: CocoData, folder: Path, log: MetricsLog, console: Console, progress: Progress
) -> None:
    began = time.perf_counter()
    task = progress.add_task("eval", total=len(val), note="")
    training = {name: tensor.clone() for name, tensor in run.model.state_dict().items()} if run.average else None
    run.model.load_state_dict(run.evaluated_state())
    try:
        metrics, results = evaluate_model(
            run.model, run.card, val, run.config, lambda n, _: progress.update(task, completed=n)
        )
    finally:
        if training is not None:
            run.model.load_state_dict(training)
        progress.remove_task(task)
    log.write(
        "eval",
        run.step,
        weights="ema" if run.average else "model",
        metrics=metrics.values,
        per_class=metrics.per_class,
        instances=metrics.per_class_instances,
        seconds=time.perf_counter() - began,
    )
    ap = metrics.values["AP"]
    shown = "  ".join(
        f"{k} {'n/a' if v is None else f'{v:.1f}'}" for k, v in metrics.values.items() if k.startswith("AP")
    )
    console.print(f"step {run.step}: {shown}")
    if ap is None or ap > run.best:
        run.best = -math.inf if ap is None else ap
        save_checkpoint(folder / "best", run.evaluated_state(), run.card)
        write_atomically(folder / "predictions.json", json.dumps(results))


def evaluate_model(
    model: Segmenter[Any, Any, Any], card: ModelCard, val: CocoData, config: Config, progress: Any
) -> tuple[Metrics, list[dict[str, Any]]]:
    """COCO metrics of a model on a data set, and the results behind them."""
    size = config.data.test_size
    items = EvaluationItems(val, size.short, size.longest)
    ids = category_ids_by_name([c.name for c in card.categories], val)
    predictions = predict_data(
        model, items, batch_size=config.eval.batch_size, workers=config.data.workers, progress=progress
    )
    results = [r for image_id, (instances,) in predictions for r in coco_results(image_id, instances, ids)]
    return score(val, results, config), results


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


def load_splits(config: Config) -> tuple[CocoData, CocoData | None]:
    """The training and the validation data of an experiment."""
    data = config.data
    if data.train is None:
        raise ConfigError(
            "There is no training data: give --train ANNOTATIONS IMAGES, or data.train in the configuration."
        )
    train_data = CocoData(data.train.annotations, data.train.images, classes=data.classes, keep_empty=data.keep_empty)
    train_data.check_files_exist()
    if data.val is None:
        return train_data, None
    val = CocoData(data.val.annotations, data.val.images, classes=train_data.classes)
    val.check_files_exist()
    return train_data, val


def _batches(run: Run, data: CocoData) -> Iterator[Batch]:
    settings = run.config.train
    sampler = EndlessBatches(
        len(data),
        settings.batch_size // run.config.querying.forwards_per_scene,
        run.config.seed,
        first_step=run.step * settings.accumulate,
        last_step=run.steps * settings.accumulate,
    )
    items = TrainingItems(data, run.config.data.augment, run.config.seed)
    loader: DataLoader[Any] = DataLoader(
        items,
        batch_sampler=sampler,
        num_workers=run.config.data.workers,
        collate_fn=collate,
        pin_memory=run.device.type == "cuda",
        generator=torch.Generator(),  # else each loader would draw its base seed from the global generator
    )
    return raise_errors(loader)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )
