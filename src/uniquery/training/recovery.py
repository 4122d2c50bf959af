"""A step that goes astray: noticed before it changes a weight, taken back, told, and kept so that it can run again."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from uniquery.data.dataset import Dataset
from uniquery.errors import UserError
from uniquery.training.batches import training_batches
from uniquery.training.replay import as_number, keep_step, python_line
from uniquery.training.run import Run
from uniquery.training.step import Gradients


class StepGuard:
    """Remembers what the forwards of a step change, so that a step can be taken back before its update.

    That is the statistics of normalization layers and the memory's new pixels; weights change in the update only.

    Args:
        run: whose steps are guarded.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._buffers = list(run.model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The state now is the one to go back to."""
        self._forwards = self.run.objective.steps
        self.run.objective.memory.mark()
        _copy(self._buffers, self._copies)

    @torch.no_grad()
    def rollback(self) -> None:
        """Back to the state at the last `begin`."""
        self.run.objective.steps = self._forwards
        self.run.objective.memory.rollback()
        _copy(self._copies, self._buffers)


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)


def describe(step: int, found: Gradients, images: list[int]) -> str:
    """A step in words: its losses, its gradient's norm, its images."""
    terms = ", ".join(f"{name} {loss.item():.4g}" for name, loss in found.losses.items())
    return f"step {step}: {terms}, gradient norm {found.norm.item():.4g}, images {images}"


def non_finite_line(found: Gradients, images: list[int]) -> dict[str, object]:
    """What the log says of a step that was left out; json knows no nan."""
    losses = {name: as_number(loss.item()) for name, loss in found.losses.items()}
    return {"losses": losses, "grad_norm": as_number(found.norm.item()), "image_ids": images}


def non_finite_error(run: Run, data: Dataset, found: Gradients, images: list[int], folder: Path) -> UserError:
    """Keeps a step that was taken back, of several processes this one's part, and says all about it."""
    batches = list(training_batches(run, data, steps=(run.step, run.step + 1), workers=0))
    try:
        keep_step(folder, run, batches, found)
        kept = f"It is kept in {folder} and runs again with: {python_line(folder)}."
    except UserError as error:
        kept = f"It could not be kept: {error}"
    allowed = f" after {run.skipped} steps that were left out" if run.skipped else ""
    return UserError(
        f"Training went astray{allowed} in {describe(run.step + 1, found, images)}. No weight was changed by it, and "
        f"the checkpoints are unharmed. {kept} Lower optim.lr, lengthen schedule.warmup_steps, set optim.clip_norm, or "
        f"let more than {run.config.train.skip_nonfinite} such steps pass with train.skip_nonfinite."
    )
