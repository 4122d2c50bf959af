"""The trainer: from a configuration to a trained model and its metrics."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from uniquery import __version__
from uniquery.data.batch import Batch, EndlessBatches, EvaluationItems, TrainingItems, collate, raise_errors
from uniquery.data.coco import CocoData
from uniquery.errors import ConfigError, UserError
from uniquery.evaluation import Metrics, evaluate
from uniquery.evaluation.inference import category_ids_by_name, coco_results, predict_data
from uniquery.files import make_folder, write_atomically
from uniquery.querying import BaseObjective
from uniquery.querying.contract import Segmenter
from uniquery.segmenters import build_segmenter
from uniquery.training.checkpoint import ModelCard, TrainerState, init_from, load_trainer_state, save_checkpoint
from uniquery.training.config import Config, flat, parse_config, read_yaml, to_yaml
from uniquery.training.log import MetricsLog, PhaseClock
from uniquery.training.optim import AveragedWeights, build_optimizer, build_schedule

MAY_DIFFER_ON_RESUME = ("output", "data.workers", "train.log_every", "train.save_every", "train.device", "train.tensorboard")


@dataclass
class Run:
    """Everything that changes while training."""

    config: Config
    card: ModelCard
    model: Segmenter[Any, Any, Any]
    objective: BaseObjective
    optimizer: Optimizer
    schedule: LambdaLR
    average: AveragedWeights | None
    steps: int
    device: torch.device
    step: int = 0
    best: float = -math.inf

    def evaluated_state(self) -> dict[str, Tensor]:
        """The weights that are evaluated and saved as the model."""
        return self.average.state_dict() if self.average else self.model.state_dict()


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
    folder = _claim_folder(config, resume)
    torch.manual_seed(config.seed)
    data, val = load_splits(config)
    run = _build(config, data)
    if resume:
        _restore(run, load_trainer_state(folder / "last"))
    elif config.train.init_from:
        console.print(f"init_from {config.train.init_from}: {init_from(run.model, config.train.init_from)}")
        run.average = AveragedWeights(run.model, config.train.ema) if config.train.ema else None
    _introduce(run, data, val, console)
    log = MetricsLog(folder, tensorboard=config.train.tensorboard, keep_until=run.step if resume else None)
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
            if run.step % settings.log_every == 0 or is_last:
                note = _log_training(run, log, clock, sums, norm, images)
                sums = {}
                progress.update(task, note=note)
                if not console.is_terminal:
                    console.print(f"step {run.step}/{run.steps}  {note}")
            progress.update(task, completed=run.step)
            if val is not None and (is_last or (settings.eval_every and run.step % settings.eval_every == 0)):
                _evaluate_and_keep_best(run, val, folder, log, console, progress)
            if run.step % settings.save_every == 0 or is_last:
                save_checkpoint(folder / "last", run.evaluated_state(), run.card, _trainer_state(run))


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
        run.optimizer.step()
        run.schedule.step()
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
            f"Training went astray by step {run.step}: {terms}, gradient norm {gradient:.4g}, last images {images}. The last "
            "checkpoint is unharmed: lower optim.lr, lengthen schedule.warmup_steps or set optim.clip_norm."
        )
    lr = run.optimizer.param_groups[0]["lr"]
    seconds = clock.take()
    seen = run.step * run.config.train.batch_size * run.config.train.accumulate
    log.write("train", run.step, images=seen, losses=losses, lr=lr, grad_norm=gradient, seconds=seconds)
    return f"loss {total:.3f}  lr {lr:.2g}  {sum(seconds.values()):.2f} s/step (data {seconds['data']:.2f})"


def _evaluate_and_keep_best(
    run: Run, val: CocoData, folder: Path, log: MetricsLog, console: Console, progress: Progress
) -> None:
    began = time.perf_counter()
    task = progress.add_task("eval", total=len(val), note="")
    training = {name: tensor.clone() for name, tensor in run.model.state_dict().items()} if run.average else None
    run.model.load_state_dict(run.evaluated_state())
    try:
        metrics, results = evaluate_model(run.model, run.card, val, run.config, lambda n, _: progress.update(task, completed=n))
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
    shown = "  ".join(f"{k} {'n/a' if v is None else f'{v:.1f}'}" for k, v in metrics.values.items() if k.startswith("AP"))
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
    )


def load_splits(config: Config) -> tuple[CocoData, CocoData | None]:
    """The training and the validation data of an experiment."""
    data = config.data
    if data.train is None:
        raise ConfigError("There is no training data: give --train ANNOTATIONS IMAGES, or data.train in the configuration.")
    train_data = CocoData(data.train.annotations, data.train.images, classes=data.classes, keep_empty=data.keep_empty)
    train_data.check_files_exist()
    if data.val is None:
        return train_data, None
    val = CocoData(data.val.annotations, data.val.images, classes=train_data.classes)
    val.check_files_exist()
    return train_data, val


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one."""
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"train.device '{name}' is not usable here: {str(error).splitlines()[0]}") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _build(config: Config, data: CocoData) -> Run:
    settings = config.train
    device = choose_device(settings.device)
    card = ModelCard(config.model, config.backbone, tuple(data.categories), config.data.test_size)
    model = build_segmenter(config.model, config.backbone, len(data.categories)).to(device)
    effective = settings.batch_size * settings.accumulate
    steps = settings.steps or max(1, round((settings.epochs or 0) * len(data) / effective))
    optimizer = build_optimizer(model, config.optim, effective)
    average = AveragedWeights(model, settings.ema) if settings.ema else None
    objective, schedule = BaseObjective(model), build_schedule(optimizer, config.schedule, steps)
    return Run(config, card, model, objective, optimizer, schedule, average, steps, device)


