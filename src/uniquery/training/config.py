"""The settings of an experiment: typed, closed to unknown keys, every mistake reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from uniquery.backbones import BackboneConfig
from uniquery.data.augment import AnyAugmentation, Flip, ShortSide, TestSize
from uniquery.errors import ConfigError, did_you_mean
from uniquery.segmenters import SEGMENTERS, SegmenterConfig
from uniquery.segmenters.condinst import CondInstConfig
from uniquery.settings import Settings
from uniquery.training.querying import QueryingConfig

Override = str | tuple[str, Any]  # "a.b=c" with a yaml value, or the key and the value themselves

_EITHER_OR = {"train.steps": "epochs", "train.epochs": "steps"}  # setting one of these unsets its sibling


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
    ignore_crowd: bool = Field(True, description="do not train on crowd regions; false takes them for background")
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


def _named(value: Any) -> Any:
    """`model: condinst` stands for `model: {name: condinst}`."""
    return {"name": value} if isinstance(value, str) else value


def _named_segmenter(value: Any) -> Any:
    """A table without a name is CondInst's."""
    value = _named(value)
    return {"name": "condinst", **value} if isinstance(value, dict) else value


class Config(Settings):
    """One experiment."""

    name: str = Field("run", pattern=r"^[\w-][\w.-]*$", description="of the folder below the output folder")
    output: Path = Field(Path("runs"), description="where run folders go")
    seed: int = Field(0, ge=0)
    model: Annotated[SegmenterConfig, BeforeValidator(_named_segmenter)] = CondInstConfig()
    backbone: Annotated[BackboneConfig, BeforeValidator(_named)] = BackboneConfig(name="resnet50", weights="imagenet")
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


def config_folder() -> Path:
    """Where the configurations that come with the product lie: inside the package, or beside its sources."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def shipped_configs() -> dict[str, Path]:
    """Name → file of the configurations that come with the product."""
    folder = config_folder()
    return {str(p.relative_to(folder).with_suffix("")): p for p in sorted(folder.rglob("*.yaml"))}


def load_config(source: str | Path, overrides: Sequence[Override] = ()) -> Config:
    """A configuration from a file or by the name of a shipped one, with `a.b=c` overrides.

    Raises:
        ConfigError: all that is wrong, a line each.
    """
    return parse_config(read_yaml(find_config(source)), overrides, where=str(source))


def find_config(source: str | Path) -> Path:
    """The file of a configuration given by path or by shipped name."""
    known = shipped_configs()
    if Path(source).is_file():
        return Path(source)
    if str(source) in known:
        return known[str(source)]
    hint = did_you_mean(str(source), known) or " 'uniquery config list' names those that come with it."
    raise ConfigError(f"No configuration '{source}': it is neither a file nor a shipped name.{hint}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The tables of a yaml file."""
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid yaml: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values.")
    return content


def parse_config(content: dict[str, Any], overrides: Sequence[Override] = (), *, where: str) -> Config:
    """A configuration from plain tables."""
    for override in overrides:
        _apply_override(content, override)
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        lines = [_sentence(e["loc"], e) for e in error.errors()]
        raise ConfigError("\n".join([f"{where} has {len(lines)} mistake{'s' * (len(lines) > 1)}:", *lines])) from None


def parse_override(text: str) -> tuple[str, Any]:
    """Key and value of `a.b=c`; the value is yaml.

    >>> parse_override("train.steps=100")
    ('train.steps', 100)
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {text}: write key=value, for example --set train.steps=100.")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value


def _apply_override(content: dict[str, Any], override: Override) -> None:
    key, value = parse_override(override) if isinstance(override, str) else override
    *parents, last = key.split(".")
    node: Any = content
    for part in parents:
        node = _child(node, part)
    _assign(node, last, value, key)
    if key in _EITHER_OR and value is not None:
        node.pop(_EITHER_OR[key], None)


def _child(node: Any, part: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    if isinstance(node, dict):
        if isinstance(node.get(part), str):  # `model: condinst` grows into a table when a key below it is set
            node[part] = {"name": node[part]}
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    return None


def _assign(node: Any, last: str, value: Any, key: str) -> None:
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"--set {key}: there is no such place to set.")


def _sentence(location: tuple[int | str, ...], error: Any) -> str:
    if location[0:1] == ("model",) and location[1:2] and location[1] in SEGMENTERS:  # the union's tag is no key
        location = location[:1] + location[2:]
    key = ".".join(str(part) for part in location) or "the whole"
    if error["type"] == "extra_forbidden":
        return f"  {key}: no such key.{did_you_mean(str(location[-1]), _all_keys())}"
    given = "" if isinstance(error["input"], dict | list | BaseModel) else f" (given: {error['input']!r})"
    message = error["msg"].removeprefix("Value error, ")
    hint = ""
    if error["type"] in ("literal_error", "union_tag_invalid"):
        choices = str(error["ctx"].get("expected") or error["ctx"].get("expected_tags"))
        value = error["ctx"].get("tag", error["input"])
        if error["type"] == "union_tag_invalid":
            message = f"'{value}' is not one of {choices}"
        hint = did_you_mean(str(value), [c.strip(" '") for c in choices.replace(" or ", ",").split(",")])
    return f"  {key}: {message}{given}.{hint}"


def _all_keys() -> Iterable[str]:
    seen: set[type[BaseModel]] = set()

    def walk(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
            seen.add(kind)
            for field in kind.model_fields.values():
                walk(field.annotation)
        for inner in get_args(kind):
            walk(inner)

    walk(Config)
    return {key for kind in seen for key in kind.model_fields}


def to_yaml(config: Config) -> str:
    """The resolved configuration as yaml."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flat(config: Config) -> dict[str, Any]:
    """Every setting under its dotted key."""

    def walk(value: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from walk(inner, f"{prefix}.{key}" if prefix else key)
        else:
            yield prefix, value

    return dict(walk(config.model_dump(mode="json"), ""))
