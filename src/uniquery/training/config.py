"""The settings of an experiment: typed, closed to unknown keys, every mistake reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from uniquery.backbones import BackboneConfig
from uniquery.data.augment import AnyAugmentation, Flip, ShortSide, TestSize
from uniquery.segmenters import DEFAULT_SEGMENTER, SegmenterConfig
from uniquery.settings import Settings, validate_settings
from uniquery.training.config_files import Override, apply_override, find_config, read_with_bases
from uniquery.training.querying import QueryingConfig


class SplitConfig(Settings):
    """A COCO instance json and the folder its file names are relative to."""

    annotations: Path
    images: Path


class DataConfig(Settings):
    """Where the data is and how it is fed."""

    train: SplitConfig | None = None
    val: SplitConfig | None = None
    classes: tuple[str, ...] | None = Field(None, description="names of the classes to use; all if left out")
    keep_empty: bool = Field(True, description="keep images without instances, as negatives")
    augment: tuple[AnyAugmentation, ...] = (ShortSide(), Flip())
    test_size: TestSize = TestSize()
    workers: int = Field(2, ge=0, description="processes that load data")


class LayerConfig(Settings):
    """Exceptions for some parameters."""

    lr_factor: float = Field(1.0, ge=0)
    weight_decay: float | None = Field(None, ge=0)


class OptimConfig(Settings):
    """The optimizer and its parameter groups."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.01, gt=0)
    lr_batch: int | None = Field(
        None,
        gt=0,
        description="effective batch that lr is meant for; lr grows in proportion to the real one. None: as is",
    )
    momentum: float = Field(0.9, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(1e-4, ge=0)
    norm_weight_decay: float | None = Field(None, ge=0, description="of normalization layers; None: like the rest")
    backbone_lr_factor: float = Field(1.0, ge=0)
    layers: dict[str, LayerConfig] = Field(
        {}, description="exceptions by how a parameter's name, or its name within a module, begins"
    )
    clip_norm: float | None = Field(None, gt=0, description="largest norm of the gradient")


class ScheduleConfig(Settings):
    """The learning rate over a run; milestones and warm-up are shares of it, or steps."""

    name: Literal["polynomial", "multistep"] = "polynomial"
    power: float = Field(0.9, gt=0, description="of the polynomial")
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (2 / 3, 8 / 9), description="multistep: shares of the run"
    )
    gamma: float = Field(0.1, gt=0, lt=1, description="multistep: factor at each milestone")
    warmup_steps: int = Field(1000, ge=0)
    warmup_factor: float = Field(0.001, gt=0, le=1, description="share of lr at the first step")


class TrainConfig(Settings):
    """How long, how large, how often."""

    epochs: float | None = Field(None, gt=0, description="passes over the data; or give steps")
    steps: int | None = Field(None, gt=0, description="optimizer steps; or give epochs")
    batch_size: int = Field(16, gt=0, description="images of one forward, per process")
    accumulate: int = Field(1, gt=0, description="forwards of one optimizer step")
    precision: Literal["float32", "bfloat16"] = "float32"
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay of averaged weights, which are then evaluated and saved"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    eval_every: int | None = Field(None, gt=0, description="steps between evaluations; None: only at the end")
    save_every: int = Field(1000, gt=0, description="steps between checkpoints")
    save_minutes: float | None = Field(
        15.0, gt=0, description="minutes between checkpoints, if they pass before save_every steps; None: steps only"
    )
    keep_last: int = Field(2, gt=0, description="checkpoints that are kept: last, last.1 before it, and so on")
    skip_nonfinite: int = Field(
        0, ge=0, description="steps of a run that may be left out because a loss or gradient is not finite"
    )
    log_every: int = Field(20, gt=0, description="steps between log lines")
    init_from: Path | None = Field(
        None, description="a checkpoint whose fitting weights are taken; training starts anew"
    )
    tensorboard: bool = False

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class EvalConfig(Settings):
    """How results are scored."""

    backend: Literal["hotcoco", "pycocotools"] = "hotcoco"
    max_detections: int = Field(100, gt=0, description="best detections of an image that count")
    batch_size: int = Field(1, gt=0)


def _table(value: Any) -> Any:
    """`backbone: resnet50` stands for `backbone: {name: resnet50}`."""
    return {"name": value} if isinstance(value, str) else value


def _segmenter_table(value: Any) -> Any:
    """A table without a name is the default segmenter's."""
    value = _table(value)
    return {"name": DEFAULT_SEGMENTER.name, **value} if isinstance(value, dict) else value


class Config(Settings):
    """One experiment."""

    name: str = Field("run", pattern=r"^[\w-][\w.-]*$", description="of the folder below the output folder")
    output: Path = Field(Path("runs"), description="where run folders go")
    seed: int = Field(0, ge=0)
    model: Annotated[SegmenterConfig, BeforeValidator(_segmenter_table)] = DEFAULT_SEGMENTER
    backbone: Annotated[BackboneConfig, BeforeValidator(_table)] = BackboneConfig(name="resnet50", weights="imagenet")
    querying: QueryingConfig = QueryingConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig(epochs=12)
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _whole_pairs(self) -> Config:
        if self.train.batch_size % self.querying.forwards_per_scene:
            raise ValueError(
                f"train.batch_size counts forwards and must be even with paired views (given: {self.train.batch_size})"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.output / self.name


def load_config(source: str | Path, overrides: Sequence[Override] = ()) -> Config:
    """A configuration from a yaml file or by shipped name, with its `base` and with `a.b=c` overrides.

    >>> load_config("demo", ["train.steps=10"]).train.steps
    10

    Raises:
        ConfigError: all that is wrong, a line each.
    """
    return parse_config(read_with_bases(find_config(source)), overrides, where=str(source))


def parse_config(content: dict[str, Any], overrides: Sequence[Override] = (), *, where: str) -> Config:
    """A configuration from plain tables."""
    for override in overrides:
        apply_override(content, override)
    return validate_settings(Config, content, where=where)


def to_yaml(config: Config) -> str:
    """The resolved configuration as yaml."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
