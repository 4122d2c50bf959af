"""The trainer: from a configuration to a trained model and its metrics."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from uniquery.data.batch import Batch
from uniquery.data.dataset import Dataset
from uniquery.errors import ConfigError, DataError
from uniquery.parallel import any_rank, choose_device, get_rank, get_world_size, keep_freed_memory
from uniquery.signals import StopRequest, stop_requests
from uniquery.training.batches import data_checksums, explain_killed_workers, load_splits, training_batches
from uniquery.training.checkpoint import Saver
from uniquery.training.config import Config, with_absolute_data
from uniquery.training.console import RemainingTime, loss_note, training_progress
from uniquery.training.distributed import process_group
from uniquery.training.log import MetricsLog, SilentLog, TrainLine
from uniquery.training.optim import EMA
from uniquery.training.out_of_memory import explain_out_of_memory
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.precision import with_chosen_precision
from uniquery.training.recovery import Savepoint, describe_step, non_finite_error, skipped_step_line
from uniquery.training.resume import Resume, check_same_start, resume_run, should_resume
from uniquery.training.run import TrainingRun, build_run, images_per_step
from uniquery.training.step import StepResult, compute_gradients, update_weights
from uniquery.training.summary import environment, print_summary
from uniquery.training.unreadable import UnreadableImages
from uniquery.training.validation import evaluate_run, evaluation_is_due
from uniquery.weights.model_file import load_matching_weights


def train(config: Config, *, resume: Resume = False, console: Console | None = None) -> Path:
    """Trains and evaluates a model, and returns the folder of the run; `uniquery.train` also writes the report.

    The first SIGINT or SIGTERM ends it after the current step, with a checkpoint; a second SIGINT ends it at once.

    Args:
        config: the experiment, from `load_config` or built in Python.
        resume: continue from the last checkpoint of the run; "auto": if there is one.
        console: where to print; by default the standard output.

    Raises:
        UserError: configuration, data or folder are wrong, or memory or disk space ran out.
        KeyboardInterrupt: SIGINT came, and the run is saved.
        SystemExit: SIGTERM came, and the run is saved.
    """
    device = choose_device(config.train.device)
    config = with_chosen_precision(with_absolute_data(config), device)
    keep_freed_memory(device)
    with process_group(device):
        return _train(config, resume, Console(quiet=True) if get_rank() else console or Console())


def _train(config: Config, resume: Resume, console: Console) -> Path:
    is_resumed = should_resume(config, resume)
    torch.manual_seed(config.seed)
    data, val = load_splits(config)
    if config.train.patience is not None and val is None:
        raise ConfigError("train.patience needs validation data: give --val ANNOTATIONS IMAGES, or leave it out.")
    run = build_run(config, data, pretrained=not is_resumed)
    run.data_checksums = data_checksums(data, val)
    if is_resumed:
        resume_run(run, data, console)
    elif config.train.init_from:
        match = load_matching_weights(run.model, config.train.init_from)
        console.print(f"init_from {config.train.init_from}: {match}")
        run.ema = EMA(run.model, config.train.ema) if config.train.ema else None
    if get_world_size() > 1:
        check_same_start(run)
    if get_rank() == 0:
        per_epoch = {"steps_per_epoch": run.steps / config.train.epochs} if config.train.epochs else {}
        run.folder.create(config, None if is_resumed else {**environment(config), **per_epoch})
        print_summary(run, data, val, console)
    log = _open_log(run)
    try:
        with training_progress(console) as progress, stop_requests() as stop:
            Trainer(run, data, val, log=log, stop=stop, console=console, progress=progress).fit()
    finally:
        log.close()
    return config.folder


def _open_log(run: TrainingRun) -> MetricsLog:
    """The log of rank 0; other ranks write nothing."""
    if get_rank():
        return SilentLog()
    tensorboard = run.folder.tensorboard if run.config.train.tensorboard else None
    return MetricsLog(
        run.folder.metrics_file, tensorboard=tensorboard, last_step=run.step, last_eval_step=run.eval_step
    )


class _EvaluationStoppedError(Exception):
    """A signal came during an evaluation."""


class Trainer:
    """Trains a run until its last step or a signal, with evaluations, checkpoints and log lines.

    Args:
        run: the training run, at its first step or resumed.
        data: the training data.
        val: the validation data, if there is any.
        log: where metrics are written.
        stop: whether a signal came.
        console: where to print.
        progress: the progress bar.
    """

    def __init__(
        self,
        run: TrainingRun,
        data: Dataset,
        val: Dataset | None,
        *,
        log: MetricsLog,
        stop: StopRequest,
        console: Console,
        progress: Progress,
    ) -> None:
        self.run, self.data, self.val = run, data, val
        self.log, self.stop, self.console, self.progress = log, stop, console, progress
        self.clock = PhaseClock(run.device)
        self.saver = Saver(run, log)
        self.savepoint = Savepoint(run)
        self.task = progress.add_task("train", total=run.steps, completed=run.step, note="")
        self.remaining = RemainingTime(run.step)
        self.unreadable = UnreadableImages(console)

    def fit(self) -> None:
        """Trains to the end.

        Raises:
            UserError: an image cannot be read, a loss is not finite, or memory or disk space ran out.
            KeyboardInterrupt: SIGINT came, and the run is saved.
            SystemExit: SIGTERM came, and the run is saved.
        """
        # Closing the batches ends the data workers, also after an error.
        with explain_killed_workers(), closing(training_batches(self.run, self.data)) as batches:
            while True:
                if self.val is not None and evaluation_is_due(self.run):
                    if get_rank() == 0:
                        self.saver.save()  # an evaluation is long and may fail
                    self.evaluate(self.val)
                is_done = self.run.step == self.run.steps or self.is_out_of_patience()
                is_done = is_done or self.is_stopped()  # asked once: a signal may come any time
                if get_rank() == 0 and (is_done or self.saver.is_due()):
                    self.saver.save()
                if is_done:
                    break
                self.step(batches)
        if self.stop:
            self._exit()

    def is_out_of_patience(self) -> bool:
        """Whether training stops early; only the first process knows the scores."""
        run = self.run
        if run.config.train.patience is None or run.eval_step != run.step:
            return False
        is_out = any_rank(get_rank() == 0 and run.is_out_of_patience, run.device)
        if is_out:
            count = f"{run.evals_since_best} evaluation{'s' * (run.evals_since_best > 1)}"
            self.console.print(
                f"step {run.step}: no new best in {count} (train.patience): training stops here instead of at step "
                f"{run.steps}.",
                soft_wrap=True,
            )
        return is_out

    def is_stopped(self) -> bool:
        """Whether any process got a signal; all processes stop after the same step."""
        is_stopped = any_rank(bool(self.stop), self.run.device)
        if is_stopped:
            self.stop.request()
        # Not self.stop: a signal that came after `any_rank` must count in the next step, in all processes.
        return is_stopped

    def step(self, batches: Iterator[Batch]) -> None:
        """One step: gradients, then the update, unless a loss or gradient is not finite."""
        run = self.run
        self.savepoint.save()
        try:
            result = compute_gradients(run, batches, self.clock)
        except DataError as error:
            self.savepoint.rollback()
            raise self._saved_after(error) from None
        self.unreadable.add(result.unreadable)
        if result.is_finite():
            with explain_out_of_memory(run.config, run.step, self.clock):
                update_weights(run, result.grad_norm, self.clock)
            run.loss_sums = {name: run.loss_sums.get(name, 0) + loss for name, loss in result.losses.items()}
            run.loss_count += 1
            self.clock.steps += 1
            run.step += 1
            is_evaluated = self.val is not None and evaluation_is_due(run)
            if run.step % run.config.train.log_every == 0 or run.step == run.steps or is_evaluated:
                self._log(result)
        else:
            self.savepoint.rollback()
            self._skip(result)
        self.progress.update(self.task, completed=run.step)

    def _saved_after(self, error: DataError) -> DataError:
        """The error of an image that cannot be read, with a checkpoint of the steps before it."""
        if get_rank() == 0:
            self.saver.save()
        step = self.run.step
        saved = f"at step {step}, which is saved in {self.run.folder.last}" if step else "before its first step"
        return DataError(
            f"{error} Training stopped {saved}: repair the file, or set data.on_unreadable=skip, then continue with "
            "--resume auto."
        )

    def _skip(self, result: StepResult) -> None:
        """Counts a step that was rolled back as skipped, or raises if no more may be skipped."""
        run, limit = self.run, self.run.config.train.skip_nonfinite
        image_ids = result.non_finite_images()
        if run.skipped >= limit:
            raise non_finite_error(run, self.data, result, image_ids)
        run.skipped += 1
        run.step += 1
        self.log.write(skipped_step_line(run.step, result, image_ids))
        self.console.print(
            f"[yellow]warning:[/] non-finite loss or gradient, skipped {describe_step(run.step, result, image_ids)} "
            f"({run.skipped} of at most {limit} skipped steps, train.skip_nonfinite)"
        )

    def _log(self, result: StepResult) -> None:
        """Writes a line: losses are means since the last line, the rest is that of the current step."""
        run = self.run
        losses = {name: (total / run.loss_count).item() for name, total in run.loss_sums.items()}
        run.loss_sums, run.loss_count = {}, 0
        lr = max(group["lr"] for group in run.optimizer.param_groups)
        seconds = self.clock.pop_means()
        querying = run.objective.statistics()
        if querying:
            querying["memory_age"] /= run.config.train.accumulate  # counted in forwards
        self.log.write(
            TrainLine(
                step=run.step,
                images=run.step * images_per_step(run.config),
                losses=losses,
                lr=lr,
                grad_norm=result.grad_norm.item(),
                seconds=seconds,
                querying=querying,
            )
        )
        note = loss_note(losses, lr, seconds)
        self.progress.update(self.task, note=note)
        if not self.console.is_terminal:
            remaining = self.remaining(run.step, run.steps)
            self.console.print(f"step {run.step}/{run.steps}  {note}  ETA {remaining}", soft_wrap=True)
        if run.config.data.on_unreadable == "skip":
            self.unreadable.print_new()

    def evaluate(self, val: Dataset) -> None:
        """Evaluates; a signal ends it, and the resumed run evaluates again."""
        run = self.run
        task = self.progress.add_task("eval", total=len(val), note="")

        def progress(done: int, _: int) -> None:
            self.progress.update(task, completed=done)
            if self.stop and get_world_size() == 1:  # other processes would wait for this one's results
                raise _EvaluationStoppedError

        self.clock.phase = "eval"
        try:
            with explain_out_of_memory(run.config, run.step, self.clock):
                evaluate_run(run, val, self.log, self.console, progress)
        except _EvaluationStoppedError:
            pass
        except DataError as error:
            raise self._saved_after(error) from None
        finally:
            self.progress.remove_task(task)

    def _exit(self) -> None:
        """Prints where the run stopped, and ends with the exit code of the signal."""
        run = self.run
        name = "Ctrl-C" if self.stop.signal == signal.SIGINT else "SIGTERM"
        if run.step:
            message = f"Stopped by {name} at step {run.step} of {run.steps}; the checkpoint is {run.folder.last}."
        else:
            message = f"Stopped by {name} before the first step."
        self.console.print(f"{message} Continue with --resume auto.")
        self.stop.exit()
