"""A run folder as a record: curves, scores, configuration and environment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from uniquery.settings import flatten
from uniquery.training.log import EvalLine, SkippedStepLine, TrainLine, finite
from uniquery.training.run_folder import RunFolder


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder.

    Attributes:
        folder: where it is.
        config_text: `config.yaml` as text, empty if there is none.
        config: the same, flat: `optim.lr` to `0.01`.
        environment: `environment.json`, flat.
        train: lines of training, in order of their steps.
        evals: evaluations, in order of their steps.
        skipped: steps without an update, because a loss or gradient was not finite.
        diagnosis: the figures of `uniquery diagnose`, empty if it was not run.
        response: the picture of `uniquery diagnose`, if there is one.
    """

    folder: Path
    config_text: str
    config: Mapping[str, str]
    environment: Mapping[str, str]
    train: tuple[TrainLine, ...]
    evals: tuple[EvalLine, ...]
    skipped: tuple[SkippedStepLine, ...] = ()
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    response: Path | None = None

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def final(self) -> EvalLine | None:
        """The last evaluation; that of the EMA, if both were evaluated at that step."""
        return max(self.evals, key=lambda e: (e.step, e.weights == "ema"), default=None)

    @property
    def best(self) -> EvalLine | None:
        """The evaluation with the highest headline metric."""
        scored = [e for e in self.evals if e.score is not None]
        return max(scored, key=lambda e: e.score or 0.0, default=None)

    @property
    def steps(self) -> int:
        """How many steps were trained."""
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


def load_run(folder: Path) -> RunRecord:
    """Reads a run folder.

    Where a run was resumed from an earlier step, the lines that it repeated are left out. `config.yaml` and
    `environment.json` may be missing.

    Raises:
        UserError: a file is missing or broken; names the file, and the line.
    """
    run = RunFolder(folder)
    lines = run.read_metrics()
    evals = [line for line in lines if isinstance(line, EvalLine)]
    kept = [
        line for weights in ("ema", "model") for line in _without_repeated(e for e in evals if e.weights == weights)
    ]
    return RunRecord(
        folder=folder,
        config_text=run.config_text(),
        config=_texts(run.config_tables()),
        environment=_texts(run.read_environment()),
        train=tuple(_without_repeated(line for line in lines if isinstance(line, TrainLine))),
        evals=tuple(sorted(kept, key=lambda e: e.step)),
        skipped=tuple(_without_repeated(line for line in lines if isinstance(line, SkippedStepLine))),
        diagnosis=run.read_diagnosis(),
        response=run.response_file if run.response_file.is_file() else None,
    )


_Line = TypeVar("_Line", TrainLine, EvalLine, SkippedStepLine)


def _without_repeated(lines: Iterable[_Line]) -> list[_Line]:
    """Steps only grow: a line of an earlier step removes the lines from that step on, which the run repeated."""
    kept: list[_Line] = []
    for line in lines:
        while kept and kept[-1].step >= line.step:
            kept.pop()
        kept.append(line)
    return kept


def _texts(content: Mapping[str, Any]) -> dict[str, str]:
    """One level of dotted names and texts."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        for key, value in flatten(dict(content)).items()
    }