def _batches(run: Run, data: CocoData) -> Iterator[Batch]:
    settings = run.config.train
    sampler = EndlessBatches(
        len(data),
        settings.batch_size,
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


def _trainer_state(run: Run) -> TrainerState:
    tensors = {f"model/{name}": tensor for name, tensor in run.model.state_dict().items()}
    state = run.optimizer.state_dict()
    for index, slots in state["state"].items():
        tensors |= {f"optimizer/{index}/{slot}": v for slot, v in slots.items() if isinstance(v, Tensor)}
    tensors["random/cpu"] = torch.get_rng_state()
    if run.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(run.device)
    values = {"step": run.step, "best": None if math.isinf(run.best) else run.best}
    if run.average:
        tensors |= {f"average/{name}": tensor for name, tensor in run.average.state.items()}
        values["average_steps"] = run.average.steps
    return TrainerState(tensors, values)


def _restore(run: Run, saved: TrainerState) -> None:
    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in saved.tensors.items() if name.startswith(prefix)}

    run.model.load_state_dict(part("model/"))
    state = run.optimizer.state_dict()
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part("optimizer/").items():
        index, slot = name.split("/")
        slots.setdefault(int(index), {})[slot] = tensor
    run.optimizer.load_state_dict({**state, "state": slots})
    run.step = saved.values["step"]
    run.best = -math.inf if saved.values["best"] is None else saved.values["best"]
    for _ in range(run.step):
        run.schedule.step()
    torch.set_rng_state(saved.tensors["random/cpu"])
    if "random/cuda" in saved.tensors and run.device.type == "cuda":
        torch.cuda.set_rng_state(saved.tensors["random/cuda"], run.device)
    if run.average:
        run.average.state = {name: tensor.to(run.device) for name, tensor in part("average/").items()}
        run.average.steps = saved.values["average_steps"]


def _claim_folder(config: Config, resume: bool) -> Path:
    folder = config.folder
    file = folder / "config.yaml"
    if resume:
        if not file.is_file():
            raise UserError(f"Nothing to resume: {file} is missing. Train without --resume first.")
        before, now = flat(parse_config(read_yaml(file), where=str(file))), flat(config)
        changed = [k for k in now if before.get(k) != now[k] and not k.startswith(MAY_DIFFER_ON_RESUME)]
        if changed:
            changes = ", ".join(f"{k} was {before.get(k)} and is {now[k]}" for k in changed[:5])
            raise ConfigError(f"--resume of {folder} with another configuration: {changes}. Use another name for a new run.")
        return folder
    if file.exists():
        raise UserError(f"{folder} already holds a run: give --resume to go on with it, or another --name.")
    make_folder(folder)
    write_atomically(file, to_yaml(config))
    write_atomically(folder / "environment.json", json.dumps(environment(config), indent=2))
    return folder


def environment(config: Config) -> dict[str, Any]:
    """What a run was made with."""
    import numpy as np

    return {
        "uniquery": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": str(choose_device(config.train.device)),
        "threads": torch.get_num_threads(),
        "seed": config.seed,
        "command": " ".join(sys.argv),
    }


def _introduce(run: Run, data: CocoData, val: CocoData | None, console: Console) -> None:
    settings = run.config.train
    effective = settings.batch_size * settings.accumulate
    trainable = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in run.model.parameters())
    console.print(f"[bold]{run.config.model.name}[/] on {run.config.backbone.name}: {total / 1e6:.1f} M parameters, "
                  f"{trainable / 1e6:.1f} M of them trained, on {run.device}")
    console.print(f"train: {len(data)} images, {int((~data.crowd).sum())} instances, {len(data.categories)} classes; "
                  f"val: {f'{len(val)} images' if val else 'none'}")
    console.print(f"{run.steps} steps of {settings.batch_size} × {settings.accumulate} = {effective} images "
                  f"({run.steps * effective / len(data):.1f} epochs), lr {run.optimizer.param_groups[0]['initial_lr']:.3g}")
    for step in run.config.data.augment:
        console.print(f"  augment {step!r}")
    for warning in data.warnings[:3]:
        console.print(f"[yellow]warning:[/] {warning}")
    if len(data.warnings) > 3:
        console.print(f"[yellow]warning:[/] {len(data.warnings) - 3} more: uniquery data check")
    _warn_of_crowds(run.config, data, console)


def _warn_of_crowds(config: Config, data: CocoData, console: Console) -> None:
    most = int(data.instances_per_image().max())
    limits = {"model.max_detections": config.model.max_detections, "eval.max_detections": config.eval.max_detections}
    for key, limit in limits.items():
        if most > limit:
            console.print(f"[yellow]warning:[/] an image has {most} instances, more than {key} = {limit}: some cannot be found.")


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
