"""Panoptic quality (Kirillov et al., CVPR 2019), by hotcoco, and the segments that a model predicts on a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hotcoco
import torch
from hotcoco.panoptic import PanopticEval

from uniquery.data.augment import TestSize
from uniquery.data.batch import EvaluationSamples
from uniquery.data.dataset import Category, Dataset, GroundTruth, Row
from uniquery.errors import DataError
from uniquery.evaluation.coco import category_labels
from uniquery.evaluation.inference import Progress, category_ids_by_name, forward_passes
from uniquery.masks import rle
from uniquery.querying.contract import Segmenter

GROUPS = {"": "All", "_th": "Things", "_st": "Stuff"}
"""Ending of a metric's name → hotcoco's name of the classes that it is the mean of."""


@dataclass(frozen=True)
class PanopticMetrics:
    """Panoptic quality in percent; None where there is nothing to measure.

    Attributes:
        values: PQ, PQ_th, PQ_st, and likewise SQ (mean IoU of matched segments) and RQ (F1 score of matching).
        per_class: PQ of each class by name.
        per_class_sq: SQ likewise.
        per_class_rq: RQ likewise.
        per_class_instances: how many segments, crowd segments excluded, the ground truth has of each class.
        headline: the metric that stands for all: the best checkpoint is the one with the highest value.
    """

    values: dict[str, float | None]
    per_class: dict[str, float | None]
    per_class_sq: dict[str, float | None]
    per_class_rq: dict[str, float | None]
    per_class_instances: dict[str, int]
    headline: str = "PQ"

    @property
    def score(self) -> float | None:
        """The value of the headline metric."""
        return self.values[self.headline]


def evaluate_panoptic(truth: GroundTruth, results: Sequence[Row]) -> PanopticMetrics:
    """Panoptic quality of segments against ground truth.

    Args:
        truth: the `ground_truth()` of panoptic data, or `read_panoptic_truth`.
        results: segments as COCO results with run lengths; those of an image do not overlap.

    Raises:
        DataError: the results cannot be compared with the ground truth.
    """
    sides = [hotcoco.COCO(_tables(truth, rows)) for rows in (truth.annotations, results)]
    run = PanopticEval(*sides)
    try:
        run.evaluate()
    except ValueError as error:
        raise DataError(f"The results do not fit {truth.source}: {error}.") from None
    found = run.results()
    labels = category_labels(truth.categories)
    counts = Counter(row["category_id"] for row in truth.annotations if not row["iscrowd"])
    values = {
        f"{metric}{ending}": _percent(found[group][metric.lower()], found[group]["n"] > 0)
        for metric in ("PQ", "SQ", "RQ")
        for ending, group in GROUPS.items()
    }
    per_class = {
        metric: {label: _percent(found["per_class"][number][metric]) for number, label in labels.items()}
        for metric in ("pq", "sq", "rq")
    }
    return PanopticMetrics(
        values=values,
        per_class=per_class["pq"],
        per_class_sq=per_class["sq"],
        per_class_rq=per_class["rq"],
        per_class_instances={label: counts[number] for number, label in labels.items()},
    )


def _percent(value: float, is_measured: bool = True) -> float | None:
    """In percent; hotcoco marks what it did not measure by −1."""
    return 100 * value if is_measured and value > -1 else None


def _tables(truth: GroundTruth, rows: Sequence[Row]) -> dict[str, Any]:
    """What hotcoco reads: one annotation with run lengths for each segment."""
    annotations = [
        {
            **{key: row[key] for key in ("image_id", "category_id", "segmentation")},
            "id": number,
            "iscrowd": row.get("iscrowd", 0),
            "area": rle.area(row["segmentation"]),
            "bbox": list(rle.bounding_box(row["segmentation"])),
        }
        for number, row in enumerate(rows, start=1)
    ]
    images = [{key: row[key] for key in ("id", "height", "width")} for row in truth.images.values()]
    return {"images": images, "categories": list(truth.categories.values()), "annotations": annotations}


@torch.inference_mode()
def predict_panoptic_dataset(
    model: Segmenter[Any, Any, Any],
    data: Dataset,
    categories: Sequence[Category],
    size: TestSize,
    *,
    batch_size: int = 1,
    workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = lambda *_: None,
    on_unreadable: Callable[[str], object] | None = None,
) -> list[Row]:
    """The segments that a model predicts on a data set, as COCO results with run lengths.

    Args:
        model: what predicts.
        data: its images; with several ranks, each rank predicts every `ranks`-th image.
        categories: the model's classes, by label.
        size: how images are resized.
        batch_size: images of one forward pass.
        workers: processes that load images.
        rank: this process.
        ranks: how many processes share the images.
        progress: called with how many images are done, and how many there are.
        on_unreadable: called with a sentence for each image that cannot be read, which then has no results; None
            raises a DataError instead.
    """
    samples = EvaluationSamples(data, size.short, size.longest, rank, ranks, skip_unreadable=on_unreadable is not None)
    category_ids = category_ids_by_name([category.name for category in categories], data)
    is_thing = [bool(category.is_thing) for category in categories]
    rows: list[Row] = []
    passes = forward_passes(
        model,
        samples,
        batch_size=batch_size,
        workers=workers,
        progress=progress,
        on_unreadable=on_unreadable or (lambda _: None),
    )
    for batch, outputs in passes:
        predicted = model.predict_panoptic(outputs, batch.original_sizes, is_thing)
        for target, unreadable, segments in zip(batch.targets, batch.unreadable, predicted, strict=True):
            if not unreadable:
                rows += segments.to_coco(target.image_id, category_ids)
    return rows
