"""One html page about one run, or about several beside each other: self-contained, without scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from uniquery.files import make_folder, write_atomically
from uniquery.report.charts import TONES, Series, line_chart, stacked_bar
from uniquery.report.drawings import LabeledMask, data_uri, overlay, read_picture, shrunk
from uniquery.report.runs import EvalLine, Run, TrainLine, Weights, finite
from uniquery.report.scales import points_of, smooth
from uniquery.report.tables import (
    Cell,
    class_rows,
    compared,
    diagnosis_rows,
    duration,
    metric_rows,
    number,
    phase_rows,
    text_rows,
)
from uniquery.report.text_labels import Picture

_THUMBNAIL, _RESPONSE = 360, 900  # pixels of the longer side
_WIDE, _NARROW = (520, 270), (340, 210)
_HEADLINE = ("AP", "AP50", "AP75")
_WEIGHTS: tuple[Weights, ...] = ("ema", "model")


@dataclass(frozen=True)
class Example:
    """One picture to show: (H, W, 3) uint8, what is in it, and what a run found."""

    name: str
    image: Picture
    truth: Sequence[LabeledMask]
    predicted: Sequence[LabeledMask]


def render(runs: Sequence[tuple[Run, Sequence[Example]]], title: str) -> str:
    """The page as text. With several runs, curves are overlaid and numbers compared with the first run's.

    Args:
        runs: each run with its pictures; pictures of the same name are put beside each other.
        title: the heading.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    only = [run for run, _ in runs]
    labels = run_labels(only)
    several = len(runs) > 1
    finals = [run.final for run in only]
    columns = list(zip(labels, finals, strict=True)) if several else _columns_of_one(only[0])
    return _template().render(
        title=title,
        labels=labels,
        folders=[str(run.folder) for run in only],
        tones=TONES,
        tiles=[] if several else _tiles(only[0]),
        summary=_summary(only) if several else [],
        accuracy=_accuracy_charts(only, labels),
        metric_columns=[(heading, [f"step {e.step:,}", e.weights] if e else []) for heading, e in columns],
        metrics=metric_rows([e for _, e in columns], compare=several),
        classes=class_rows(finals, compare=several),
        training=_training_charts(only, labels),
        pictures=_pictures([examples for _, examples in runs]),
        diagnosis=diagnosis_rows([run.diagnosis for run in only]) if any(run.diagnosis for run in only) else [],
        responses=[_response(run) for run in only],
        phases=_phases(only),
        environment=text_rows([run.environment for run in only]),
        differences=[row for row in text_rows([run.config for run in only]) if row.differs],
        configs=[run.config_text for run in only],
    )


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files("uniquery.report").joinpath("report.html.j2").read_text("utf-8"))


def write_report(path: Path, html: str) -> None:
    """Writes the page so that a reader finds the old one or the new one, never half of it.

    Raises:
        UserError: the file cannot be written.
    """
    make_folder(path.parent)
    # Half a surrogate pair, as a broken file name may bring it, has no place in utf-8.
    write_atomically(path, html.encode("utf-8", errors="replace"))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: that of its folder, or its whole path where two folders share a name."""
    names = Counter(run.name for run in runs)
    labels = [run.name if names[run.name] == 1 else str(run.folder) for run in runs]
    seen: Counter[str] = Counter()
    for i, label in enumerate(labels):
        seen[label] += 1
        labels[i] = label if seen[label] == 1 else f"{label} ({seen[label]})"
    return labels


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the headline numbers."""
    final, best = run.final, run.best
    at = f"at step {final.step:,}, {final.weights}" if final else "not evaluated yet"
    tiles = [(name, number(final.metric(name), 1) if final else "n/a", at) for name in _HEADLINE]
    tiles.append(("Best AP", number(best.metric("AP"), 1) if best else "n/a", _where(best)))
    tiles.append(("Time trained", duration(sum(run.phase_seconds().values())), f"{run.steps:,} steps"))
    tiles.append(("Images seen", f"{run.images:,}", _speed(run)))
    return tiles


def _where(best: EvalLine | None) -> str:
    return f"at step {best.step:,}, {best.weights}" if best else ""


def _speed(run: Run) -> str:
    seconds = sum(run.phase_seconds().values())
    return f"{run.images / seconds:.1f} per second" if seconds > 0 else ""


def _summary(runs: Sequence[Run]) -> list[list[Cell]]:
    """A line for each run: AP, AP50, AP75, best AP, steps, images, time."""
    first = runs[0].final
    lines = []
    for run in runs:
        values = [(run.final.metric(n) if run.final else None, first.metric(n) if first else None) for n in _HEADLINE]
        cells = [Cell(number(v)) if run is runs[0] else compared(v, base) for v, base in values]
        best = Cell(number(run.best.metric("AP") if run.best else None), _where(run.best))
        time = duration(sum(run.phase_seconds().values()))
        lines.append([*cells, best, Cell(f"{run.steps:,}"), Cell(f"{run.images:,}"), Cell(time)])
    return lines


