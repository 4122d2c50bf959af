"""The settings of an experiment: typed, unknown keys are errors, and all mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from uniquery.backbones import BackboneConfig
from uniquery.data.augment import AnyAugmentation, Flip, ShortSide, TestSize
from uniquery.querying import QueryingSettings
from uniquery.segmenters import DEFAULT_SEGMENTER, SegmenterConfig
from uniquery.settings import Settings, by_name, validate_settings
from uniquery.training.config_files import Override, apply_override, find_config, read_with_bases


class SplitConfig(Settings):
    """A COCO instance json and the folder its file names are relative to."""

    annotations: Path
    images: Path


class DataConfig(Settings):
    """Where the data is and how it is loaded."""

    train: SplitConfig | None = None
    val: SplitConfig | None = None
    classes: tuple[str, ...] | None = Field(None, description="names of the classes to use; None: all")
    keep_empty: bool = Field(True, description="keep images without instances, as negatives")
    ignore_crowd: bool = Field(True, description="do not train on crowd regions; false takes them for background")
    augment: tuple[AnyAugmentation, ...] = (ShortSide(), Flip())
    test_size: TestSize = TestSize()
    workers: int = Field(2, ge=0, description="processes that load data, per training process")


class LayerConfig(Settings):
    """Learning rate and weight decay of some parameters."""

    lr_factor: float = Field(1.0, ge=0)
    weight_decay: float | None = Field(None, ge=0)


class OptimConfig(Settings):
    """The optimizer and its parameter groups."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.01, gt=0)
    lr_batch: int | None = Field(
        None,
        gt=0,
        description="images per step that lr is meant for; lr scales with the real number. None: no scaling",
    )
    momentum: float = Field(0.9, ge=0, lt=1)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(1e-4, ge=0)
    norm_weight_decay: float | None = Field(
        None, ge=0, description="weight decay of normalization layers; None: weight_decay"
    )
    backbone_lr_factor: float = Field(1.0, ge=0)
    layers: dict[str, LayerConfig] = Field(
        {}, description="settings by the beginning of a parameter's name, or of its name inside a module"
    )
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; None: no clipping")


class ScheduleConfig(Settings):
    """The learning rate over a run; milestones are fractions of the run, warm-up is in steps."""

    name: Literal["polynomial", "multistep"] = "polynomial"
    power: float = Field(0.9, gt=0, description="polynomial: its exponent")
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (2 / 3, 8 / 9), description="multistep: fractions of the run"
    )
    gamma: float = Field(0.1, gt=0, lt=1, description="multistep: factor at each milestone")
    warmup_steps: int = Field(1000, ge=0)
    warmup_factor: float = Field(0.001, gt=0, le=1, description="fraction of lr at the first step")


class TrainConfig(Settings):
    """Length, batch size, and how often to evaluate, save and log."""

    epochs: float | None = Field(None, gt=0, description="passes over the data; or give steps")
    steps: int | None = Field(None, gt=0, description="optimizer steps; or give epochs")
    batch_size: int = Field(16, gt=0, description="images per process and accumulation step, paired views included")
    accumulate: int = Field(1, gt=0, description="forwards per optimizer step")
    precision: Literal["float32", "bfloat16"] = "float32"
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay of the EMA of the weights, which is then evaluated and saved; None: no EMA"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    eval_every: int | None = Field(None, gt=0, description="steps between evaluations; None: only at the end")
    save_every: int = Field(1000, gt=0, description="steps between checkpoints")
    save_minutes: float | None = Field(
        15.0, gt=0, description="minutes between checkpoints, if they pass before save_every steps; None: steps only"
    )
    keep_last: int = Field(2, gt=0, description="how many checkpoints to keep: last, last.1 before it, and so on")
    skip_nonfinite: int = Field(0, ge=0, description="how many steps with a non-finite loss or gradient a run may skip")
    log_every: int = Field(20, gt=0, description="steps between log lines")
    init_from: Path | None = Field(
        None, description="a checkpoint; weights that fit by name and shape are loaded, and training starts at step 0"
    )
    tensorboard: bool = False

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> TrainConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class EvalConfig(Settings):
    """How the model is evaluated."""

    backend: Literal["hotcoco", "pycocotools"] = "hotcoco"
    max_detections: int = Field(100, gt=0, description="highest-scoring detections of an image that are evaluated")
    batch_size: int = Field(1, gt=0)


def _segmenter_table(value: Any) -> Any:
    """A table without a name is the default segmenter's."""
    value = by_name(value)
    return {"name": DEFAULT_SEGMENTER.name, **value} if isinstance(value, dict) else value


class Config(Settings):
    """One experiment."""

    name: str = Field("run", pattern=r"^[\w-][\w.-]*$", description="name of the run's folder inside the output folder")
    output: Path = Field(Path("runs"), description="folder for run folders")
    seed: int = Field(0, ge=0)
    model: Annotated[SegmenterConfig, BeforeValidator(_segmenter_table)] = DEFAULT_SEGMENTER
    backbone: Annotated[BackboneConfig, BeforeValidator(by_name)] = BackboneConfig(name="resnet50", weights="imagenet")
    querying: QueryingSettings = QueryingSettings()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig(epochs=12)
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _batch_size_is_even(self) -> Config:
        if self.train.batch_size % self.querying.forwards_per_image:
            raise ValueError(f"train.batch_size must be even with paired views (given: {self.train.batch_size})")
        return self

    @property
    def folder(self) -> Path:
        """The path of the run's folder."""
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
