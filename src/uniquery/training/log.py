"""`metrics.jsonl`: the models of its lines, its writer and its reader; also to TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from uniquery.errors import UserError
from uniquery.files import write_atomically

Weights = Literal["ema", "model"]


class _Line(BaseModel):
    """One line. Keys that a reader does not know are ignored, so that newer files stay readable."""

    model_config = ConfigDict(frozen=True)

    step: int


class TrainLine(_Line):
    """Training since the line before.

    Attributes:
        step: steps so far.
        images: images so far.
        losses: mean of each term; if a key `total` exists it is used instead of the sum.
        lr: learning rate.
        grad_norm: norm of the gradient before clipping.
        seconds: mean seconds of each phase of a step.
        querying: what the method reports: memory fill and age, response to other images.
    """

    kind: Literal["train"] = "train"
    images: int
    losses: dict[str, float | None]
    lr: float | None
    grad_norm: float | None = None
    seconds: dict[str, float | None] = {}
    querying: dict[str, float | None] = {}

    @property
    def total(self) -> float | None:
        """The sum of the losses, None where a term is missing."""
        if "total" in self.losses:
            return self.losses["total"]
        terms = list(self.losses.values())
        return math.fsum(t for t in terms if t is not None) if terms and None not in terms else None


class EvalLine(_Line):
    """One evaluation, in percent; None where there was nothing to measure."""

    kind: Literal["eval"] = "eval"
    weights: Weights
    headline: str = "AP"
    metrics: dict[str, float | None]
    per_class: dict[str, float | None] = {}
    instances: dict[str, int] = {}
    seconds: float | None = None

    @property
    def score(self) -> float | None:
        """The headline metric."""
        return self.metric(self.headline)

    def metric(self, name: str) -> float | None:
        """A metric, None if it was not or could not be measured."""
        return finite(self.metrics.get(name))


class SkippedStepLine(_Line):
    """A step without an update, because a loss or gradient was not finite.

    Attributes:
        step: steps so far, this one included.
        losses: each term; "nan", "inf" and "-inf" as text, as json has no such numbers.
        grad_norm: norm of the gradient, likewise.
        image_ids: the images of the step.
    """

    kind: Literal["skipped"] = "skipped"
    losses: dict[str, float | str]
    grad_norm: float | str
    image_ids: list[int]


Line = TrainLine | EvalLine | SkippedStepLine
_LINES: dict[str, type[Line]] = {"train": TrainLine, "eval": EvalLine, "skipped": SkippedStepLine}


def finite(value: float | None) -> float | None:
    """The number, or None if there is none, or it is infinite or not a number.

    >>> finite(2.0), finite(float("nan")), finite(None)
    (2.0, None, None)
    """
    return value if value is not None and math.isfinite(value) else None


def json_number(value: float) -> float | str:
    """The number, or its name where json has no number for it.

    >>> json_number(0.5), json_number(float("nan"))
    (0.5, 'nan')
    """
    return value if math.isfinite(value) else str(value)


class MetricsLog:
    """Appends lines to `metrics.jsonl`, and to TensorBoard.

    Lines of a resumed run after its checkpoint are removed first, as the run repeats those steps and evaluations.

    Args:
        path: the file.
        tensorboard: folder of the TensorBoard log, None for none.
        last_step: the step from which the run resumes.
        last_eval_step: the last evaluated step of that checkpoint.
    """

    def __init__(
        self, path: Path, *, tensorboard: Path | None = None, last_step: int = 0, last_eval_step: int = 0
    ) -> None:
        self.path = path
        self._remove_lines_after(last_step, last_eval_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _summary_writer(tensorboard, last_step) if tensorboard else None

    def _remove_lines_after(self, step: int, eval_step: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
                if values["step"] <= (eval_step if values["kind"] == "eval" else step):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a killed run may be cut off
        write_atomically(self.path, "".join(line + "\n" for line in kept))

    def write(self, line: Line) -> None:
        """Appends a line.

        Raises:
            UserError: it cannot be written, for example because the disk is full.
        """
        values = line.model_dump(exclude={"kind", "step"})
        try:
            self._file.write(json.dumps({"kind": line.kind, "step": line.step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from None
        if self._board is not None:
            for name, value in _scalars(values):
                self._board.add_scalar(f"{line.kind}/{name}", value, line.step)

    def sync(self) -> None:
        """Waits until all lines are on the disk; done before a checkpoint, which must not be ahead of its log.

        Raises:
            UserError: they cannot be written.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(f"Cannot write {self.path}: {error.strerror or error}.")

    def close(self) -> None:
        """Flushes and closes."""
        with suppress(OSError):  # a full disk was already reported by `write`
            self._file.close()
        if self._board is not None:
            self._board.close()


class SilentLog(MetricsLog):
    """Writes nothing: the log of all processes but the first."""

    def __init__(self) -> None:
        pass

    def write(self, line: Line) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _scalars(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)


def _summary_writer(folder: Path, last_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard is on: pip install 'uniquery[tensorboard]'.") from None
    return SummaryWriter(str(folder), purge_step=last_step + 1)


def read_metrics(path: Path) -> list[Line]:
    """The lines of a `metrics.jsonl`, in the order of the file.

    A last line that is cut off, as a killed run leaves it, is skipped, and so are lines of an unknown kind.

    Raises:
        UserError: the file is missing, or a line is wrong; names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise UserError(f"{path}: {reason}; give the folder of a run, which `uniquery train` writes.") from error
    numbered = [(number, text) for number, text in enumerate(content.split(b"\n"), start=1) if text.strip()]
    lines = []
    for number, text in numbered:
        try:
            values = json.loads(text)
        except ValueError as error:
            if number == numbered[-1][0]:
                break
            raise UserError(f"{path} line {number} is not json; remove that line.") from error
        lines.append(_parse_line(values, f"{path} line {number}"))
    return [line for line in lines if line is not None]


def _parse_line(values: Any, where: str) -> Line | None:
    if not isinstance(values, dict) or "kind" not in values:
        raise UserError(f"{where} has no 'kind'; remove that line.")
    model = _LINES.get(str(values["kind"]))
    if model is None:
        return None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(item) for item in first["loc"])
        raise UserError(f"{where}: '{key}' is wrong ({first['msg'].lower()}); remove that line.") from error
