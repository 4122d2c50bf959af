"""Metrics as tables for the console."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from uniquery.evaluation.coco import IOU_TYPES, Metrics, describe_metric
from uniquery.evaluation.panoptic import GROUPS, PanopticMetrics


def table(*metrics: Metrics) -> Table:
    """A row for each number, a column for each of the metrics."""
    summary = Table("", "", *(IOU_TYPES[one.iou_type] for one in metrics))
    for name in dict.fromkeys(name for one in metrics for name in one.values):
        summary.add_row(name, describe_metric(name), *(format_percent(one.values.get(name)) for one in metrics))
    return summary


def class_table(*metrics: Metrics) -> Table:
    """A row for each class: its instances, and its AP by each of the metrics."""
    classes = Table("class", "instances", *(f"{IOU_TYPES[one.iou_type]} {one.headline}" for one in metrics))
    counts = {name: count for one in metrics for name, count in one.per_class_instances.items()}
    for name, count in counts.items():
        classes.add_row(name, str(count), *(format_percent(one.per_class.get(name)) for one in metrics))
    return classes


def panoptic_table(metrics: PanopticMetrics) -> Table:
    """A row for all classes, for things and for stuff."""
    names = ("PQ", "SQ", "RQ")
    table = Table("classes", *names)
    for ending, group in GROUPS.items():
        table.add_row(group.lower(), *(format_percent(metrics.values[name + ending]) for name in names))
    return table


def panoptic_class_table(metrics: PanopticMetrics) -> Table:
    """A row for each class: its segments, and its PQ, SQ and RQ."""
    table = Table("class", "segments", "PQ", "SQ", "RQ")
    columns = (metrics.per_class, metrics.per_class_sq, metrics.per_class_rq)
    for name, count in metrics.per_class_instances.items():
        table.add_row(name, str(count), *(format_percent(column[name]) for column in columns))
    return table


def sweep_table(sweep: Mapping[float, Metrics]) -> Table:
    """A row for each mask threshold, the best in bold."""
    best = max(sweep, key=lambda threshold: sweep[threshold].score or 0)
    headline = sweep[best].headline
    names = [name for name in sweep[best].values if name.startswith(headline)]
    out = Table("mask threshold", *names, title=f"mask {headline} at several mask thresholds")
    for threshold, metrics in sweep.items():
        cells = [format_percent(metrics.values[name], 1) for name in names]
        out.add_row(f"{threshold}", *cells, style="bold" if threshold == best else None)
    return out


def format_percent(value: float | None, digits: int = 2) -> str:
    """A metric in percent, or n/a.

    >>> format_percent(36.2), format_percent(None)
    ('36.20', 'n/a')
    """
    return "n/a" if value is None else f"{value:.{digits}f}"
