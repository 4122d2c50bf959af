"""Finds the thresholds of a model on validation data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from uniquery.data.augment import TestSize
from uniquery.data.dataset import Dataset
from uniquery.evaluation.coco import Metrics
from uniquery.evaluation.inference import Progress, category_ids_by_name, predict_dataset
from uniquery.evaluation.operating_points import (
    OperatingPoint,
    Rule,
    ScoredDetections,
    choose_threshold,
    read_scores,
)
from uniquery.evaluation.protocol import Protocol, evaluate
from uniquery.evaluation.sweep import MASK_THRESHOLDS
from uniquery.evaluation.tables import format_percent
from uniquery.querying.contract import Segmenter
from uniquery.weights.model_file import Thresholds


@dataclass(frozen=True)
class ChosenThresholds:
    """The thresholds of a model, and what they lead to.

    Attributes:
        thresholds: what the model file stores.
        points: by class name, precision and recall at the class's threshold.
        sweep: metrics by mask threshold.
        problems: names of the classes for which the rule could not be followed, by what was done instead.
    """

    thresholds: Thresholds
    points: dict[str, OperatingPoint]
    sweep: dict[float, Metrics]
    problems: dict[str, list[str]]


def choose_thresholds(
    model: Segmenter[Any, Any, Any],
    data: Dataset,
    classes: Sequence[str],
    size: TestSize,
    rule: Rule,
    *,
    mask_thresholds: Sequence[float] = MASK_THRESHOLDS,
    max_detections: int | None = None,
    protocol: Protocol | None = None,
    workers: int = 0,
    progress: Progress = lambda *_: None,
) -> ChosenThresholds:
    """The mask threshold with the best mask AP, and with it a score threshold for each class of the model.

    From one pass over the data; see `predict_dataset` and `evaluate`. Of equal mask thresholds, the one closest to 0.5
    is taken.
    """
    results = predict_dataset(
        model, data, classes, size, mask_thresholds=mask_thresholds, workers=workers, progress=progress
    )
    truth = data.ground_truth()
    sweep = {t: evaluate(truth, results[t], max_detections=max_detections, protocol=protocol) for t in mask_thresholds}
    mask = max(mask_thresholds, key=lambda t: (sweep[t].score or 0.0, -abs(t - 0.5)))
    detections = read_scores(truth, results[mask], max_detections).classes
    empty = ScoredDetections(np.empty(0), np.empty(0, dtype=bool), 0)
    points: dict[str, OperatingPoint] = {}
    problems: dict[str, list[str]] = {}
    for name, category_id in zip(classes, category_ids_by_name(classes, data), strict=True):
        of_class = empty if category_id is None else detections[category_id]
        chosen = choose_threshold(of_class, rule)
        points[name] = chosen.point
        if chosen.problem:
            problems.setdefault(chosen.problem, []).append(name)
    scores = tuple(point.threshold for point in points.values())
    return ChosenThresholds(Thresholds(scores, mask, str(rule)), points, sweep, problems)


def thresholds_table(points: dict[str, OperatingPoint]) -> Table:
    """A row for each class."""
    table = Table("class", "instances", "score ≥", "precision", "recall", "F1")
    for name, point in points.items():
        shares = (None if value is None else 100 * value for value in (point.precision, point.recall, point.f1))
        table.add_row(
            name, str(point.instances), f"{point.threshold:.3f}", *(format_percent(share, 1) for share in shares)
        )
    return table
