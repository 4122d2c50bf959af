"""One html page about one run, or about several beside each other: self-contained, without scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from uniquery.evaluation.errors import INSTANCE_KINDS
from uniquery.files import make_folder, write_atomically
from uniquery.report.charts import NUM_COLORS, Series, line_chart, stacked_bar
from uniquery.report.drawings import LabeledMask, data_uri, downscale, overlay, read_png
from uniquery.report.runs import RunRecord
from uniquery.report.scales import as_points, smooth
from uniquery.report.tables import (
    Cell,
    class_rows,
    compare,
    diagnosis_rows,
    duration,
    headline,
    headline_metrics,
    metric_rows,
    number,
    phase_rows,
    text_rows,
)
from uniquery.report.text_labels import Picture
from uniquery.training.log import EvalLine, TrainLine, Weights, finite
from uniquery.weights.model_file import SCORE_THRESHOLD

_THUMBNAIL, _RESPONSE = 360, 900  # longer side in pixels
_WIDE, _NARROW = (520, 270), (340, 210)
_WEIGHTS: tuple[Weights, ...] = ("ema", "model")


@dataclass(frozen=True)
class Example:
    """An image of the page: (H, W, 3) uint8, with ground truth and the predictions of a run."""

    name: str
    image: Picture
    truth: Sequence[LabeledMask]
    predicted: Sequence[LabeledMask]


def render(
    runs_with_examples: Sequence[tuple[RunRecord, Sequence[Example]]],
    title: str,
    *,
    intro: str = "",
    analysis: Mapping[str, Sequence[Any]] | None = None,
) -> str:
    """The page as html. Several runs share their charts, and numbers are compared with those of the first run.

    Args:
        runs_with_examples: each run with its images; images of the same name stand beside each other.
        title: the heading.
        intro: a paragraph below it.
        analysis: what `build_report` found in the predictions, for the template of that name.

    Raises:
        ValueError: there is no run.
    """
    if not runs_with_examples:
        raise ValueError("a report needs at least one run")
    runs = [run for run, _ in runs_with_examples]
    labels = run_labels(runs)
    compare_runs = len(runs) > 1
    finals = [run.final for run in runs]
    columns = list(zip(labels, finals, strict=True)) if compare_runs else _evaluation_columns(runs[0])
    metrics = headline_metrics(finals)
    rows = metric_rows([line for _, line in columns], compare_runs)
    recalls = [row for row in rows if row.name.startswith("AR")]
    return page_template("report.html.j2").render(
        title=title,
        intro=intro,
        analysis=analysis or {name: [] for name in ("verdicts", "different", "errors", "scores")},
        error_columns=[(kind, meaning) for kind, meaning in INSTANCE_KINDS.items()],
        labels=labels,
        folders=[str(run.folder) for run in runs],
        num_colors=NUM_COLORS,
        headline=headline(finals),
        tiles=[] if compare_runs else _tiles(runs[0], metrics),
        summary_columns=[*metrics, f"Best {headline(finals)}", "Steps", "Images", "Training time"],
        summary=_summary(runs, metrics) if compare_runs else [],
        accuracy=_accuracy_charts(runs, labels, metrics),
        metric_columns=[(heading, [f"step {line.step:,}", line.weights] if line else []) for heading, line in columns],
        metric_tables=[[row for row in rows if row not in recalls], recalls],
        classes=class_rows([run.best or run.final for run in runs], compare_runs),  # whose predictions are drawn
        min_score=SCORE_THRESHOLD,
        training=_training_charts(runs, labels),
        images=_images([examples for _, examples in runs_with_examples]),
        diagnosis=diagnosis_rows([run.diagnosis for run in runs]) if any(run.diagnosis for run in runs) else [],
        responses=[_response(run) for run in runs],
        phases=_phases(runs),
        environment=text_rows([run.environment for run in runs]),
        config_differences=[row for row in text_rows([run.config for run in runs]) if row.differs],
        configs=[run.config_text for run in runs],
    )


def page_template(name: str) -> Template:
    """A template of this folder; they share a style sheet."""
    loader = PackageLoader("uniquery.report", package_path="")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


def write_report(path: Path, html: str) -> None:
    """Writes the page atomically: a reader sees the old page or the new one, never half of it.

    Raises:
        UserError: the file cannot be written.
    """
    make_folder(path.parent)
    # A broken file name may contain half a surrogate pair, which utf-8 cannot encode.
    write_atomically(path, html.encode("utf-8", errors="replace"))


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run: that of its folder, or the whole path if several folders have the same name."""
    names = Counter(run.name for run in runs)
    labels = [run.name if names[run.name] == 1 else str(run.folder) for run in runs]
    counts: Counter[str] = Counter()
    for i, label in enumerate(labels):
        counts[label] += 1
        labels[i] = label if counts[label] == 1 else f"{label} ({counts[label]})"
    return labels


