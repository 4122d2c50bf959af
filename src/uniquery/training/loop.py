"""The trainer: from a configuration to a trained model and its metrics."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from uniquery.data.batch import Batch
from uniquery.data.dataset import Dataset
from uniquery.errors import CheckpointError
from uniquery.parallel import any_rank, broadcast_from_first, get_rank, get_world_size, synchronize
from uniquery.signals import StopRequest, stop_requests
from uniquery.training.batches import (
    check_data_unchanged,
    fingerprints,
    load_splits,
    training_batches,
    workers_explained,
)
from uniquery.training.checkpoint import Saver, check_classes_unchanged, load_last, set_aside_damaged
from uniquery.training.config import Config
from uniquery.training.distributed import process_group
from uniquery.training.log import MetricsLog, PhaseClock, SilentLog
from uniquery.training.optim import EMA
from uniquery.training.out_of_memory import memory_explained
from uniquery.training.recovery import StepGuard, describe, non_finite_error, non_finite_line
from uniquery.training.run import Run, build_run, choose_device, images_per_step, restore
from uniquery.training.run_folder import Resume, open_folder, print_summary, should_resume
from uniquery.training.step import Gradients, gradients, update
from uniquery.training.validation import evaluate_run, evaluation_is_due
from uniquery.weights.model_file import init_from


def train(config: Config, *, resume: Resume = False, console: Console | None = None) -> Path:
    """Trains, evaluates and leaves everything in the run's folder, which is returned.

    The first SIGINT or SIGTERM ends it after the step at hand, with a checkpoint; the second at once.

    Args:
        config: the experiment.
        resume: go on from the run's last checkpoint; "auto": if there is one.
        console: where to talk to.

    Raises:
        UserError: anything that is wrong with configuration, data or folder.
        KeyboardInterrupt: SIGINT came, and the run is saved.
        SystemExit: SIGTERM came, and the run is saved.
    """
    with process_group(choose_device(config.train.device)):
        return _train(config, resume, Console(quiet=True) if get_rank() else console or Console())


def _train(config: Config, resume: Resume, console: Console) -> Path:
    is_resumed = should_resume(config, resume)
    # None makes the folder before all have looked at it.
    if any_rank(is_resumed, choose_device(config.train.device)) and not is_resumed:
        raise CheckpointError(f"Another process finds a checkpoint in {config.folder}: all must see the same folder.")
    torch.manual_seed(config.seed)
    data, val = load_splits(config)
    run = build_run(config, data, pretrained=not is_resumed)
    run.data = fingerprints(data, val)
    if is_resumed:
        _resume(run, data, console)
    elif config.train.init_from:
        console.print(f"init_from {config.train.init_from}: {init_from(run.model, config.train.init_from)}")
        run.average = EMA(run.model, config.train.ema) if config.train.ema else None
    if get_world_size() > 1:
        _check_same_start(run)
    if get_rank() == 0:
        open_folder(config, is_new=not is_resumed)
        print_summary(run, data, val, console)
    log = _open_log(run)
    try:
        with _progress(console) as progress, stop_requests() as stop:
            _fit(Work(run, data, val, log, PhaseClock(run.device), stop, console, progress))
    finally:
        log.close()
    return config.folder


def _open_log(run: Run) -> MetricsLog:
    """The first process writes the log."""
    if get_rank():
        return SilentLog()
    settings = run.config.train
    return MetricsLog(
        run.config.folder, tensorboard=settings.tensorboard, keep_until=run.step, evaluated_until=run.evaluated
    )


def _check_same_start(run: Run) -> None:
    """Processes that do not see the same files would train different weights."""
    checksum = 0
    for tensor in run.evaluated_state().values():
        checksum = zlib.crc32(tensor.cpu().numpy().tobytes(), checksum)
    own = torch.tensor([run.step, checksum], device=run.device)
    first = own.clone()
    broadcast_from_first([first])
    if not torch.equal(first, own):
        raise CheckpointError(
            f"Process {get_rank()} begins after step {run.step}, the first one after step {int(first[0])}, or with "
            f"other weights: all processes must see the same {run.config.folder} and train.init_from."
        )


def _resume(run: Run, data: Dataset, console: Console) -> None:
    card, saved, place = load_last(run.config.folder, console)
    synchronize()  # all have read before anything moves
    if get_rank() == 0:
        set_aside_damaged(run.config.folder, place)
    check_classes_unchanged(card, data)
    check_data_unchanged(saved.values.get("data"), run.data)
    try:
        restore(run, saved)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"The checkpoint of {run.config.folder} does not fit this version of the program: "
            f"{' '.join(str(error).split())}."
        ) from None
    console.print(f"going on with {run.config.folder} after step {run.step}")


@dataclass(frozen=True)
class Work:
    """A run and all that it works with."""

    run: Run
    data: Dataset
    val: Dataset | None
    log: MetricsLog
    clock: PhaseClock
    stop: StopRequest
    console: Console
    progress: Progress

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.run.config.folder


def _fit(work: Work) -> None:
    # Closing the batches ends their workers, whatever happens.
    with workers_explained(), closing(training_batches(work.run, work.data)) as batches:
        _take_steps(work, batches)
    if work.stop:
        _exit_with_signal(work)


def _take_steps(work: Work, batches: Iterator[Batch]) -> None:
    """All that are left, with evaluations and checkpoints between them, or until a stop is asked for."""
    run, saver, guard = work.run, Saver(work.run, work.folder, work.log), StepGuard(work.run)
    task = work.progress.add_task("train", total=run.steps, completed=run.step, note="")
    while True:
        if work.val is not None and evaluation_is_due(run):
            if get_rank() == 0:
                saver.save()  # an evaluation takes long, and may fail
            _evaluate(work, work.val)
        is_over = run.step == run.steps or _is_stopped(work)  # asked once: a signal may come at any moment
        if get_rank() == 0 and (is_over or saver.is_due()):
            saver.save()
        if is_over:
            return
        _step(work, guard, batches, task)


def _is_stopped(work: Work) -> bool:
    """Whether a process was asked to stop: all stop after the same step."""
    is_agreed = any_rank(bool(work.stop), work.run.device)
    if is_agreed:
        work.stop.join()
    return is_agreed  # not work.stop itself: a signal that came since is for the next step, in all of them


def _step(work: Work, guard: StepGuard, batches: Iterator[Batch], task: TaskID) -> None:
    """One step: gradients, then the update, unless a loss or gradient is not finite."""
    run, clock = work.run, work.clock
    guard.begin()
    found = gradients(run, batches, clock)
    if found.are_finite():
        with memory_explained(run.config, run.step, clock):
            update(run, found.norm, clock)
        run.sums = {name: run.sums.get(name, 0) + loss for name, loss in found.losses.items()}
        run.summed += 1
        clock.steps += 1
        run.step += 1
        is_evaluated = work.val is not None and evaluation_is_due(run)
        if run.step % run.config.train.log_every == 0 or run.step == run.steps or is_evaluated:
            _log(work, found, task)
    else:
        guard.rollback()
        _leave_out(work, found)
    work.progress.update(task, completed=run.step)


def _leave_out(work: Work, found: Gradients) -> None:
    """Goes on after a step that was taken back, as long as the settings allow."""
    run = work.run
    suspects = found.suspects()
    if run.skipped >= run.config.train.skip_nonfinite:
        raise non_finite_error(run, work.data, found, suspects, work.folder / _own_name("astray"))
    run.skipped += 1
    run.step += 1
    work.log.write("skipped", run.step, **non_finite_line(found, suspects))
    work.console.print(
        f"[yellow]warning:[/] left out {describe(run.step, found, suspects)} "
        f"({run.skipped} of {run.config.train.skip_nonfinite} that train.skip_nonfinite allows)"
    )


def _own_name(name: str) -> str:
    """A name in the run's folder that no other process uses."""
    return f"{name}-{get_rank()}" if get_rank() else name


