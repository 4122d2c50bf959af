"""The result of a study: a table for the console, a json, and a self-contained page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from uniquery.evaluation.compare import Difference
from uniquery.evaluation.tables import format_percent
from uniquery.files import write_atomically
from uniquery.report.charts import NUM_COLORS, Interval, Series, interval_chart, line_chart
from uniquery.report.page import page_template, write_report
from uniquery.report.scales import Points, as_points
from uniquery.report.tables import duration, format_interval
from uniquery.study.pictures import variant_pictures
from uniquery.study.plan import PlannedRun, StudySettings
from uniquery.study.results import Row
from uniquery.study.run import Failure


def study_table(study: StudySettings, rows: Sequence[Row]) -> Table:
    """A row for each variant on each data set."""
    headline = ", ".join(dict.fromkeys(row.results[0].headline for row in rows)) or "AP"
    columns = {"data": "data"} if len({row.data for row in rows}) > 1 else {}
    columns |= {"variant": "variant", "seeds": "seeds", "score": headline, "control": "compared with"}
    columns |= {"difference": "difference (95 %, seeds)", "images": "(95 %, images)", "verdict": "verdict"}
    reported = {name for variant in study.variants.values() for name in variant.paper}
    if reported:
        columns["paper"] = "paper"
    if reported - {headline}:  # time or memory
        columns |= {"time": "time of a run", "memory": "peak memory"}
    if _lengths_differ(rows):
        columns["length"] = "steps, forwards"
    table = Table(*(Column(title, no_wrap=name == "variant", overflow="fold") for name, title in columns.items()))
    for row in rows:
        cells = row_cells(study, row)
        table.add_row(*(escape(cells[name]) for name in columns))
    return table


def row_cells(study: StudySettings, row: Row) -> dict[str, str]:
    """The cells of a row as text."""
    difference, images = row.difference, row.images
    spread = f" ± {row.std:.1f}" if row.std is not None else ""
    paper = study.variants[row.variant].paper
    return {
        "data": row.data,
        "variant": row.variant,
        "control": row.control or "",
        "seeds": str(len(row.results)),
        "score": format_percent(row.mean, 1) + spread,
        "difference": format_interval(difference.mean, difference.low, difference.high) if difference else "",
        "images": format_interval(images.delta, images.low, images.high) if images else "",
        "verdict": row.verdict,
        "length": "{:,}, {:,}".format(*row.steps_and_forwards),
        "paper": "  ".join(f"{name} {value:g}" for name, value in paper.items()),
        "time": duration(statistics.fmean(result.seconds for result in row.results)),
        "memory": f"{max(result.peak_memory_gb for result in row.results):.2f} GB",
    }


def _lengths_differ(rows: Sequence[Row]) -> bool:
    """Whether variants were trained for different numbers of steps or image forwards."""
    return len({row.steps_and_forwards for row in rows}) > 1


def write_summary(study: StudySettings, rows: Sequence[Row], path: Path) -> None:
    """The rows as json."""
    content = {
        "study": study.name,
        "rows": [
            {
                **row_cells(study, row),
                "scores": {result.seed: result.score for result in row.results},
                "mean_difference": row.difference.mean if row.difference else None,
                "interval": _interval(row.difference),
                "images_by_seed": {seed: asdict(interval) for seed, interval in row.images_by_seed.items()},
            }
            for row in rows
        ],
    }
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False))


def _interval(difference: Difference | None) -> list[float] | None:
    if difference is None or difference.low is None or difference.high is None:
        return None
    return [difference.low, difference.high]


def write_page(
    study: StudySettings,
    rows: Sequence[Row],
    runs: Sequence[PlannedRun],
    path: Path,
    failures: Sequence[Failure] = (),
) -> None:
    """One html file with the table, curves, intervals and the images where variants differ most."""
    names = dict.fromkeys(row.data for row in rows)
    html = page_template("study.html.j2").render(
        title=study.title or study.name,
        runs=sum(len(row.results) for row in rows),
        labels=[],
        num_colors=NUM_COLORS,
        has_paper=any(variant.paper for variant in study.variants.values()),
        has_length=_lengths_differ(rows),
        data_sets=[_section(study, name, [row for row in rows if row.data == name], runs) for name in names],
        failures=[(failure.run.name, failure.reason) for failure in failures],
    )
    write_report(path, html)


def _section(study: StudySettings, name: str, rows: Sequence[Row], runs: Sequence[PlannedRun]) -> dict[str, Any]:
    headline = rows[0].results[0].headline
    intervals = [
        Interval(row.variant, row.difference.mean, row.difference.low, row.difference.high, color)
        for color, row in enumerate(rows)
        if row.difference
    ]
    return {
        "name": name,
        "headline": headline,
        "rows": [row_cells(study, row) for row in rows],
        "intervals": interval_chart(intervals, title="Difference to the control, over seeds", x_label=headline),
        "curves": line_chart(
            variant_curves(rows, headline), title=headline, x_label="image forwards", y_label="percent"
        ),
        "pictures": variant_pictures(rows, runs),
    }


def variant_curves(rows: Sequence[Row], headline: str) -> list[Series]:
    """The base, and from its end on the mean over seeds of each variant, with each seed behind it."""
    series = []
    start = rows[0].start if rows else None
    base = [(e.images, e.metrics.get(headline)) for e in start.evaluations] if start else []
    if base:
        series.append(Series("start", as_points(base), dashed=True))
    for color, row in enumerate(rows):
        curves = [[(e.images, e.metrics.get(headline)) for e in result.evaluations] for result in row.results]
        points: dict[int, list[float]] = {}
        for images, value in (point for curve in curves for point in curve):
            if value is not None:
                points.setdefault(images, []).append(value)
        means = [(images, statistics.fmean(values)) for images, values in sorted(points.items())]
        seeds = [Series(row.variant, _after(base, curve), color, background=True) for curve in curves]
        series += seeds if len(seeds) > 1 else []
        series.append(Series(row.variant, _after(base, means), color, dashed=color >= NUM_COLORS))
    return series


def _after(base: Sequence[tuple[int, float | None]], curve: Sequence[tuple[int, float | None]]) -> Points:
    """The points of a curve that continues from the end of another."""
    forwards = base[-1][0] if base else 0
    return as_points([*base[-1:], *((forwards + images, value) for images, value in curve)])
