"""A study file, and the runs that it asks for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, model_validator

from uniquery.data.scenes import DEMO_SCENES, make_scenes
from uniquery.errors import ConfigError, did_you_mean
from uniquery.files import make_folder
from uniquery.settings import Settings, flatten, validate_settings
from uniquery.training.config import Config, SplitConfig, load_config
from uniquery.training.config_files import STUDIES, Override, config_folder, read_yaml


def _seeds(value: Any) -> Any:
    """`seeds: 3` means seeds 0, 1 and 2."""
    return tuple(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError("write the number of seeds, at least 1, or a list of different seeds")
    return seeds


Seeds = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_seeds), AfterValidator(_checked_seeds)]
FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]
START = "start"  # in the file names of a base
_NOT_HASHED = ("output", "name", "data.workers", "data.train", "data.val", "train.device", "train.init_from")


class DataSettings(Settings):
    """Training and validation data."""

    train: SplitConfig
    val: SplitConfig


class VariantSettings(Settings):
    """One setting to measure."""

    set: dict[str, Any] = Field({}, description="config keys that differ from the study's configuration")
    control: str | None = Field(None, description="the variant it is compared with; None: the study's control")
    paper: dict[str, float] = Field({}, description="what the paper reports, by metric")


class StartSettings(Settings):
    """A base that is trained once, and from which all variants continue."""

    set: dict[str, Any] = Field({}, description="config keys of the base, beside the study's")
    seed: NonNegativeInt = 0


class ScaleSettings(Settings):
    """What differs at another scale."""

    config: str | None = None
    set: dict[str, Any] = Field({}, description="config keys of all runs at this scale")
    set_if_used: dict[str, Any] | None = Field(None, description="instead of the study's")
    variants: dict[str, dict[str, Any]] = Field({}, description="config keys of variants, instead of the study's")
    seeds: Seeds | None = None


class StudySettings(Settings):
    """A study: every variant on every data set with every seed, compared with a control."""

    name: FileName = Field(description="of the output folder")
    title: str = ""
    config: str = Field(description="configuration of all runs: a shipped name or a path")
    set: dict[str, Any] = Field({}, description="config keys of all runs")
    set_if_used: dict[str, Any] = Field({}, description="config keys of the runs that use their table")
    control: str = Field(description="the variant that the others are compared with")
    variants: dict[str, VariantSettings] = Field(min_length=1)
    seeds: Seeds = (0, 1, 2)
    data: dict[FileName, DataSettings] = Field(
        {}, description="data sets by name; none: the configuration's own, or drawn scenes if it has none"
    )
    start_from: StartSettings | None = None
    diagnose_images: NonNegativeInt = Field(16, description="validation images for diagnose; 0: none")
    scales: dict[str, ScaleSettings] = Field({}, description="what differs with --scale NAME")

    @model_validator(mode="after")
    def _is_consistent(self) -> StudySettings:
        controls = {"control": self.control} | {f"variants.{v}.control": s.control for v, s in self.variants.items()}
        unknown = [name for scale in self.scales.values() for name in scale.variants if name not in self.variants]
        if unknown:
            raise ValueError(f"'scales' names '{unknown[0]}', which is not a variant")
        for key, name in controls.items():
            if name is not None and name not in self.variants:
                raise ValueError(f"'{key}' is '{name}', which is not a variant.{did_you_mean(name, self.variants)}")
        slugs = [slug(name) for name in self.variants]
        if len(set(slugs)) < len(slugs):
            raise ValueError("the names of two variants differ only in signs and spaces, which file names do not have")
        if START in slugs:
            raise ValueError(f"a variant cannot be called '{START}', as the base of `start_from` is")
        for key in ("seed", "output", "name", *(["train.init_from"] if self.start_from else [])):
            variant = next((name for name, settings in self.variants.items() if key in settings.set), None)
            if variant is not None:
                raise ValueError(f"variant '{variant}' sets '{key}', which the study sets itself")
        return self

    def control_of(self, variant: str) -> str:
        """The variant that another is compared with."""
        return self.variants[variant].control or self.control

    def at_scale(self, scale: str) -> StudySettings:
        """The study at another scale; "small" is the study as it is written.

        Raises:
            ConfigError: the study has no such scale.
        """
        if scale == "small" and scale not in self.scales:
            return self
        if scale not in self.scales:
            known = ["small", *self.scales]
            raise ConfigError(
                f"The study has no scale '{scale}'; it has {', '.join(known)}.{did_you_mean(scale, known)}"
            )
        change = self.scales[scale]
        variants = {
            name: variant.model_copy(update={"set": change.variants.get(name, variant.set)})
            for name, variant in self.variants.items()
        }
        return self.model_copy(
            update={
                "config": change.config or self.config,
                "set": {**self.set, **change.set},
                "set_if_used": self.set_if_used if change.set_if_used is None else change.set_if_used,
                "variants": variants,
                "seeds": change.seeds or self.seeds,
            }
        )

    def settings_of(self, variant: str) -> dict[str, Any]:
        """All config keys of a variant. `set_if_used` holds where its configuration has their table.

        Raises:
            ConfigError: the configuration is wrong.

        >>> study = StudySettings(
        ...     name="s", config="demo", control="a", set_if_used={"querying.inter.max_queries": 64},
        ...     variants={"a": VariantSettings(), "b": VariantSettings(set={"querying.inter": {}})},
        ... )
        >>> study.settings_of("a"), study.settings_of("b")
        ({}, {'querying.inter': {}, 'querying.inter.max_queries': 64})
        """
        own = self.variants[variant].set
        settings = {**self.set, **own}
        given = {full_key for key, value in own.items() for full_key in flatten(value, key)}
        candidates = {key: value for key, value in self.set_if_used.items() if key not in given}
        if not candidates:
            return settings
        config = load_config(self.config, list(settings.items()))
        return {**settings, **{key: value for key, value in candidates.items() if _has_table(config, key)}}


def _has_table(config: Config, key: str) -> bool:
    """Whether a configuration has the table of a key: `querying.inter` of `querying.inter.max_queries`."""
    table: Any = config
    for name in key.split(".")[:-1]:
        if table is None:
            return False
        if not hasattr(table, name):
            raise ConfigError(f"'set_if_used' has the key '{key}', which is not a key of a configuration.")
        table = getattr(table, name)
    return table is not None


@dataclass(frozen=True)
class PlannedRun:
    """One training of a study.

    Attributes:
        data: name of the data set.
        variant: name of the variant; None: the base that all start from.
        seed: of the run.
        config: of the run.
        start: the base that it starts from.
    """

    data: str
    variant: str | None
    seed: int
    config: Config
    start: PlannedRun | None = None

    @property
    def name(self) -> str:
        """A readable name, also of its files."""
        return f"{self.data}--{slug(self.variant) if self.variant else START}--seed{self.seed}"

    @property
    def key(self) -> str:
        """A hash of annotations and of every setting that changes the result, with those of the run it starts from."""
        settings = flatten(self.config.model_dump(mode="json"))
        values = {key: value for key, value in settings.items() if not key.startswith(_NOT_HASHED)}
        if self.start is None and self.config.train.init_from is not None:
            values["train.init_from"] = str(self.config.train.init_from)
        splits = {"data.train": self.config.data.train, "data.val": self.config.data.val}
        values |= {key: _file_hash(split.annotations) for key, split in splits.items() if split is not None}
        text = json.dumps([values, self.start.key if self.start else None], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_study(source: str | Path) -> StudySettings:
    """A study from a yaml file, or by the name of a shipped one.

    Raises:
        ConfigError: there is none, or all that is wrong with it, a line each.
    """
    shipped = shipped_studies()
    path = Path(source) if Path(source).is_file() else shipped.get(str(source))
    if path is None:
        hint = did_you_mean(str(source), shipped) or f" Shipped studies: {', '.join(shipped) or 'none'}."
        raise ConfigError(f"No study '{source}': it is neither a file nor a shipped name.{hint}")
    return validate_settings(StudySettings, read_yaml(path), where=str(source))


def shipped_studies() -> dict[str, Path]:
    """Name → file of the shipped studies."""
    return {path.stem: path for path in sorted((config_folder() / STUDIES).glob("*.yaml"))}


def study_data(
    study: StudySettings, output: Path, progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, DataSettings]:
    """The data sets of a study, else that of its configuration, else drawn scenes in its output folder.

    Raises:
        ConfigError: a configuration is wrong, or an annotation file does not exist.
    """
    with _mistakes_in(f"study {study.name}"):
        own = load_config(study.config, list(study.set.items())).data
    data = dict(study.data)
    if not data and (own.train or own.val):
        if not own.train or not own.val:
            raise ConfigError(
                f"{study.config} has only one of data.train and data.val; give your data with --train and --val."
            )
        data = {"data": DataSettings(train=own.train, val=own.val)}
    for name, sets in data.items():
        for split, files in (("train", sets.train), ("val", sets.val)):
            if not files.annotations.is_file():
                raise ConfigError(
                    f"data.{name}.{split}.annotations: there is no file {files.annotations}; give your data with "
                    "--train and --val."
                )
    if data:
        return data
    make_folder(output)
    scenes = make_scenes(output / "scenes", DEMO_SCENES, progress)
    train, val = (SplitConfig(annotations=scenes.annotations(s), images=scenes.images(s)) for s in ("train", "val"))
    return {"scenes": DataSettings(train=train, val=val)}


def plan_runs(study: StudySettings, data: dict[str, DataSettings], output: Path) -> list[PlannedRun]:
    """All runs of a study, seed by seed, so that a stopped study has whole comparisons; bases come first.

    Raises:
        ConfigError: a configuration is wrong.
    """
    runs: list[PlannedRun] = []
    starts: dict[str, PlannedRun] = {}
    for name, split in data.items():
        if study.start_from is not None:
            settings = {**study.set, **study.start_from.set}
            with _mistakes_in(f"start_from of study {study.name}"):
                starts[name] = _planned(study, name, split, None, study.start_from.seed, settings, output, None)
            runs.append(starts[name])
    for seed in study.seeds:
        for name, split in data.items():
            for variant in study.variants:
                with _mistakes_in(f"variant '{variant}' of study {study.name}"):
                    settings = study.settings_of(variant)
                    runs.append(_planned(study, name, split, variant, seed, settings, output, starts.get(name)))
    return runs


@contextmanager
def _mistakes_in(place: str) -> Iterator[None]:
    """Says which part of a study has the mistake."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _planned(
    study: StudySettings,
    data: str,
    split: DataSettings,
    variant: str | None,
    seed: int,
    settings: dict[str, Any],
    output: Path,
    start: PlannedRun | None,
) -> PlannedRun:
    overrides: list[Override] = [
        ("data.train", split.train.model_dump(mode="json")),
        ("data.val", split.val.model_dump(mode="json")),
        *settings.items(),
        ("seed", seed),
        ("output", str(output / "runs")),
    ]
    if start is not None:
        overrides.append(("train.init_from", str(output / "runs" / start.name / "last")))
    config = load_config(study.config, overrides)
    planned = PlannedRun(data, variant, seed, config, start)
    return replace(planned, config=config.model_copy(update={"name": planned.name}))


@cache
def _file_hash(path: Path) -> str | None:
    """By content, so that data may move; None without the file, which the run reports."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def slug(name: str) -> str:
    """A name as a part of a file name.

    >>> slug("λ = 0.3, flip only")
    '0.3-flip-only'
    """
    return re.sub(r"[^\w.]+", "-", name, flags=re.ASCII).strip("-") or "variant"
