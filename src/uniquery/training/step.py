"""One optimizer step: the gradients of its forwards, then the update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from uniquery.data.batch import Batch
from uniquery.errors import DataError
from uniquery.parallel import all_gather_rows, all_reduce_mean, any_rank, get_rank
from uniquery.querying.keyed_random import keyed_seed
from uniquery.training.config import Config
from uniquery.training.distributed import no_sync
from uniquery.training.optim import lr_factor, set_learning_rate
from uniquery.training.out_of_memory import explain_out_of_memory
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.run import TrainingRun


@dataclass(frozen=True)
class StepResult:
    """Losses and gradient norm of a step, before its update.

    Attributes:
        losses: mean of each term over the forwards of all processes.
        grad_norm: norm of all gradients together, before clipping.
        image_ids: the images of this process.
        local_loss: sum of the losses of this process.
        unreadable: a sentence for each image of this process that cannot be read and was skipped.
    """

    losses: dict[str, Tensor]
    grad_norm: Tensor
    image_ids: list[int]
    local_loss: Tensor
    unreadable: list[str] = field(default_factory=list)

    def is_finite(self) -> bool:
        """Whether every loss and the gradient norm are finite. Synchronizes with the GPU."""
        return bool(torch.stack([self.grad_norm, *self.losses.values()]).isfinite().all())

    def non_finite_images(self) -> list[int]:
        """Images of the processes whose loss is not finite; if only the gradient is not, images of all processes."""
        ids = torch.tensor(self.image_ids, device=self.local_loss.device)
        images, is_non_finite = all_gather_rows([ids, (~self.local_loss.isfinite()).expand(len(ids))])
        return (images[is_non_finite] if is_non_finite.any() else images).tolist()


def compute_gradients(run: TrainingRun, batches: Iterator[Batch], clock: PhaseClock) -> StepResult:
    """Runs the forwards and backwards of one step; no weight is changed.

    Raises:
        DataError: an image cannot be read, by this process or another; all processes raise together.
    """
    totals: dict[str, Tensor] = {}
    image_ids: list[int] = []
    unreadable: list[str] = []
    run.objective.train()
    run.optimizer.zero_grad(set_to_none=True)
    seed_step(run.config, run.step, get_rank())
    for i in range(run.config.train.accumulate):
        with clock("data"):
            batch = _next_batch(batches, run.device)
            unreadable += [sentence for sentences in batch.unreadable for sentence in sentences]
        is_last = i == run.config.train.accumulate - 1
        with (
            explain_out_of_memory(run.config, run.step, clock, batch),
            nullcontext() if is_last else no_sync(run.ddp),
        ):
            batch = batch.to(run.device)
            image_ids += [t.image_id for t in batch.targets]
            for name, loss in forward_and_backward(run.ddp, batch, run.config, clock).items():
                totals[name] = totals.get(name, 0) + loss / run.config.train.accumulate
    with clock("step"):
        local_losses = torch.stack(list(totals.values()))
        means = dict(zip(totals, all_reduce_mean(local_losses), strict=True))
        return StepResult(means, gradient_norm(run.objective), image_ids, local_losses.sum(), unreadable)


def _next_batch(batches: Iterator[Batch], device: torch.device) -> Batch:
    batch: Batch | DataError
    try:
        batch = next(batches)
    except DataError as error:
        batch = error
    is_unreadable = any_rank(isinstance(batch, DataError), device)  # no process may wait for one that stops
    if isinstance(batch, DataError):
        raise batch
    if is_unreadable:
        raise DataError("Another process cannot read an image; its error message is the cause.")
    return batch


def seed_step(config: Config, step: int, rank: int) -> None:
    """Seeds torch from the run's seed, the step and the rank, so that no generator state needs to be saved."""
    torch.manual_seed(keyed_seed(config.seed, step, rank))


def forward_and_backward(objective: nn.Module, batch: Batch, config: Config, clock: PhaseClock) -> dict[str, Tensor]:
    """The detached losses of a batch; their gradients are added to the parameters'."""
    device = batch.images.pixels.device.type
    with torch.autocast(device, torch.bfloat16, enabled=config.train.precision == "bfloat16"):
        losses = objective(batch.images, batch.targets, clock)
    with clock("backward"):
        torch.stack(list(losses.values())).sum().div(config.train.accumulate).backward()
    return {name: loss.detach() for name, loss in losses.items()}


def gradient_norm(objective: nn.Module) -> Tensor:
    """The norm of all gradients together."""
    return get_total_norm([p.grad for p in objective.parameters() if p.grad is not None])


def update_weights(run: TrainingRun, grad_norm: Tensor, clock: PhaseClock) -> None:
    """Clips the gradients, sets the learning rate of the step, updates the weights and then their EMA."""
    with clock("step"):
        limit = run.config.optim.clip_norm
        if limit is not None:
            clip_grads_with_norm_([p for p in run.model.parameters() if p.grad is not None], limit, grad_norm)
        set_learning_rate(run.optimizer, lr_factor(run.config.schedule, run.step, run.steps))
        run.optimizer.step()
        if run.ema:
            run.ema.update(run.model)