def _columns_of_one(run: Run) -> list[tuple[str, EvalLine | None]]:
    """The last evaluation of each kind of weights, and the best if it is another."""
    columns: list[tuple[str, EvalLine | None]] = [
        ("Final", max(own, key=lambda e: e.step))
        for weights in _WEIGHTS
        if (own := [e for e in run.evals if e.weights == weights])
    ]
    if run.best and all(e is not run.best for _, e in columns):
        columns.append(("Best", run.best))
    return columns or [("Final", None)]


def _accuracy_charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Markup]:
    charts = []
    for name in _HEADLINE:
        series = []
        for tone, (run, label) in enumerate(zip(runs, labels, strict=True)):
            for weights in _WEIGHTS:
                points = points_of([(e.step, e.metric(name)) for e in run.evals if e.weights == weights])
                caption = weights if len(runs) == 1 else f"{label}, {weights}"
                series.append(Series(caption, points, tone, dashed=weights == "model"))
        charts.append(line_chart(series, title=name, y_label="percent", size=_NARROW))
    return charts


def _training_charts(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, list[Markup]]:
    """Total loss and learning rate, wide, above each term and the gradient norm; without terms, all three in a row."""
    names = list(dict.fromkeys(name for run in runs for line in run.train for name in line.losses if name != "total"))
    size = _WIDE if len(names) > 1 else _NARROW
    rates = [
        Series(label, points_of([(line.step, line.lr) for line in run.train]), tone)
        for tone, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    main = [
        _curves(runs, labels, "Total loss", "loss", lambda line: line.total, size),
        line_chart(rates, title="Learning rate", y_label="rate", size=size),
    ]
    norm = _curves(runs, labels, "Gradient norm", "norm", lambda line: line.grad_norm, _NARROW)
    if len(names) <= 1:
        return {"wide": [], "narrow": [*main, norm]}
    terms = [_curves(runs, labels, name, "loss", _term(name), _NARROW) for name in names]
    watched = dict.fromkeys(name for run in runs for line in run.train for name in line.querying)
    watch = [_curves(runs, labels, name.replace("_", " "), "", _watched(name), _NARROW) for name in watched]
    return {"wide": main, "narrow": [*terms, norm, *watch]}


def _term(name: str) -> Callable[[TrainLine], float | None]:
    return lambda line: line.losses.get(name)


def _watched(name: str) -> Callable[[TrainLine], float | None]:
    return lambda line: line.querying.get(name)


def _curves(
    runs: Sequence[Run],
    labels: Sequence[str],
    title: str,
    y_label: str,
    value: Callable[[TrainLine], float | None],
    size: tuple[int, int],
) -> Markup:
    """A noisy quantity of training: what was logged, faint, and smoothed over it."""
    series = []
    for tone, (run, label) in enumerate(zip(runs, labels, strict=True)):
        raw = points_of([(line.step, value(line)) for line in run.train])
        series.append(Series(f"{label}, logged", raw, tone, faint=True))
        series.append(Series(label, smooth(raw), tone))
    return line_chart(series, title=title, y_label=y_label, size=size)


def _phases(runs: Sequence[Run]) -> dict[str, Any]:
    """Bars and rows of the mean seconds of one step; the slowest run's bar takes the whole width."""
    means = [{name: s / max(run.steps, 1) for name, s in run.phase_seconds().items()} for run in runs]
    names = dict.fromkeys(name for one in means for name in one)
    most = max(sum(one.values()) for one in means)
    bars = [stacked_bar([(name, finite(one.get(name)) or 0.0) for name in names], most) for one in means]
    return {"bars": bars, "rows": phase_rows(means)}


def _pictures(of_runs: Sequence[Sequence[Example]]) -> list[dict[str, Any]]:
    """Each named picture once: its ground truth, and each run's finding or None."""
    keyed = [_by_name(examples) for examples in of_runs]
    pictures = []
    for key in dict.fromkeys(key for examples in keyed for key in examples):
        found = [examples.get(key) for examples in keyed]
        first = next(one for one in found if one is not None)
        pictures.append(
            {
                "name": key[0],
                "truth": _thumbnail(first.image, first.truth),
                "found": [_thumbnail(one.image, one.predicted) if one else None for one in found],
            }
        )
    return pictures


def _response(run: Run) -> str | None:
    """The picture of a query's response, as a data URI."""
    return data_uri(read_picture(run.response), _RESPONSE) if run.response else None


def _by_name(examples: Sequence[Example]) -> dict[tuple[str, int], Example]:
    """Each picture under its name and which of that name it is, so that namesakes in two folders are both kept."""
    seen: Counter[str] = Counter()
    keyed = {}
    for one in examples:
        keyed[one.name, seen[one.name]] = one
        seen[one.name] += 1
    return keyed


def _thumbnail(image: Picture, instances: Sequence[LabeledMask]) -> tuple[str, int]:
    """(data URI, how many instances)."""
    return data_uri(overlay(*shrunk(image, instances, _THUMBNAIL)), _THUMBNAIL), len(instances)
