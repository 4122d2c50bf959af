"""The images on which a variant differs most from its control."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from uniquery.data.coco import CocoData
from uniquery.evaluation.compare import image_score
from uniquery.report.drawings import LabeledMask, data_uri, downscale, overlay
from uniquery.study.plan import PlannedRun
from uniquery.study.results import Row, final_predictions, validation_data

IMAGES_PER_VARIANT = 2
MIN_SCORE = 0.5  # of a prediction that counts and is drawn
_SIDE = 300


def differing_images(rows: Sequence[Row], runs: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """For each variant, the images whose score changed most against the control, with the first shared seed."""
    by_key = {(run.data, run.variant, run.seed): run for run in runs}
    pictures: list[dict[str, Any]] = []
    for row in rows:
        if row.difference is None:
            continue
        pair = [by_key.get((row.data, name, row.difference.seeds[0])) for name in (row.control, row.variant)]
        predictions = [final_predictions(run) for run in pair]
        if pair[1] is None or predictions[0] is None or predictions[1] is None:
            continue
        pictures += _pictures(
            row, validation_data(pair[1]), [_by_image(results) for results in predictions if results is not None]
        )
    return pictures


def _pictures(row: Row, data: CocoData, sides: Sequence[dict[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    labels = {category.id: label for label, category in enumerate(data.categories)}
    changes = []
    for index in range(len(data)):
        instances, image_id = data.instances(index), int(data.image_ids[index])
        found = [[(labels[r["category_id"]], r["segmentation"]) for r in side[image_id]] for side in sides]
        control, variant = (image_score(instances, predicted) for predicted in found)
        changes.append(variant - control)
    order = np.argsort(-np.abs(changes), kind="stable")[:IMAGES_PER_VARIANT]
    return [_picture(row, data, int(index), changes[index], sides) for index in order if changes[index]]


def _picture(
    row: Row, data: CocoData, index: int, change: float, sides: Sequence[dict[int, list[dict[str, Any]]]]
) -> dict[str, Any]:
    names = {category.id: category.name for category in data.categories}
    image, image_id = data.read(index), int(data.image_ids[index])
    truth = [LabeledMask(mask, data.classes[label]) for label, mask in data.instances(index)]
    drawn = [
        [LabeledMask(r["segmentation"], names[r["category_id"]], r["score"]) for r in side[image_id]] for side in sides
    ]
    captions = ("ground truth", row.control, row.variant)
    return {
        "name": data.path(index).name,
        "note": f"{row.variant}: image score {change:+.2f} against {row.control}",
        "images": [
            (data_uri(overlay(*downscale(image, masks, _SIDE)), _SIDE), caption)
            for masks, caption in zip((truth, *drawn), captions, strict=True)
        ],
    }


def _by_image(results: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    grouped: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        if result["score"] >= MIN_SCORE:
            grouped[result["image_id"]].append(result)
    return grouped
