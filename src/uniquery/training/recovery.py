"""A step with a non-finite loss or gradient: detected before it changes a weight, rolled back, reported and saved."""

from __future__ import annotations

import torch
from torch import Tensor

from uniquery.data.dataset import Dataset
from uniquery.errors import UserError
from uniquery.parallel import get_rank
from uniquery.training.batches import training_batches
from uniquery.training.log import SkippedStepLine, json_number
from uniquery.training.replay import replay_command, save_step
from uniquery.training.run import TrainingRun
from uniquery.training.step import StepResult


class Savepoint:
    """A copy in memory, not a checkpoint: it undoes the forwards of one step, before the update of the weights.

    It holds what forwards change: statistics of normalization layers, and the pixels that were overwritten in the
    memory.

    Args:
        run: the training run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._buffers = list(run.model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]
        self.save()

    @torch.no_grad()
    def save(self) -> None:
        """Saves the current state."""
        self._forwards = self.run.objective.forwards
        self.run.objective.memory.savepoint()
        _copy(self._buffers, self._copies)

    @torch.no_grad()
    def rollback(self) -> None:
        """Restores the state of the last `save`."""
        self.run.objective.forwards = self._forwards
        self.run.objective.memory.rollback()
        _copy(self._copies, self._buffers)


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)


def describe_step(step: int, result: StepResult, image_ids: list[int]) -> str:
    """The losses, the gradient norm and the images of a step as text."""
    terms = ", ".join(f"{name} {loss.item():.4g}" for name, loss in result.losses.items())
    return f"step {step}: {terms}, gradient norm {result.grad_norm.item():.4g}, images {image_ids}"


def skipped_step_line(step: int, result: StepResult, image_ids: list[int]) -> SkippedStepLine:
    """The log line of a skipped step."""
    losses = {name: json_number(loss.item()) for name, loss in result.losses.items()}
    return SkippedStepLine(
        step=step, losses=losses, grad_norm=json_number(result.grad_norm.item()), image_ids=image_ids
    )


def non_finite_error(run: TrainingRun, data: Dataset, result: StepResult, image_ids: list[int]) -> UserError:
    """Saves a step that was rolled back, each process its own part, and returns the error that explains it."""
    batches = list(training_batches(run, data, steps=(run.step, run.step + 1), workers=0))
    folder = run.folder.non_finite_step(get_rank())
    try:
        save_step(folder, run, batches, result)
        saved = f"The step is saved in {folder}; replay it with: {replay_command(folder)}."
    except UserError as error:
        saved = f"The step could not be saved: {error}"
    skipped = f" after {run.skipped} skipped steps" if run.skipped else ""
    return UserError(
        f"Non-finite loss or gradient{skipped} at {describe_step(run.step + 1, result, image_ids)}. No weight was "
        f"changed, and no checkpoint. {saved} Lower optim.lr, lengthen schedule.warmup_steps, set optim.clip_norm, or "
        f"allow more than {run.config.train.skip_nonfinite} such steps with train.skip_nonfinite."
    )
