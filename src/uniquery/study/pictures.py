"""The images on which a variant differs most from its control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uniquery.evaluation.error_summary import results_by_image
from uniquery.report.differences import differing_images
from uniquery.study.plan import PlannedRun
from uniquery.study.results import Row, final_predictions, validation_data

IMAGES_PER_VARIANT = 2


def variant_pictures(rows: Sequence[Row], runs: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """For each variant, the images whose score changed most against the control, with the first shared seed."""
    by_key = {(run.data, run.variant, run.seed): run for run in runs}
    pictures: list[dict[str, Any]] = []
    for row in rows:
        if row.difference is None or row.control is None:
            continue
        pair = [by_key.get((row.data, name, row.difference.seeds[0])) for name in (row.control, row.variant)]
        predictions = [final_predictions(run) for run in pair]
        if pair[1] is None or predictions[0] is None or predictions[1] is None:
            continue
        data = validation_data(pair[1])
        sides = [results_by_image(results, data.ground_truth()) for results in predictions if results is not None]
        pictures += differing_images(data, sides, (row.control, row.variant), IMAGES_PER_VARIANT)
    return pictures
