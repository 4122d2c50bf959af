"""A run in progress: everything that changes while training, saved and restored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uniquery.data.dataset import Dataset
from uniquery.errors import CheckpointError, ConfigError
from uniquery.parallel import get_world_size
from uniquery.querying import UniqueQuerying
from uniquery.querying.contract import Segmenter
from uniquery.segmenters import build_segmenter
from uniquery.training.checkpoint import TrainerState
from uniquery.training.config import Config
from uniquery.training.distributed import local_rank, wrap_ddp
from uniquery.training.optim import EMA, build_optimizer
from uniquery.weights.model_file import ModelCard


@dataclass
class Run:
    """Everything that changes while training.

    Attributes:
        config: the experiment.
        card: what the model says of itself.
        model: what is trained.
        objective: around it.
        parallel: the objective, with gradients averaged over processes if there are several.
        optimizer: of its parameters.
        average: of its weights, if asked for.
        steps: how many are to be taken.
        device: where.
        step: how many were taken.
        evaluated: the step of the last evaluation.
        best: its highest AP so far.
        skipped: steps that were left out for a loss or gradient that was not finite.
        sums: of each loss since the last line of the log.
        summed: steps in those sums.
        data: checksum of each split.
    """

    config: Config
    card: ModelCard
    model: Segmenter[Any, Any, Any]
    objective: UniqueQuerying
    parallel: nn.Module
    optimizer: Optimizer
    average: EMA | None
    steps: int
    device: torch.device
    step: int = 0
    evaluated: int = 0
    best: float = -math.inf
    skipped: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    summed: int = 0
    data: dict[str, int] = field(default_factory=dict)

    def evaluated_state(self) -> dict[str, Tensor]:
        """The weights that are evaluated and saved as the model."""
        return self.average.state_dict() if self.average else self.model.state_dict()

    def trainer_state(self) -> TrainerState:
        """Everything that a resumed run needs, but for the weights that the model file holds."""
        tensors: dict[str, Tensor] = {}
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{slot}": v for slot, v in slots.items() if isinstance(v, Tensor)}
        tensors |= {f"algorithm/{name}": tensor for name, tensor in self.objective.algorithm_state().items()}
        tensors |= {f"sums/{name}": tensor for name, tensor in self.sums.items()}
        values: dict[str, Any] = {
            "step": self.step,
            "evaluated": self.evaluated,
            "best": None if math.isinf(self.best) else self.best,
            "skipped": self.skipped,
            "summed": self.summed,
            "data": self.data,
            "images_per_step": images_per_step(self.config),
        }
        if self.average:
            tensors |= {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
            values["average_steps"] = self.average.steps
        return TrainerState(tensors, values, model_is="average/" if self.average else "model/")


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one; `cuda` without a number is this process's own."""
    name = f"cuda:{local_rank()}" if name == "cuda" else name
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"train.device '{name}' is not usable here: {str(error).splitlines()[0]}") from None
    return torch.device(f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu")


def build_run(config: Config, data: Dataset, *, pretrained: bool = True) -> Run:
    """A run at its first step; `pretrained=False` leaves all weights to a checkpoint that follows."""
    settings = config.train
    device = choose_device(settings.device)
    card = ModelCard(config.model, config.backbone, tuple(data.categories), config.data.test_size)
    model = build_segmenter(config.model, config.backbone, len(data.categories), pretrained=pretrained).to(device)
    images = images_per_step(config)
    steps = settings.steps or max(1, round((settings.epochs or 0) * len(data) / images))
    optimizer = build_optimizer(model, config.optim, images)
    average = EMA(model, settings.ema) if settings.ema else None
    objective = config.querying.build(model, config.seed)
    return Run(config, card, model, objective, wrap_ddp(objective), optimizer, average, steps, device)


def images_per_step(config: Config) -> int:
    """How many images are forwarded in one optimizer step, over all processes."""
    return config.train.batch_size * config.train.accumulate * get_world_size()


def restore(run: Run, saved: TrainerState) -> None:
    """Puts a run back to where it was saved.

    Raises:
        CheckpointError: its steps are of another size, so that it would see other images.
    """
    before, now = saved.values.get("images_per_step"), images_per_step(run.config)
    if before not in (None, now):
        raise CheckpointError(
            f"The run was saved with {before} images per step and now has {now}: keep the product of train.batch_size, "
            "train.accumulate and the number of processes."
        )
    run.model.load_state_dict(part(saved.tensors, "model/"))
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part(saved.tensors, "optimizer/").items():
        index, slot = name.split("/")
        slots.setdefault(int(index), {})[slot] = tensor
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": slots})
    run.objective.load_algorithm_state(part(saved.tensors, "algorithm/"), run.device)
    run.sums = {name: tensor.to(run.device) for name, tensor in part(saved.tensors, "sums/").items()}
    values = saved.values
    run.step, run.best = values["step"], -math.inf if values["best"] is None else values["best"]
    run.evaluated = values.get("evaluated", run.step)
    run.skipped, run.summed = values.get("skipped", 0), values.get("summed", 0)
    if run.average:
        run.average.state = {name: tensor.to(run.device) for name, tensor in part(saved.tensors, "average/").items()}
        run.average.steps = values["average_steps"]


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without it.

    >>> part({"model/weight": torch.zeros(1), "sums/loss_mask": torch.zeros(2)}, "model/")
    {'weight': tensor([0.])}
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
