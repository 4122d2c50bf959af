"""One optimiser step: gradients over its forwards, then the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from uniquery.data.batch import Batch
from uniquery.querying import UniqueQuerying
from uniquery.training.config import Config
from uniquery.training.log import PhaseClock
from uniquery.training.optim import lr_factor, set_learning_rate
from uniquery.training.out_of_memory import memory_explained
from uniquery.training.run import Run


@dataclass(frozen=True)
class Gradients:
    """What the forwards of a step gave, beside the gradients themselves.

    Attributes:
        losses: mean of each term over the forwards.
        norm: of all gradients together, before clipping.
        images: ids of the images that were seen.
    """

    losses: dict[str, Tensor]
    norm: Tensor
    images: list[int]

    def are_finite(self) -> bool:
        """Whether every loss and gradient is a number; the one place of a step that waits for a GPU's results."""
        return bool(torch.stack([self.norm, *self.losses.values()]).isfinite().all())


def gradients(run: Run, batches: Iterator[Batch], clock: PhaseClock) -> Gradients:
    """Runs the forwards and backwards of one step; no weight is changed."""
    totals: dict[str, Tensor] = {}
    images: list[int] = []
    run.objective.train()
    run.optimizer.zero_grad(set_to_none=True)
    for _ in range(run.config.train.accumulate):
        with clock("data"):
            batch = next(batches)
        with memory_explained(run.config, run.step, clock, batch):
            batch = batch.to(run.device)
            images += [t.image_id for t in batch.targets]
            for name, loss in forward_and_backward(run.objective, batch, run.config, clock).items():
                totals[name] = totals.get(name, 0) + loss / run.config.train.accumulate
    with clock("step"):
        return Gradients(totals, gradient_norm(run.objective), images)


def forward_and_backward(
    objective: UniqueQuerying, batch: Batch, config: Config, clock: PhaseClock
) -> dict[str, Tensor]:
    """The losses of a batch, detached, after their gradients were added to those already there."""
    device = batch.images.pixels.device.type
    with torch.autocast(device, torch.bfloat16, enabled=config.train.precision == "bfloat16"):
        losses = objective(batch.images, batch.targets, clock)
    with clock("backward"):
        torch.stack(list(losses.values())).sum().div(config.train.accumulate).backward()
    return {name: loss.detach() for name, loss in losses.items()}


def gradient_norm(objective: UniqueQuerying) -> Tensor:
    """The norm of all gradients together."""
    return get_total_norm([p.grad for p in objective.parameters() if p.grad is not None])


def update(run: Run, norm: Tensor, clock: PhaseClock) -> None:
    """Changes the weights by the gradients, clipped, at the step's learning rate; then their average."""
    with clock("step"):
        limit = run.config.optim.clip_norm
        if limit is not None:
            clip_grads_with_norm_([p for p in run.model.parameters() if p.grad is not None], limit, norm)
        set_learning_rate(run.optimizer, lr_factor(run.config.schedule, run.step, run.steps))
        run.optimizer.step()
        if run.average:
            run.average.update(run.model)
