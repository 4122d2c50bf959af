"""Mask AP at several mask thresholds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from uniquery.data.augment import TestSize
from uniquery.data.dataset import Dataset
from uniquery.evaluation.coco import Backend, Metrics
from uniquery.evaluation.inference import Progress, predict_dataset
from uniquery.evaluation.protocol import Protocol, evaluate
from uniquery.querying.contract import Segmenter

MASK_THRESHOLDS = (0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7)


def sweep_mask_thresholds(
    model: Segmenter[Any, Any, Any],
    data: Dataset,
    classes: Sequence[str],
    size: TestSize,
    *,
    mask_thresholds: Sequence[float] = MASK_THRESHOLDS,
    max_detections: int | None = None,
    backend: Backend = "hotcoco",
    protocol: Protocol | None = None,
    workers: int = 0,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] | None = None,
) -> dict[float, Metrics]:
    """Mask metrics by mask threshold, from one pass over the data; see `predict_dataset` and `evaluate`."""
    results = predict_dataset(
        model,
        data,
        classes,
        size,
        mask_thresholds=mask_thresholds,
        workers=workers,
        progress=progress,
        on_unreadable=on_unreadable,
    )
    truth = data.ground_truth()
    return {
        threshold: evaluate(
            truth, results[threshold], max_detections=max_detections, backend=backend, protocol=protocol
        )
        for threshold in mask_thresholds
    }
