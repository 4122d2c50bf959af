"""Optimizers with parameter groups, learning-rate schedules, and the EMA of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from uniquery.training.config import OptimConfig, ScheduleConfig

_NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
MAX_WARMUP = 0.25
"""Largest share of a run that the warm-up may take: a longer one would leave no steps with the full learning rate."""


def build_optimizer(model: nn.Module, config: OptimConfig, effective_batch: int) -> Optimizer:
    """One parameter group for each pair of learning rate and weight decay."""
    lr = config.lr * (effective_batch / config.lr_batch if config.lr_batch else 1)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter, is_norm in _named_parameters(model):
        if parameter.requires_grad:
            groups.setdefault(_settings(name, is_norm, config), []).append(parameter)
    tables = [
        {"params": p, "lr": lr * factor, "initial_lr": lr * factor, "weight_decay": decay}
        for (factor, decay), p in groups.items()
    ]
    if config.name == "sgd":
        return SGD(tables, lr=lr, momentum=config.momentum)
    return (AdamW if config.name == "adamw" else Adam)(tables, lr=lr, betas=config.betas)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{module_name}.{name}", parameter, isinstance(module, _NORMS)


def _settings(name: str, is_norm: bool, config: OptimConfig) -> tuple[float, float]:
    """Learning-rate factor and weight decay of a parameter."""
    factor = config.backbone_lr_factor if name.startswith("backbone.") else 1.0
    decay = config.weight_decay
    if is_norm and config.norm_weight_decay is not None:
        decay = config.norm_weight_decay
    for prefix, layer in config.layers.items():
        if f".{prefix}" in f".{name}":
            factor *= layer.lr_factor
            decay = decay if layer.weight_decay is None else layer.weight_decay
    return factor, decay


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Sets the learning rate of every group to its initial one times the factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def lr_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor of the learning rate at a step: warm-up times decay.

    >>> config = ScheduleConfig(name="multistep", milestones=(0.5,), gamma=0.1, warmup_steps=0)
    >>> [lr_factor(config, step, 4) for step in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """
    if config.name == "polynomial":
        decay = math.pow(1 - min(step, steps) / steps, config.power)
    else:
        decay = math.pow(config.gamma, sum(step >= share * steps for share in config.milestones))
    warmup = warmup_steps(config, steps)
    if step < warmup:
        share = step / warmup
        return decay * (config.warmup_factor * (1 - share) + share)
    return decay


def warmup_steps(config: ScheduleConfig, steps: int) -> int:
    """The steps of the warm-up, at most a quarter of the run.

    >>> warmup_steps(ScheduleConfig(warmup_steps=100), steps=1000), warmup_steps(ScheduleConfig(warmup_steps=100), 30)
    (100, 7)
    """
    return min(config.warmup_steps, int(MAX_WARMUP * steps))


class EMA:
    """The exponential moving average of a model's state; the decay grows during the first steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """One step of the average; tensors that are not floating-point are copied."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        state = model.state_dict()
        floats = [name for name, tensor in state.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.state[n] for n in floats], [state[n] for n in floats], 1 - decay)
        for name, tensor in state.items():
            if not tensor.is_floating_point():
                self.state[name].copy_(tensor)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights and buffers."""
        return self.state
