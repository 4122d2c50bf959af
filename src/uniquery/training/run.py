"""A run in progress: everything that changes while training, saved and restored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from uniquery.data.coco import CocoData
from uniquery.errors import ConfigError
from uniquery.querying import UniqueQuerying
from uniquery.querying.contract import Segmenter
from uniquery.segmenters import build_segmenter
from uniquery.training.checkpoint import ModelCard, TrainerState
from uniquery.training.config import Config
from uniquery.training.optim import AveragedWeights, build_optimizer


@dataclass
class Run:
    """Everything that changes while training."""

    config: Config
    card: ModelCard
    model: Segmenter[Any, Any, Any]
    objective: UniqueQuerying
    optimizer: Optimizer
    average: AveragedWeights | None
    steps: int
    device: torch.device
    step: int = 0
    best: float = -math.inf

    def evaluated_state(self) -> dict[str, Tensor]:
        """The weights that are evaluated and saved as the model."""
        return self.average.state_dict() if self.average else self.model.state_dict()


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one."""
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"train.device '{name}' is not usable here: {str(error).splitlines()[0]}") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_run(config: Config, data: CocoData, *, pretrained: bool = True) -> Run:
    """A run at its first step; `pretrained=False` leaves all weights to a checkpoint that follows."""
    settings = config.train
    device = choose_device(settings.device)
    card = ModelCard(config.model, config.backbone, tuple(data.categories), config.data.test_size)
    model = build_segmenter(config.model, config.backbone, len(data.categories), pretrained=pretrained).to(device)
    effective = settings.batch_size * settings.accumulate
    steps = settings.steps or max(1, round((settings.epochs or 0) * len(data) / effective))
    optimizer = build_optimizer(model, config.optim, effective)
    average = AveragedWeights(model, settings.ema) if settings.ema else None
    return Run(config, card, model, config.querying.build(model), optimizer, average, steps, device)


def trainer_state(run: Run) -> TrainerState:
    """Everything that a resumed run needs."""
    tensors = {f"model/{name}": tensor for name, tensor in run.model.state_dict().items()}
    state = run.optimizer.state_dict()
    for index, slots in state["state"].items():
        tensors |= {f"optimizer/{index}/{slot}": v for slot, v in slots.items() if isinstance(v, Tensor)}
    tensors["random/cpu"] = torch.get_rng_state()
    if run.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(run.device)
    tensors |= {f"algorithm/{name}": tensor for name, tensor in run.objective.algorithm_state().items()}
    values = {"step": run.step, "best": None if math.isinf(run.best) else run.best}
    if run.average:
        tensors |= {f"average/{name}": tensor for name, tensor in run.average.state.items()}
        values["average_steps"] = run.average.steps
    return TrainerState(tensors, values)


def restore(run: Run, saved: TrainerState) -> None:
    """Puts a run back to where it was saved."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in saved.tensors.items() if name.startswith(prefix)}

    run.model.load_state_dict(part("model/"))
    state = run.optimizer.state_dict()
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part("optimizer/").items():
        index, slot = name.split("/")
        slots.setdefault(int(index), {})[slot] = tensor
    run.optimizer.load_state_dict({**state, "state": slots})
    run.objective.load_algorithm_state(part("algorithm/"), run.device)
    run.step = saved.values["step"]
    run.best = -math.inf if saved.values["best"] is None else saved.values["best"]
    torch.set_rng_state(saved.tensors["random/cpu"])
    if "random/cuda" in saved.tensors and run.device.type == "cuda":
        torch.cuda.set_rng_state(saved.tensors["random/cuda"], run.device)
    if run.average:
        run.average.state = {name: tensor.to(run.device) for name, tensor in part("average/").items()}
        run.average.steps = saved.values["average_steps"]
