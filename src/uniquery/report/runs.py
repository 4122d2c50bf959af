"""What a run folder says about a run: its curves, its scores, its configuration and its machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from uniquery.errors import UserError
from uniquery.settings import flatten

Weights = Literal["ema", "model"]

METRICS_FILE, FIGURES_FILE, PICTURE_FILE = "metrics.jsonl", "diagnose.json", "diagnose.png"


class TrainLine(BaseModel):
    """One line of training; `seconds` are those of one step, averaged since the line before.

    Attributes:
        step: how many steps were taken.
        images: how many images were seen in all.
        losses: each term; a `total` among them counts as their sum.
        lr: learning rate.
        grad_norm: norm of the gradient before clipping.
        seconds: of each phase.
        querying: what the algorithm watches: memory fill and age, response to other images.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["train"]
    step: int
    images: int
    losses: dict[str, float | None]
    lr: float | None
    grad_norm: float | None = None
    seconds: dict[str, float | None] = {}
    querying: dict[str, float | None] = {}

    @property
    def total(self) -> float | None:
        """The loss in all, None where a term is missing."""
        if "total" in self.losses:
            return self.losses["total"]
        terms = list(self.losses.values())
        return math.fsum(t for t in terms if t is not None) if terms and None not in terms else None


class EvalLine(BaseModel):
    """One evaluation, in percent; None where there was nothing to measure."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["eval"]
    step: int
    weights: Weights
    metrics: dict[str, float | None]
    per_class: dict[str, float | None] = {}
    instances: dict[str, int] = {}
    seconds: float | None = None

    def metric(self, name: str) -> float | None:
        """A metric, None if it was not or could not be measured."""
        return finite(self.metrics.get(name))


@dataclass(frozen=True)
class Run:
    """One run folder, read.

    Attributes:
        folder: where it is.
        config_text: `config.yaml` as it stands, empty if there is none.
        config: the same, flat: `optimizer.lr` to `0.01`.
        environment: `environment.json`, flat.
        train: lines of training, in order of their steps.
        evals: evaluations, in order of their steps.
        diagnosis: what `uniquery diagnose` measured, empty if it was not asked.
        response: the picture it drew, if it did.
    """

    folder: Path
    config_text: str
    config: Mapping[str, str]
    environment: Mapping[str, str]
    train: tuple[TrainLine, ...]
    evals: tuple[EvalLine, ...]
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    response: Path | None = None

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def final(self) -> EvalLine | None:
        """The last evaluation; of averaged weights, if both were evaluated then."""
        return max(self.evals, key=lambda e: (e.step, e.weights == "ema"), default=None)

    @property
    def best(self) -> EvalLine | None:
        """The evaluation with the highest AP."""
        scored = [e for e in self.evals if e.metric("AP") is not None]
        return max(scored, key=lambda e: e.metric("AP") or 0.0, default=None)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self.train[-1].step if self.train else 0

    @property
    def images(self) -> int:
        """How many images were seen."""
        return self.train[-1].images if self.train else 0

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase over all training steps."""
        totals: dict[str, float] = {}
        before = 0
        for line in self.train:
            for phase, seconds in line.seconds.items():
                totals[phase] = totals.get(phase, 0.0) + (finite(seconds) or 0.0) * (line.step - before)
            before = line.step
        return totals


def finite(value: float | None) -> float | None:
    """The number, or None if there is none, or it is infinite or not a number.

    >>> finite(2.0), finite(float("nan")), finite(None)
    (2.0, None, None)
    """
    return value if value is not None and math.isfinite(value) else None


def load_run(folder: Path) -> Run:
    """Reads a run folder.

    A last line that was cut off, as a killed run leaves it, is passed over; so are lines of a kind unknown here. Where
    a run was resumed from an earlier step, the lines that it overtook are left out. `config.yaml` and
    `environment.json` may be missing.

    Raises:
        UserError: a file is missing or broken; names the file, and the line.
    """
    config_text = _text(folder / "config.yaml")
    lines = _lines(folder / METRICS_FILE)
    evals = [line for line in lines if isinstance(line, EvalLine)]
    kept = [line for weights in ("ema", "model") for line in _not_overtaken(e for e in evals if e.weights == weights)]
    return Run(
        folder=folder,
        config_text=config_text,
        config=_texts(_mapping(folder / "config.yaml", config_text, yaml.safe_load)),
        environment=_texts(_mapping(folder / "environment.json", _text(folder / "environment.json"), json.loads)),
        train=tuple(_not_overtaken(line for line in lines if isinstance(line, TrainLine))),
        evals=tuple(sorted(kept, key=lambda e: e.step)),
        diagnosis=_mapping(folder / FIGURES_FILE, _text(folder / FIGURES_FILE), json.loads),
        response=folder / PICTURE_FILE if (folder / PICTURE_FILE).is_file() else None,
    )


def _lines(path: Path) -> list[TrainLine | EvalLine]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise UserError(f"{path}: {reason}; give the folder of a run, which `uniquery train` writes.") from error
    numbered = [(number, text) for number, text in enumerate(raw.split(b"\n"), start=1) if text.strip()]
    lines = []
    for number, text in numbered:
        try:
            value = json.loads(text)
        except ValueError as error:
            if number == numbered[-1][0]:
                break
            raise UserError(f"{path} line {number} is not json; remove that line.") from error
        lines.append(_line(value, f"{path} line {number}"))
    return [line for line in lines if line is not None]


def _line(value: Any, place: str) -> TrainLine | EvalLine | None:
    if not isinstance(value, dict) or "kind" not in value:
        raise UserError(f"{place} has no 'kind'; remove that line.")
    kinds: dict[str, type[TrainLine] | type[EvalLine]] = {"train": TrainLine, "eval": EvalLine}
    model = kinds.get(str(value["kind"]))
    if model is None:
        return None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{place}: '{field}' is wrong ({first['msg'].lower()}); remove that line.") from error


_Line = TypeVar("_Line", TrainLine, EvalLine)


def _not_overtaken(lines: Iterable[_Line]) -> list[_Line]:
    """Steps only grow; a line that goes back throws out those it repeats."""
    kept: list[_Line] = []
    for line in lines:
        while kept and kept[-1].step >= line.step:
            kept.pop()
        kept.append(line)
    return kept


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _mapping(path: Path, text: str, parse: Any) -> Mapping[str, Any]:
    if not text.strip():
        return {}
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        raise UserError(f"{path} cannot be parsed: {detail}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__} where names and values are expected.")
    return value


def _texts(content: Mapping[str, Any]) -> dict[str, str]:
    """One level of dotted names and texts."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        for key, value in flatten(dict(content)).items()
    }