def _log(work: Work, found: Gradients, task: TaskID) -> None:
    """Writes a line: losses are means since the line before, the rest is the step's own."""
    run, clock = work.run, work.clock
    losses = {name: (total / run.summed).item() for name, total in run.sums.items()}
    run.sums, run.summed = {}, 0
    lr = max(group["lr"] for group in run.optimizer.param_groups)
    seconds = clock.take()
    watched = run.objective.watch()
    if watched:
        watched["memory_age"] /= run.config.train.accumulate  # of pushes, one a forward
    extra = {"querying": watched} if watched else {}
    seen = run.step * images_per_step(run.config)
    gradient = found.norm.item()
    work.log.write("train", run.step, images=seen, losses=losses, lr=lr, grad_norm=gradient, seconds=seconds, **extra)
    total = sum(losses.values())
    note = f"loss {total:.3f}  lr {lr:.2g}  {sum(seconds.values()):.2f} s/step (data {seconds['data']:.2f})"
    work.progress.update(task, note=note)
    if not work.console.is_terminal:
        work.console.print(f"step {run.step}/{run.steps}  {note}")


class _CutShortError(Exception):
    """A stop was asked for in the middle of an evaluation."""


def _evaluate(work: Work, val: Dataset) -> None:
    """Evaluates; a request to stop cuts it short, and the resumed run does it anew."""
    task = work.progress.add_task("eval", total=len(val), note="")

    def progress(done: int, _: int) -> None:
        work.progress.update(task, completed=done)
        if work.stop and get_world_size() == 1:  # others would wait for this one's part
            raise _CutShortError

    work.clock.phase = "eval"
    try:
        with memory_explained(work.run.config, work.run.step, work.clock):
            evaluate_run(work.run, val, work.folder, work.log, work.console, progress)
    except _CutShortError:
        pass
    finally:
        work.progress.remove_task(task)


def _exit_with_signal(work: Work) -> None:
    """Ends as asked, and says so."""
    name = "Ctrl-C" if work.stop.signal == signal.SIGINT else "SIGTERM"
    run = work.run
    if run.step:
        where = f"Stopped by {name} at step {run.step} of {run.steps}: {work.folder / 'last'} holds all of it."
    else:
        where = f"Stopped by {name} before the first step."
    work.console.print(f"{where} Go on with --resume auto.")
    work.stop.obey()


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