def _tiles(run: RunRecord, metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the most important numbers."""
    final, best, name = run.final, run.best, metrics[0]
    at = _at_step(final) or "not evaluated yet"
    tiles = [(metric, number(final.metric(metric), 1) if final else "n/a", at) for metric in metrics]
    tiles.append((f"Best {name}", number(best.metric(name), 1) if best else "n/a", _at_step(best)))
    tiles.append(("Training time", duration(sum(run.phase_seconds().values())), f"{run.steps:,} steps"))
    tiles.append(("Images seen", f"{run.images:,}", _speed(run)))
    return tiles


def _at_step(line: EvalLine | None) -> str:
    return f"at step {line.step:,}, {line.weights}" if line else ""


def _speed(run: RunRecord) -> str:
    seconds = sum(run.phase_seconds().values())
    return f"{run.images / seconds:.1f} per second" if seconds > 0 else ""


def _summary(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[list[Cell]]:
    """A line for each run: its metrics, best result, steps, images, time."""
    first = runs[0].final
    lines = []
    for run in runs:
        values = [(run.final.metric(n) if run.final else None, first.metric(n) if first else None) for n in metrics]
        cells = [Cell(number(value)) if run is runs[0] else compare(value, base) for value, base in values]
        best = Cell(number(run.best.metric(metrics[0]) if run.best else None), _at_step(run.best))
        time = duration(sum(run.phase_seconds().values()))
        lines.append([*cells, best, Cell(f"{run.steps:,}"), Cell(f"{run.images:,}"), Cell(time)])
    return lines


def _evaluation_columns(run: RunRecord) -> list[tuple[str, EvalLine | None]]:
    """The last evaluation of each kind of weights, and the best if it is another."""
    columns: list[tuple[str, EvalLine | None]] = [
        ("Final", max(lines, key=lambda line: line.step))
        for weights in _WEIGHTS
        if (lines := [line for line in run.evals if line.weights == weights])
    ]
    if run.best and all(line is not run.best for _, line in columns):
        columns.append(("Best", run.best))
    return columns or [("Final", None)]


def _accuracy_charts(runs: Sequence[RunRecord], labels: Sequence[str], metrics: Sequence[str]) -> list[Markup]:
    charts = []
    for name in metrics:
        series = []
        for color, (run, label) in enumerate(zip(runs, labels, strict=True)):
            for weights in _WEIGHTS:
                points = as_points([(line.step, line.metric(name)) for line in run.evals if line.weights == weights])
                caption = weights if len(runs) == 1 else f"{label}, {weights}"
                series.append(Series(caption, points, color, dashed=weights == "model"))
        charts.append(line_chart(series, title=name, y_label="percent", size=_NARROW))
    return charts


def _training_charts(runs: Sequence[RunRecord], labels: Sequence[str]) -> dict[str, list[Markup]]:
    """Total loss and learning rate, wide, above each loss and the gradient norm; with one loss, all three in a row."""
    names = list(dict.fromkeys(name for run in runs for line in run.train for name in line.losses if name != "total"))
    size = _WIDE if len(names) > 1 else _NARROW
    rates = [
        Series(label, as_points([(line.step, line.lr) for line in run.train]), color)
        for color, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    main = [
        _smoothed_chart(runs, labels, "Total loss", "loss", lambda line: line.total, size),
        line_chart(rates, title="Learning rate", y_label="rate", size=size),
    ]
    norm = _smoothed_chart(runs, labels, "Gradient norm", "norm", lambda line: line.grad_norm, _NARROW)
    if len(names) <= 1:
        return {"wide": [], "narrow": [*main, norm]}
    losses = [_smoothed_chart(runs, labels, name, "loss", _loss(name), _NARROW) for name in names]
    statistics = [
        _smoothed_chart(runs, labels, name.replace("_", " "), "", _querying_statistic(name), _NARROW)
        for name in dict.fromkeys(name for run in runs for line in run.train for name in line.querying)
    ]
    return {"wide": main, "narrow": [*losses, norm, *statistics]}


def _loss(name: str) -> Callable[[TrainLine], float | None]:
    return lambda line: line.losses.get(name)


def _querying_statistic(name: str) -> Callable[[TrainLine], float | None]:
    return lambda line: line.querying.get(name)


def _smoothed_chart(
    runs: Sequence[RunRecord],
    labels: Sequence[str],
    title: str,
    y_label: str,
    value: Callable[[TrainLine], float | None],
    size: tuple[int, int],
) -> Markup:
    """A noisy quantity of training: the logged values, pale, and a smoothed curve over them."""
    series = []
    for color, (run, label) in enumerate(zip(runs, labels, strict=True)):
        logged = as_points([(line.step, value(line)) for line in run.train])
        series.append(Series(f"{label}, logged", logged, color, background=True))
        series.append(Series(label, smooth(logged), color))
    return line_chart(series, title=title, y_label=y_label, size=size)


def _phases(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Bars and rows of the mean seconds of one step; the bar of the slowest run has the full width."""
    means = [{name: s / max(run.steps, 1) for name, s in run.phase_seconds().items()} for run in runs]
    names = dict.fromkeys(name for mean in means for name in mean)
    maximum = max(sum(mean.values()) for mean in means)
    bars = [stacked_bar([(name, finite(mean.get(name)) or 0.0) for name in names], maximum) for mean in means]
    return {"bars": bars, "rows": phase_rows(means)}


def _images(examples_by_run: Sequence[Sequence[Example]]) -> list[dict[str, Any]]:
    """Each named image once: its ground truth, and the predictions of each run or None."""
    keyed = [_by_name(examples) for examples in examples_by_run]
    images = []
    for key in dict.fromkeys(key for examples in keyed for key in examples):
        matching = [examples.get(key) for examples in keyed]
        first = next(example for example in matching if example is not None)
        images.append(
            {
                "name": key[0],
                "truth": _thumbnail(first.image, first.truth),
                "predictions": [_thumbnail(e.image, e.predicted) if e else None for e in matching],
            }
        )
    return images


def _response(run: RunRecord) -> str | None:
    """The picture of a query's response, as a data URI."""
    return data_uri(read_png(run.response), _RESPONSE) if run.response else None


def _by_name(examples: Sequence[Example]) -> dict[tuple[str, int], Example]:
    """(name, how many of that name came before) → example, so that equal names of two folders are both kept."""
    counts: Counter[str] = Counter()
    keyed = {}
    for example in examples:
        keyed[example.name, counts[example.name]] = example
        counts[example.name] += 1
    return keyed


def _thumbnail(image: Picture, masks: Sequence[LabeledMask]) -> tuple[str, int]:
    """(data URI, number of masks)."""
    return data_uri(overlay(*downscale(image, masks, _THUMBNAIL)), _THUMBNAIL), len(masks)
