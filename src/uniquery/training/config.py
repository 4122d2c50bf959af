"""The settings of an experiment: typed, unknown keys are errors, and all mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from uniquery.backbones import BackboneConfig
from uniquery.data.augment import AnyAugmentation, Flip, ShortSide, TestSize
from uniquery.data.images import MIN_BIT_DEPTH
from uniquery.data.lvis import FederatedSettings
from uniquery.data.sampling import RepeatFactor
from uniquery.evaluation.protocol import Protocol
from uniquery.querying import QueryingSettings
from uniquery.segmenters import DEFAULT_SEGMENTER, SegmenterConfig, segmenters_with
from uniquery.settings import Settings, by_name, validate_settings
from uniquery.training.config_files import Override, apply_override, find_config, read_with_bases


class SplitConfig(Settings):
    """A COCO json, of instances or panoptic, and the folder its file names are relative to."""

    annotations: Path = Field(description="a COCO json, of instances or panoptic")
    images: Path = Field(description="the folder that its file names are relative to")
    panoptic_pngs: Path | None = Field(
        None, description="folder of panoptic PNG files; None: the path of the json without its ending"
    )


class DataConfig(Settings):
    """Where the data is and how it is loaded."""

    train: SplitConfig | None = Field(None, description="training data")
    val: SplitConfig | None = Field(None, description="validation data; None: the model is not evaluated")
    classes: tuple[str, ...] | None = Field(None, description="names of the classes to use; None: all")
    keep_empty: bool = Field(True, description="keep images without instances, as negatives")
    ignore_crowd: bool = Field(True, description="do not train on crowd regions; false takes them for background")
    augment: tuple[AnyAugmentation, ...] = Field(
        (ShortSide(), Flip()), description="augmentations of training images, in this order"
    )
    flip_pairs: tuple[tuple[str, str], ...] = Field(
        (), description="pairs of classes that are mirror images, such as [[left_hand, right_hand]]: flips swap them"
    )
    test_size: TestSize = TestSize()
    bit_depth: int | None = Field(
        None,
        ge=MIN_BIT_DEPTH,
        le=16,
        description="bits that the values of 16-bit images use: with 12, 4095 becomes white; None: all 16, or 8 if all "
        "values of an image fit them",
    )
    on_unreadable: Literal["stop", "skip"] = Field(
        "stop", description="what to do when an image cannot be read; skip: train on a random other image instead"
    )
    sampling: Annotated[RepeatFactor | None, BeforeValidator(by_name)] = Field(
        None, description="{name: repeat_factor, threshold: 0.001}: repeat images with rare classes; None: all alike"
    )
    federated: FederatedSettings | None = Field(
        None, description="{classes: 50}: each image teaches only the classes it is labeled for, and some others"
    )
    workers: int = Field(2, ge=0, description="processes that load data, per training process")

    @model_validator(mode="after")
    def _test_size_is_possible(self) -> DataConfig:
        if self.test_size.short > self.test_size.longest:  # not in TestSize: old model files must stay readable
            raise ValueError(
                f"test_size: short is more than longest ({self.test_size.short} and {self.test_size.longest})"
            )
        return self


class LayerConfig(Settings):
    """Learning rate and weight decay of some parameters."""

    lr_factor: float = Field(1.0, ge=0, description="factor of lr")
    weight_decay: float | None = Field(None, ge=0, description="weight decay; None: that of optim")


class OptimConfig(Settings):
    """The optimizer and its parameter groups."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="which optimizer")
    lr: float = Field(0.01, gt=0, description="learning rate after the warm-up")
    lr_batch: int | None = Field(
        None,
        gt=0,
        description="images per step that lr is meant for; lr scales with the real number. None: no scaling",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd: its momentum")
    betas: tuple[float, float] = Field((0.9, 0.999), description="adam, adamw: decay of the averages of the gradient")
    weight_decay: float = Field(1e-4, ge=0, description="weight decay of all other parameters")
    norm_weight_decay: float | None = Field(
        None, ge=0, description="weight decay of normalization layers; None: weight_decay"
    )
    backbone_lr_factor: float = Field(1.0, ge=0, description="factor of lr in the backbone")
    layers: dict[str, LayerConfig] = Field(
        {}, description="settings by the beginning of a parameter's name, or of its name inside a module"
    )
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; None: no clipping")


class ScheduleConfig(Settings):
    """The learning rate over a run; milestones are fractions of the run, warm-up is in steps."""

    name: Literal["polynomial", "multistep"] = Field("polynomial", description="how the learning rate decays")
    power: float = Field(0.9, gt=0, description="polynomial: its exponent")
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (2 / 3, 8 / 9), description="multistep: fractions of the run"
    )
    gamma: float = Field(0.1, gt=0, lt=1, description="multistep: factor at each milestone")
    warmup_steps: int = Field(1000, ge=0, description="steps of the warm-up; at most a quarter of the run")
    warmup_factor: float = Field(0.001, gt=0, le=1, description="fraction of lr at the first step")


