"""One optimizer step: gradients over its forwards, then the update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from uniquery.data.batch import Batch
from uniquery.parallel import all_reduce_mean, gather_rows, get_rank
from uniquery.querying.keyed_random import keyed_seed
from uniquery.training.config import Config
from uniquery.training.distributed import no_sync
from uniquery.training.log import PhaseClock
from uniquery.training.optim import lr_factor, set_learning_rate
from uniquery.training.out_of_memory import memory_explained
from uniquery.training.run import Run


@dataclass(frozen=True)
class Gradients:
    """What the forwards of a step gave, beside the gradients themselves.

    Attributes:
        losses: mean of each term over the forwards of all processes.
        norm: of all gradients together, before clipping.
        images: ids of the images that this process saw.
        own: sum of the losses of this process.
    """

    losses: dict[str, Tensor]
    norm: Tensor
    images: list[int]
    own: Tensor

    def are_finite(self) -> bool:
        """Whether every loss and gradient is a number; the one place of a step that waits for a GPU's results."""
        return bool(torch.stack([self.norm, *self.losses.values()]).isfinite().all())

    def suspects(self) -> list[int]:
        """Ids of the images of all processes whose own loss is not finite; if only a gradient is not, of all."""
        ids = torch.tensor(self.images, device=self.own.device)
        images, is_non_finite = gather_rows([ids, (~self.own.isfinite()).expand(len(ids))])
        return (images[is_non_finite] if is_non_finite.any() else images).tolist()


def gradients(run: Run, batches: Iterator[Batch], clock: PhaseClock) -> Gradients:
    """Runs the forwards and backwards of one step; no weight is changed."""
    totals: dict[str, Tensor] = {}
    images: list[int] = []
    run.objective.train()
    run.optimizer.zero_grad(set_to_none=True)
    seed_step(run.config, run.step, get_rank())
    for i in range(run.config.train.accumulate):
        with clock("data"):
            batch = next(batches)
        is_last = i == run.config.train.accumulate - 1
        with (
            memory_explained(run.config, run.step, clock, batch),
            nullcontext() if is_last else no_sync(run.parallel),
        ):
            batch = batch.to(run.device)
            images += [t.image_id for t in batch.targets]
            for name, loss in forward_and_backward(run.parallel, batch, run.config, clock).items():
                totals[name] = totals.get(name, 0) + loss / run.config.train.accumulate
    with clock("step"):
        own = torch.stack(list(totals.values()))
        means = dict(zip(totals, all_reduce_mean(own), strict=True))
        return Gradients(means, gradient_norm(run.objective), images, own.sum())


def seed_step(config: Config, step: int, process: int) -> None:
    """What a step draws depends on the seed, the step and the process: nothing of it needs to be saved."""
    torch.manual_seed(keyed_seed(config.seed, step, process))


def forward_and_backward(objective: nn.Module, batch: Batch, config: Config, clock: PhaseClock) -> dict[str, Tensor]:
    """The losses of a batch, detached, after their gradients were added to those already there."""
    device = batch.images.pixels.device.type
    with torch.autocast(device, torch.bfloat16, enabled=config.train.precision == "bfloat16"):
        losses = objective(batch.images, batch.targets, clock)
    with clock("backward"):
        torch.stack(list(losses.values())).sum().div(config.train.accumulate).backward()
    return {name: loss.detach() for name, loss in losses.items()}


def gradient_norm(objective: nn.Module) -> Tensor:
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
