"""A training run in progress: everything that changes while training, saved and restored."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uniquery.data.dataset import Dataset
from uniquery.data.mirrored import mirrored_labels
from uniquery.data.sampling import images_per_epoch
from uniquery.errors import CheckpointError
from uniquery.parallel import choose_device, get_world_size
from uniquery.querying import UniqueQuerying
from uniquery.querying.contract import Segmenter
from uniquery.segmenters import build_segmenter
from uniquery.training.checkpoint import TrainerState, add_prefix, strip_prefix
from uniquery.training.config import Config, TrainConfig
from uniquery.training.distributed import wrap_ddp
from uniquery.training.optim import EMA, build_optimizer
from uniquery.training.precision import with_chosen_precision
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import ModelInfo


@dataclass
class TrainingRun:
    """Everything that changes while training.

    Attributes:
        config: the experiment.
        info: the header of its model files.
        model: the segmenter.
        objective: the training objective around the model.
        ddp: the objective in DistributedDataParallel; the objective itself with one process.
        optimizer: optimizer of the model's parameters.
        ema: moving average of the weights, if there is one.
        steps: how many steps to train.
        device: device of the model.
        step: how many steps were trained so far.
        eval_step: the step of the last evaluation.
        best: the highest metric so far.
        evals_since_best: evaluations after that of the highest metric.
        skipped: steps without an update, because a loss or gradient was not finite.
        loss_sums: sum of each loss since the last log line.
        loss_count: how many steps are in these sums.
        data_checksums: checksum of each split.
    """

    config: Config
    info: ModelInfo
    model: Segmenter[Any, Any, Any]
    objective: UniqueQuerying
    ddp: nn.Module
    optimizer: Optimizer
    ema: EMA | None
    steps: int
    device: torch.device
    step: int = 0
    eval_step: int = 0
    best: float = -math.inf
    evals_since_best: int = 0
    skipped: int = 0
    loss_sums: dict[str, Tensor] = field(default_factory=dict)
    loss_count: int = 0
    data_checksums: dict[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.config.folder)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether it was just evaluated, and too many evaluations brought no new best; known to the first process."""
        patience = self.config.train.patience
        return patience is not None and self.eval_step == self.step and self.evals_since_best >= patience

    def eval_state_dict(self) -> dict[str, Tensor]:
        """The weights that are evaluated and saved as the model: the EMA if there is one."""
        return self.ema.state_dict() if self.ema else self.model.state_dict()

    def trainer_state(self) -> TrainerState:
        """Everything that a resumed run needs, except the weights in the model file."""
        tensors: dict[str, Tensor] = {}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{key}": v for key, v in state.items() if isinstance(v, Tensor)}
        tensors |= add_prefix(self.objective.algorithm_state(), "algorithm/")
        tensors |= add_prefix(self.loss_sums, "loss_sums/")
        values: dict[str, Any] = {
            "step": self.step,
            "eval_step": self.eval_step,
            "best": None if math.isinf(self.best) else self.best,
            "evals_since_best": self.evals_since_best,
            "skipped": self.skipped,
            "loss_count": self.loss_count,
            "data_checksums": self.data_checksums,
            "images_per_step": images_per_step(self.config),
        }
        if self.ema:
            tensors |= add_prefix(self.model.state_dict(), "model/")
            values["ema_steps"] = self.ema.steps
        return TrainerState(tensors, values, model_prefix="ema/" if self.ema else "model/")

    def load_trainer_state(self, saved: TrainerState) -> None:
        """Restores the state of a checkpoint.

        Raises:
            CheckpointError: the number of images per step differs, so that the steps would have other images.
        """
        values, images = saved.values, images_per_step(self.config)
        if values["images_per_step"] != images:
            raise CheckpointError(
                f"The run was saved with {values['images_per_step']} images per step and now has {images}: keep the "
                "product of train.batch_size, train.accumulate and the number of processes."
            )
        self.model.load_state_dict(strip_prefix(saved.tensors, "model/"))
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in strip_prefix(saved.tensors, "optimizer/").items():
            index, key = name.split("/")
            state.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.objective.load_algorithm_state(strip_prefix(saved.tensors, "algorithm/"), self.device)
        self.loss_sums = {k: v.to(self.device) for k, v in strip_prefix(saved.tensors, "loss_sums/").items()}
        self.step, self.eval_step = values["step"], values["eval_step"]
        self.best = -math.inf if values["best"] is None else values["best"]
        self.evals_since_best = values.get("evals_since_best", 0)  # checkpoints of version 0.1.0 do not have it
        self.skipped, self.loss_count = values["skipped"], values["loss_count"]
        if self.ema:
            self.ema.state = {k: v.to(self.device) for k, v in strip_prefix(saved.tensors, "ema/").items()}
            self.ema.steps = values["ema_steps"]


def build_run(config: Config, data: Dataset, *, pretrained: bool = True) -> TrainingRun:
    """A run at its first step; `pretrained=False` if a checkpoint will replace all weights."""
    device = choose_device(config.train.device)
    config = with_chosen_precision(config, device)
    settings = config.train
    categories, bit_depth = tuple(data.categories), config.data.bit_depth
    info = ModelInfo(config.model, config.backbone, categories, config.data.test_size, bit_depth=bit_depth)
    model = build_segmenter(config.model, config.backbone, len(data.categories), pretrained=pretrained).to(device)
    images = images_per_step(config)
    steps = count_steps(settings, images_per_epoch(data, config.data.sampling), images)
    optimizer = build_optimizer(model, config.optim, images)
    ema = EMA(model, settings.ema) if settings.ema else None
    mirrored = mirrored_labels(data.categories, config.data.flip_pairs)
    objective = UniqueQuerying(
        model, config.querying.inter, config.querying.equivariance, seed=config.seed, mirrored=mirrored
    )
    return TrainingRun(config, info, model, objective, wrap_ddp(objective), optimizer, ema, steps, device)


def count_steps(settings: TrainConfig, images: float, images_of_step: int) -> int:
    """How many steps a run takes on so many images."""
    return settings.steps or max(1, round((settings.epochs or 0) * images / images_of_step))


def images_per_step(config: Config) -> int:
    """The number of images in one optimizer step, over all processes."""
    return config.train.batch_size * config.train.accumulate * get_world_size()
