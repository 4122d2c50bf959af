"""LVIS's mask and box metrics, by hotcoco: COCO's AP under the federated rule, also for rare and frequent classes.

A detection counts as false only where its class was looked for: in images that have an instance of the class, or list
it in `neg_category_ids`. In images that list it in `not_exhaustive_category_ids`, unmatched detections do not count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import hotcoco
import numpy as np

from uniquery.data.dataset import GroundTruth, Row
from uniquery.data.lvis import FREQUENCIES, NEGATIVE, NOT_EXHAUSTIVE, class_lists, image_problems
from uniquery.errors import DataError
from uniquery.evaluation.coco import (
    AREAS,
    Array,
    Metrics,
    category_labels,
    mean_percent,
    read_detections,
    read_objects,
    select_categories,
    select_images,
)
from uniquery.evaluation.entries import AnyGroundTruth, IouType, read_ground_truth

LVIS_DETECTIONS = 300
"""How many detections per image, of all classes together, LVIS scores."""


def evaluate_lvis(
    truth: AnyGroundTruth,
    results: Sequence[Row] | Path | str,
    *,
    iou_type: IouType = "segm",
    max_detections: int = LVIS_DETECTIONS,
    image_ids: Sequence[int] | None = None,
    category_ids: Sequence[int] | None = None,
) -> Metrics:
    """LVIS's metrics of detections against ground truth; for the arguments see `evaluation.evaluate`.

    A class that is never predicted scores 0; one without ground truth is not measured.

    Raises:
        DataError: something is wrong with the ground truth or the results, or a category has no frequency.
    """
    ground_truth = select_categories(read_ground_truth(truth), category_ids)
    _check_frequencies(ground_truth)
    images = select_images(ground_truth, image_ids)
    objects = read_objects(ground_truth, iou_type, images)
    counts = Counter(one["category_id"] for one in objects if not one["iscrowd"])
    detections = read_detections(results, ground_truth, iou_type, images)
    if counts:
        run = _run(ground_truth, images, objects, detections, iou_type, max_detections)
        run.accumulate()
        assert run.eval is not None
        precision, recall = run.eval["precision"][..., -1], run.eval["recall"][..., -1]
    else:
        shape = (len(ground_truth.categories), 1 + len(AREAS))
        precision, recall = np.full((10, 101, *shape), -1.0), np.full((10, *shape), -1.0)
    labels = category_labels(ground_truth.categories)
    frequencies = np.array([row["frequency"] for row in ground_truth.categories.values()])
    return Metrics(
        values=_values(precision, recall, frequencies, max_detections),
        per_class={label: mean_percent(precision[:, :, k, 0]) for k, label in enumerate(labels.values())},
        per_class_instances={label: counts[category] for category, label in labels.items()},
        iou_type=iou_type,
        max_detections=max_detections,
        notes=_notes(ground_truth, images),
    )


def lvis_evaluation(
    truth: AnyGroundTruth, results: Sequence[Row], max_detections: int = LVIS_DETECTIONS
) -> hotcoco.COCOeval:
    """The evaluation of masks as hotcoco's own object, with which detection found which instance.

    Raises:
        DataError: something is wrong with the ground truth or the results, or a category has no frequency.
    """
    ground_truth = read_ground_truth(truth)
    _check_frequencies(ground_truth)
    images = select_images(ground_truth, None)
    objects, detections = (
        read_objects(ground_truth, "segm", images),
        read_detections(results, ground_truth, "segm", images),
    )
    return _run(ground_truth, images, objects, detections, "segm", max_detections)


def _check_frequencies(truth: GroundTruth) -> None:
    for category, row in truth.categories.items():
        if row.get("frequency") not in FREQUENCIES:
            raise DataError(
                f"{truth.source}: category {category} ({row.get('name')}) has no 'frequency' that is one of "
                f"{', '.join(FREQUENCIES)}, which LVIS metrics need: add it, or use the protocol coco."
            )


def _run(
    truth: GroundTruth,
    images: frozenset[int],
    objects: list[Row],
    detections: list[Row],
    iou_type: IouType,
    max_detections: int,
) -> hotcoco.COCOeval:
    tables = {
        "images": [_image(truth.images[i], truth) for i in sorted(images)],
        "categories": [{"id": i, "name": str(i), "frequency": c["frequency"]} for i, c in truth.categories.items()],
    }
    wanted = hotcoco.COCO({**tables, "annotations": objects})
    found = hotcoco.LVISResults(wanted, best_per_image(detections, max_detections), max_dets=-1)  # as they are
    run = hotcoco.COCOeval(wanted, found, iou_type, lvis_style=True)
    run.params.max_dets = [max_detections]
    run.evaluate()
    return run


def _image(row: Row, truth: GroundTruth) -> Row:
    for problem in image_problems(row):
        raise DataError(f"{truth.source}: image {row['id']} {problem}.")
    lists = class_lists(row)
    known = {name: [i for i in lists.get(name, []) if i in truth.categories] for name in (NEGATIVE, NOT_EXHAUSTIVE)}
    return {"id": row["id"], "height": 0, "width": 0, **known}


def best_per_image(detections: Sequence[Row], limit: int) -> list[Row]:
    """The detections with the highest scores of each image, all classes together; of equal scores the first ones.

    >>> rows = [{"image_id": 1, "score": s, "category_id": c} for c, s in enumerate([0.2, 0.9, 0.4])]
    >>> [row["category_id"] for row in best_per_image(rows, 2)]
    [1, 2]
    """
    by_image: dict[int, list[Row]] = defaultdict(list)
    for one in detections:
        by_image[one["image_id"]].append(one)
    return [one for rows in by_image.values() for one in sorted(rows, key=lambda row: -row["score"])[:limit]]


def _values(
    precision: Array, recall: Array, frequencies: np.ndarray[tuple[int], np.dtype[np.str_]], limit: int
) -> dict[str, float | None]:
    """LVIS's numbers from what was accumulated: precision (T, R, K, A) and recall (T, K, A)."""
    return {
        "AP": mean_percent(precision[..., 0]),
        "AP50": mean_percent(precision[0, ..., 0]),
        "AP75": mean_percent(precision[5, ..., 0]),
        **{f"AP{letter}": mean_percent(precision[..., a]) for a, letter in enumerate(AREAS, 1)},
        **{f"AP{letter}": mean_percent(precision[:, :, frequencies == letter, 0]) for letter in FREQUENCIES},
        f"AR@{limit}": mean_percent(recall[..., 0]),
        **{f"AR{letter}@{limit}": mean_percent(recall[..., a]) for a, letter in enumerate(AREAS, 1)},
    }


def _notes(truth: GroundTruth, images: frozenset[int]) -> tuple[str, ...]:
    if any(class_lists(truth.images[i]).get(NEGATIVE) for i in images):
        return ()
    return (
        f"no image lists classes that it has none of ('{NEGATIVE}'), so detections of classes that an image has no "
        "instance of are not counted; the protocol coco counts them as false.",
    )