class TrainConfig(Settings):
    """Length, batch size, and how often to evaluate, save and log."""

    epochs: float | None = Field(None, gt=0, description="passes over the data; or give steps")
    steps: int | None = Field(None, gt=0, description="optimizer steps; or give epochs")
    batch_size: int = Field(16, gt=0, description="images per process and accumulation step, paired views included")
    accumulate: int = Field(1, gt=0, description="forwards per optimizer step")
    precision: Literal["float32", "bfloat16", "auto"] = Field(
        "float32",
        description="of forward and backward passes, weights and losses are float32; auto: bfloat16 with a ResNet or "
        "Swin on a CPU that has instructions for it",
    )
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay of the EMA of the weights, which is then evaluated and saved; None: no EMA"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    eval_every: int | None = Field(None, gt=0, description="steps between evaluations; None: only at the end")
    patience: int | None = Field(
        None, gt=0, description="evaluations without a new best after which training stops; None: it goes to the end"
    )
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
    tensorboard: bool = Field(False, description="also write a TensorBoard log")

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> TrainConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self

    @model_validator(mode="after")
    def _patience_is_possible(self) -> TrainConfig:
        if self.patience is not None and self.eval_every is None:
            raise ValueError("patience counts evaluations: give eval_every, the steps between them")
        return self


class EvalConfig(Settings):
    """How the model is evaluated."""

    backend: Literal["hotcoco", "pycocotools"] = Field("hotcoco", description="what computes the metrics")
    protocol: Protocol | None = Field(
        None, description="coco or lvis; None: lvis if every category of the validation data has a frequency"
    )
    max_detections: int | None = Field(
        None,
        gt=0,
        description="best detections that are evaluated; None: 100 per image and class by coco, 300 per image by lvis",
    )
    batch_size: int = Field(1, gt=0, description="images of one forward pass")


def _segmenter_table(value: Any) -> Any:
    """A table without a name is the default segmenter's."""
    value = by_name(value)
    return {"name": DEFAULT_SEGMENTER.name, **value} if isinstance(value, dict) else value


class Config(Settings):
    """One experiment."""

    name: str = Field("run", pattern=r"^[\w-][\w.-]*$", description="name of the run's folder inside the output folder")
    output: Path = Field(Path("runs"), description="folder for run folders")
    seed: int = Field(0, ge=0, description="seed of all random numbers")
    model: Annotated[SegmenterConfig, BeforeValidator(_segmenter_table)] = Field(
        DEFAULT_SEGMENTER, description="the segmenter: its name, or a table with its name and settings"
    )
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

    @model_validator(mode="after")
    def _federated_loss_is_possible(self) -> Config:
        if self.data.federated and not self.model.has_federated_loss:
            raise ValueError(
                f"data.federated needs a model that can leave classes out of its class loss; {self.model.name} cannot, "
                f"{', '.join(segmenters_with('has_federated_loss'))} can"
            )
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


def with_absolute_data(config: Config) -> Config:
    """The same experiment with absolute paths of its data, so that its run can be used from any folder."""
    splits = {
        name: SplitConfig(**{key: path and path.absolute() for key, path in split})
        for name, split in (("train", config.data.train), ("val", config.data.val))
        if split is not None
    }
    return config.model_copy(update={"data": config.data.model_copy(update=splits)})


def to_yaml(config: Config) -> str:
    """The resolved configuration as yaml."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
