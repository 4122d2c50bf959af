"""What the page says about predictions: kinds of errors, precision and recall, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from markupsafe import Markup

from uniquery.evaluation.error_summary import ALL, ErrorSummary, Group, summarize_errors
from uniquery.evaluation.errors import INSTANCE_KINDS, PREDICTION_KINDS
from uniquery.evaluation.instance_traits import TRAITS
from uniquery.evaluation.operating_points import OperatingPoint, ScoredDetections, read_scores
from uniquery.report.charts import Series, line_chart
from uniquery.report.evaluated import EvaluatedRun
from uniquery.report.tables import Cell, Row, compare, number
from uniquery.weights.model_file import SCORE_THRESHOLD

CURVES = 4
"""How many classes the chart of precision and recall shows."""
_SIZE = (520, 270)
_GROUPS: tuple[Group, ...] = (ALL, *((trait, name) for trait, names in TRAITS.items() for name in names))


@dataclass(frozen=True)
class ErrorTables:
    """The errors of a run.

    Attributes:
        label: name of the run.
        note: which predictions count, and what differences are to.
        groups: percentages of instances, a row for each group.
        predictions: how many are of each kind.
    """

    label: str
    note: str
    groups: tuple[Row, ...]
    predictions: tuple[Row, ...]


def error_tables(runs: Sequence[tuple[str, EvaluatedRun]]) -> list[ErrorTables]:
    """The tables of each run; those after the first say the difference to it, if it has the same data."""
    tables: list[ErrorTables] = []
    first: tuple[EvaluatedRun, ErrorSummary] | None = None
    for label, run in runs:
        summary = summarize_errors(run.images, run.predictions)
        base = first[1] if first and run.shares_data_with(first[0]) else None
        first = first or (run, summary)
        chosen = f"chosen by {run.thresholds.rule}" if run.thresholds else f"{SCORE_THRESHOLD}"
        note = f"score thresholds: {chosen}" + (f"; differences are to {tables[0].label}" if base else "")
        tables.append(ErrorTables(label, note, _group_rows(summary, base), _prediction_rows(summary, base)))
    return tables


def _group_rows(summary: ErrorSummary, base: ErrorSummary | None) -> tuple[Row, ...]:
    """A row for each group that has instances: the percentage of each kind, and the mean boundary IoU."""
    rows = []
    for group in _GROUPS:
        if not summary.count(group):
            continue
        values = {kind: summary.share(kind, group) for kind in INSTANCE_KINDS}
        cells = [
            _cell(value, base.share(kind, group) if base else None, lower_is_better=kind != "correct")
            for kind, value in values.items()
        ]
        cells.append(_cell(summary.mean_boundary_iou(group), base.mean_boundary_iou(group) if base else None))
        name = group[1] if group == ALL else f"{group[0]}: {group[1]}"
        rows.append(Row(name, tuple(cells), f"{summary.count(group):,}"))
    return tuple(rows)


def _cell(value: float | None, first: float | None, *, lower_is_better: bool = False) -> Cell:
    """In percent with one digit, as the counts behind it are small."""
    cell = compare(value, first, lower_is_better=lower_is_better)
    if not cell.change:
        return Cell(number(value, 1))
    assert value is not None
    assert first is not None
    change = round(value - first, 1)
    text = f"{change:+.1f}".replace("-", "−") if change else "±0.0"
    return Cell(number(value, 1), text, cell.verdict if change else "")


def _prediction_rows(summary: ErrorSummary, base: ErrorSummary | None) -> tuple[Row, ...]:
    rows = []
    for kind, meaning in PREDICTION_KINDS.items():
        count = summary.predictions[kind]
        change = count - base.predictions[kind] if base else None
        text = "" if change is None else f"{change:+,}".replace("-", "−") if change else "±0"
        verdict: Literal["better", "worse", ""] = ""
        if change and kind != "ignored":
            verdict = "better" if (change > 0) is (kind == "correct") else "worse"
        rows.append(Row(kind, (Cell(f"{count:,}", text, verdict),), meaning))
    return tuple(rows)


@dataclass(frozen=True)
class ScoreSection:
    """Precision, recall and calibration of a run.

    Attributes:
        label: name of the run.
        rule: how its thresholds were chosen, empty if they were not.
        mask_threshold: the chosen one; None if it was not chosen.
        curves: chart of precision over recall, with the chosen points.
        calibration: chart of precision over score.
        error: calibration error in percent, as text.
        rows: threshold, precision, recall and F1 score of each class.
    """

    label: str
    rule: str
    mask_threshold: float | None
    curves: Markup
    calibration: Markup
    error: str
    rows: tuple[Row, ...]


def score_section(label: str, run: EvaluatedRun) -> ScoreSection:
    """Of the predictions of a run, at IoU 0.5."""
    scores, least = read_scores(run.ground_truth, run.results, run.max_detections), run.score_thresholds
    points = {i: detections.at(least[i]) for i, detections in scores.classes.items() if i in least}
    most = sorted(points, key=lambda i: -points[i].instances)[:CURVES]
    bins = np.array([[100 * score, 100 * precision] for score, precision, _ in scores.bins]).reshape(-1, 2)
    ideal = Series("ideal", np.array([[0.0, 0.0], [100.0, 100.0]]), 7, dashed=True)
    return ScoreSection(
        label,
        run.thresholds.rule if run.thresholds else "",
        run.thresholds.mask if run.thresholds else None,
        line_chart(
            [s for c, i in enumerate(most) for s in _curve(scores.names[i], scores.classes[i], points[i], c)],
            title="Precision over recall at IoU 0.5",
            x_label="recall in percent",
            y_label="precision in percent",
            size=_SIZE,
        ),
        line_chart(
            [ideal, Series("measured", bins)] if len(bins) else [],
            title="Precision over score",
            x_label="score in percent",
            y_label="precision in percent",
            size=_SIZE,
        ),
        number(None if scores.calibration_error is None else 100 * scores.calibration_error, 1),
        tuple(_point_row(scores.names[i], point) for i, point in points.items()),
    )


def _curve(name: str, detections: ScoredDetections, chosen: OperatingPoint, color: int) -> list[Series]:
    """The curve of a class, and its chosen point."""
    values = [(100 * p.recall, 100 * p.precision) for p in detections.curve() if p.recall is not None and p.precision]
    points = np.array(values, dtype=float).reshape(-1, 2)
    marker = [[100 * chosen.recall, 100 * chosen.precision]] if chosen.recall is not None and chosen.precision else []
    label = f"{name} at score {chosen.threshold:.2f}"
    return [
        Series(name, points, color),
        Series(label, np.array(marker, dtype=float).reshape(-1, 2), color, marker=True),
    ]


def _point_row(name: str, point: OperatingPoint) -> Row:
    shares = (None if value is None else 100 * value for value in (point.precision, point.recall, point.f1))
    cells = (Cell(f"{point.threshold:.3f}"), *(Cell(number(share, 1)) for share in shares))
    return Row(name, cells, f"{point.instances:,}")
