"""The tables of the page: numbers and differences as text, configurations beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from uniquery.evaluation.coco import describe_metric
from uniquery.report.charts import bar
from uniquery.training.log import EvalLine, finite

NOT_AVAILABLE = "n/a"

_COCO_METRICS = ("AP", "AP50", "AP75")  # columns for runs that have not been evaluated yet

_CROSS_SCENE = {
    "own": "response to its own instance, mean",
    "mean": "response to instances of other images, mean",
    "p99": "response to instances of other images, 99th percentile",
    "above_half": "response to instances of other images, share above 0.5",
    "inside": "… at places that the own instance covers, mean",
    "outside": "… at other places, mean",
    "same_class": "… of the same class, mean",
    "other_class": "… of other classes, mean",
}


@dataclass(frozen=True)
class Cell:
    """A text, and its difference to the first column."""

    text: str
    change: str = ""
    verdict: Literal["better", "worse", ""] = ""


@dataclass(frozen=True)
class Row:
    """A named row of a table.

    Attributes:
        name: name of the row.
        cells: one for each column.
        note: a remark beside the name.
        bars: a chart of the row, if it has one.
    """

    name: str
    cells: tuple[Cell, ...]
    note: str = ""
    bars: Markup | None = None

    @property
    def differs(self) -> bool:
        """Whether its cells have different texts."""
        return len({cell.text for cell in self.cells}) > 1


def number(value: float | None, digits: int = 2) -> str:
    """A number with commas between thousands, or n/a.

    >>> number(36.205), number(None), number(float("nan")), number(48000, 0)
    ('36.20', 'n/a', 'n/a', '48,000')
    """
    return NOT_AVAILABLE if finite(value) is None else f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """A time in its two largest units.

    >>> duration(42.4), duration(754), duration(8040), duration(200000)
    ('42 s', '12 min 34 s', '2 h 14 min', '2 d 7 h')
    """
    rest = round(seconds)
    for unit, name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rest >= unit:
            return f"{rest // unit} {name} {rest % unit // small} {small_name}"
    return f"{rest} s"


def compare(value: float | None, first: float | None, *, lower_is_better: bool = False) -> Cell:
    """A metric in percent, and its difference to that of the first run.

    >>> compare(37.5, 36.0)
    Cell(text='37.50', change='+1.50', verdict='better')
    >>> compare(35.999, 36.0).change, compare(None, 36.0).change
    ('±0.00', '')
    """
    if (value := finite(value)) is None or (first := finite(first)) is None:
        return Cell(number(value))
    change = round(value - first, 2)
    if not change:
        return Cell(number(value), "±0.00")
    return Cell(
        number(value), f"{change:+.2f}".replace("-", "−"), "worse" if (change > 0) is lower_is_better else "better"
    )


def headline(evals: Sequence[EvalLine | None]) -> str:
    """The name of the metric that counts most: the one that an evaluation names, else AP."""
    return next((e.headline for e in evals if e), _COCO_METRICS[0])


def headline_metrics(evals: Sequence[EvalLine | None]) -> tuple[str, ...]:
    """The headline metric and the two that follow it in the evaluations, such as AP, AP50 and AP75."""
    names = list(dict.fromkeys(name for e in evals if e for name in e.metrics)) or list(_COCO_METRICS)
    first = headline(evals)
    return tuple(names[names.index(first) :][:3]) if first in names else (first,)


def metric_rows(evals: Sequence[EvalLine | None], compare_runs: bool) -> list[Row]:
    """A row for each metric, a column for each evaluation; differences are to the first."""
    rows = []
    for name in dict.fromkeys(name for e in evals if e for name in e.metrics):
        values = [e.metric(name) if e else None for e in evals]
        rows.append(Row(name, _cells(values, compare_runs), describe_metric(name)))
    return rows


def class_rows(evals: Sequence[EvalLine | None], compare_runs: bool) -> list[Row]:
    """A row for each class, best of the first run first and n/a last; the note is its number of instances."""
    per_class = [{name: finite(value) for name, value in e.per_class.items()} if e else {} for e in evals]
    counts = {name: count for e in reversed(evals) if e for name, count in e.instances.items()}
    maximum = max((value for run in per_class for value in run.values() if value is not None), default=0.0)

    def rank(name: str) -> tuple[float, str]:
        value = per_class[0].get(name)
        return (-value if value is not None else 1.0, name)

    rows = []
    for name in sorted({name for run in per_class for name in run}, key=rank):
        values = [run.get(name) for run in per_class]
        bars = Markup("").join(bar(value, maximum, color) for color, value in enumerate(values))
        rows.append(Row(name, _cells(values, compare_runs), number(counts.get(name), 0), bars))
    return rows


def diagnosis_rows(diagnoses: Sequence[Mapping[str, Any]]) -> list[Row]:
    """In percent: the response of queries to their own and to other images, and how far masks are from equivariant."""
    crosses = [d.get("cross_scene") or {} for d in diagnoses]
    rows = []
    for key, name in _CROSS_SCENE.items():
        found = [c.get(key) for c in crosses]
        values = [_percent(_mean_response(value)) for value in found]
        rows.append(Row(name, _cells(values, True, lower_is_better=key != "own"), _instances(found)))
    errors = [d.get("equivariance") or {} for d in diagnoses]
    for transform in dict.fromkeys(name for error in errors for name in error):
        of_runs = [error.get(transform) or {} for error in errors]
        values = [_percent(one.get("mask_error")) for one in of_runs]
        note = ", ".join(filter(None, ["1 − IoU", _instances(of_runs)]))
        rows.append(Row(f"mask error after {transform}", _cells(values, True, lower_is_better=True), note))
    return rows


def _instances(found: Sequence[Any]) -> str:
    """How many instances the figures of each run rest on, as a note."""
    counts = [str(one["instances"]) for one in found if isinstance(one, Mapping) and "instances" in one]
    return f"{' and '.join(dict.fromkeys(counts))} instances" if counts else ""


def _mean_response(value: Any) -> float | None:
    """A number, or the mean of a table of numbers."""
    return value.get("mean") if isinstance(value, Mapping) else value


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _cells(values: Sequence[float | None], compare_runs: bool, *, lower_is_better: bool = False) -> tuple[Cell, ...]:
    first, *others = values
    cells = (compare(v, first, lower_is_better=lower_is_better) if compare_runs else Cell(number(v)) for v in others)
    return (Cell(number(first)), *cells)


def text_rows(columns: Sequence[Mapping[str, str]]) -> list[Row]:
    """A row for each name of any column, in the order of their first appearance; a dash where it is missing.

    >>> [(row.name, row.differs) for row in text_rows([{"lr": "0.1", "seed": "1"}, {"lr": "0.2", "seed": "1"}])]
    [('lr', True), ('seed', False)]
    """
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, tuple(Cell(column.get(name, "—")) for column in columns)) for name in names]


def phase_rows(phases: Sequence[Mapping[str, float]]) -> list[Row]:
    """Milliseconds and share of each phase of a step, a column for each run, and their sums."""
    names = list(dict.fromkeys(name for run in phases for name in run))
    totals = [sum(run.values()) for run in phases]
    rows = [
        Row(name, tuple(_milliseconds(run.get(name), total) for run, total in zip(phases, totals, strict=True)))
        for name in names
    ]
    return [*rows, Row("whole step", tuple(_milliseconds(total, total) for total in totals))] if rows else []


def _milliseconds(seconds: float | None, total: float) -> Cell:
    if seconds is None or total <= 0:
        return Cell(NOT_AVAILABLE)
    return Cell(f"{seconds * 1e3:,.1f} ms", f"{seconds / total:.0%}")


def format_interval(value: float, low: float | None, high: float | None) -> str:
    """A difference and its interval as text.

    >>> format_interval(1.0, -0.25, 2.25), format_interval(-0.5, None, None)
    ('+1.0 (−0.2 to +2.2)', '−0.5')
    """
    text = f"{value:+.1f}" + (f" ({low:+.1f} to {high:+.1f})" if low is not None and high is not None else "")
    return text.replace("-", "−")
