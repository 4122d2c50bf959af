"""The tables of the page: numbers and their differences as text, configurations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup

from uniquery.report.charts import bar
from uniquery.training.log import EvalLine, finite

NOT_AVAILABLE = "n/a"

_MEANINGS = {
    "AP": "IoU 0.50 to 0.95",
    "AP50": "IoU 0.50",
    "AP75": "IoU 0.75",
    "APs": "small, < 32² pixels",
    "APm": "medium, 32² to 96²",
    "APl": "large, > 96²",
    "AR1": "1 per image",
    "AR10": "10 per image",
    "AR100": "100 per image",
    "ARs": "small, < 32² pixels",
    "ARm": "medium, 32² to 96²",
    "ARl": "large, > 96²",
}


_CROSS_SCENE = {
    "own": "response on the own instance, mean",
    "mean": "on instances of other images, mean",
    "p99": "on instances of other images, 99th percentile",
    "above_half": "on instances of other images, share above 0.5",
}


@dataclass(frozen=True)
class Cell:
    """A text, and how it changed against the first column."""

    text: str
    change: str = ""
    sense: Literal["better", "worse", ""] = ""


@dataclass(frozen=True)
class Row:
    """A named row of a table.

    Attributes:
        name: what the row is about.
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
        """Whether its texts are not all the same."""
        return len({cell.text for cell in self.cells}) > 1


def number(value: float | None, digits: int = 2) -> str:
    """A number with its thousands set apart, or n/a.

    >>> number(36.205), number(None), number(float("nan")), number(48000, 0)
    ('36.20', 'n/a', 'n/a', '48,000')
    """
    return NOT_AVAILABLE if finite(value) is None else f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """A length of time in its two largest units.

    >>> duration(42.4), duration(754), duration(8040), duration(200000)
    ('42 s', '12 min 34 s', '2 h 14 min', '2 d 7 h')
    """
    left = round(seconds)
    for unit, name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= unit:
            return f"{left // unit} {name} {left % unit // small} {small_name}"
    return f"{left} s"


def compared(value: float | None, first: float | None, *, less_is_better: bool = False) -> Cell:
    """A metric in percent, and its difference to the first run's.

    >>> compared(37.5, 36.0)
    Cell(text='37.50', change='+1.50', sense='better')
    >>> compared(35.999, 36.0).change, compared(None, 36.0).change
    ('±0.00', '')
    """
    if (value := finite(value)) is None or (first := finite(first)) is None:
        return Cell(number(value))
    change = round(value - first, 2)
    if not change:
        return Cell(number(value), "±0.00")
    return Cell(
        number(value), f"{change:+.2f}".replace("-", "−"), "worse" if (change > 0) is less_is_better else "better"
    )


def metric_rows(evals: Sequence[EvalLine | None], compare: bool) -> list[Row]:
    """A row for each metric, a column for each evaluation; differences are to the first."""
    names = list(_MEANINGS) + [name for e in evals if e for name in e.metrics if name not in _MEANINGS]
    rows = []
    for name in dict.fromkeys(names):
        values = [e.metric(name) if e else None for e in evals]
        rows.append(Row(name, _cells(values, compare), _MEANINGS.get(name, "")))
    return rows


def class_rows(evals: Sequence[EvalLine | None], compare: bool) -> list[Row]:
    """A row for each class, best of the first run first and n/a last; the note is its number of instances."""
    per_class = [{name: finite(ap) for name, ap in e.per_class.items()} if e else {} for e in evals]
    counts = {name: count for e in reversed(evals) if e for name, count in e.instances.items()}
    most = max((ap for aps in per_class for ap in aps.values() if ap is not None), default=0.0)

    def rank(name: str) -> tuple[float, str]:
        ap = per_class[0].get(name)
        return (-ap if ap is not None else 1.0, name)

    rows = []
    for name in sorted({name for aps in per_class for name in aps}, key=rank):
        values = [aps.get(name) for aps in per_class]
        bars = Markup("").join(bar(value, most, tone) for tone, value in enumerate(values))
        rows.append(Row(name, _cells(values, compare), number(counts.get(name), 0), bars))
    return rows


def diagnosis_rows(diagnoses: Sequence[Mapping[str, Any]]) -> list[Row]:
    """In percent: how queries respond to their own and to other images, and how far masks are from following g."""
    crosses = [d.get("cross_scene") or {} for d in diagnoses]
    rows = [
        Row(name, _cells([_percent(c.get(key)) for c in crosses], True, less_is_better=key != "own"))
        for key, name in _CROSS_SCENE.items()
    ]
    errors = [d.get("equivariance") or {} for d in diagnoses]
    for family in dict.fromkeys(name for one in errors for name in one):
        values = [_percent((one.get(family) or {}).get("mask_error")) for one in errors]
        rows.append(Row(f"masks that do not follow: {family}", _cells(values, True, less_is_better=True), "1 − IoU"))
    return rows


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _cells(values: Sequence[float | None], compare: bool, *, less_is_better: bool = False) -> tuple[Cell, ...]:
    first, *others = values
    cells = (compared(v, first, less_is_better=less_is_better) if compare else Cell(number(v)) for v in others)
    return (Cell(number(first)), *cells)


def text_rows(columns: Sequence[Mapping[str, str]]) -> list[Row]:
    """A row for each name in any of the columns, in the order they first appear; a dash where it is missing.

    >>> [(row.name, row.differs) for row in text_rows([{"lr": "0.1", "seed": "1"}, {"lr": "0.2", "seed": "1"}])]
    [('lr', True), ('seed', False)]
    """
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, tuple(Cell(column.get(name, "—")) for column in columns)) for name in names]


def phase_rows(phases: Sequence[Mapping[str, float]]) -> list[Row]:
    """Milliseconds and share of each phase of a step, a column for each run, and their sums."""
    names = list(dict.fromkeys(name for one in phases for name in one))
    totals = [sum(one.values()) for one in phases]
    rows = [
        Row(name, tuple(_milliseconds(one.get(name), total) for one, total in zip(phases, totals, strict=True)))
        for name in names
    ]
    return [*rows, Row("whole step", tuple(_milliseconds(total, total) for total in totals))] if rows else []


def _milliseconds(seconds: float | None, total: float) -> Cell:
    if seconds is None or total <= 0:
        return Cell(NOT_AVAILABLE)
    return Cell(f"{seconds * 1e3:,.1f} ms", f"{seconds / total:.0%}")
