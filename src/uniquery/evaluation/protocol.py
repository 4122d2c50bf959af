"""Metrics by the rules of the data: COCO's, or LVIS's where the classes have frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from uniquery.data.dataset import Row
from uniquery.data.lvis import has_frequencies
from uniquery.errors import UserError
from uniquery.evaluation import coco
from uniquery.evaluation.coco import COCO_DETECTIONS, Backend, Metrics, check_choice
from uniquery.evaluation.entries import AnyGroundTruth, IouType, read_ground_truth
from uniquery.evaluation.lvis import LVIS_DETECTIONS, evaluate_lvis

Protocol = Literal["coco", "lvis"]
DETECTIONS: dict[Protocol, int] = {"coco": COCO_DETECTIONS, "lvis": LVIS_DETECTIONS}
"""How many detections a protocol scores: COCO per image and class, LVIS per image."""


def choose_protocol(truth: AnyGroundTruth, protocol: Protocol | None = None) -> Protocol:
    """The given protocol; by default LVIS if every category has a frequency, else COCO.

    >>> choose_protocol({"images": [], "categories": [{"id": 1, "frequency": "r"}], "annotations": []})
    'lvis'
    """
    if protocol is not None:
        check_choice("protocol", protocol, get_args(Protocol))
        return protocol
    categories = read_ground_truth(truth).categories
    return "lvis" if categories and has_frequencies(categories.values()) else "coco"


def evaluate(
    truth: AnyGroundTruth,
    results: Sequence[Row] | Path | str,
    *,
    iou_type: IouType = "segm",
    max_detections: int | None = None,
    backend: Backend = "hotcoco",
    protocol: Protocol | None = None,
    image_ids: Sequence[int] | None = None,
    category_ids: Sequence[int] | None = None,
) -> Metrics:
    """Metrics of detections against ground truth; nothing given is changed.

    Args:
        truth: the `ground_truth()` of a data set, a COCO or LVIS dictionary or its file.
        results: COCO results, or their file.
        iou_type: what is compared, masks or boxes; boxes come from the masks where the results hold none.
        max_detections: how many detections are scored, best first: per image and category by COCO's rules, where it is
            100 by default, and per image by LVIS's, where it is 300.
        backend: what computes COCO's numbers; LVIS's always come from hotcoco.
        protocol: whose rules; by default LVIS's if every category has a `frequency`, else COCO's.
        image_ids: the images to score; all by default.
        category_ids: the classes to score; all by default.

    Raises:
        DataError: something is wrong with the ground truth or the results.
        UserError: the backend is not installed, or an argument is out of its range.
    """
    ground_truth = read_ground_truth(truth)
    chosen = choose_protocol(ground_truth, protocol)
    limit = DETECTIONS[chosen] if max_detections is None else max_detections
    if chosen == "lvis":
        check_choice("iou_type", iou_type, ("segm", "bbox"))
        if backend != "hotcoco":
            raise UserError(f"LVIS metrics need the backend hotcoco, not {backend}; or use the protocol coco.")
        if limit < 1:
            raise UserError(f"max_detections is {limit} and must be at least 1.")
        return evaluate_lvis(
            ground_truth,
            results,
            iou_type=iou_type,
            max_detections=limit,
            image_ids=image_ids,
            category_ids=category_ids,
        )
    return coco.evaluate(
        ground_truth,
        results,
        iou_type=iou_type,
        max_detections=limit,
        backend=backend,
        image_ids=image_ids,
        category_ids=category_ids,
    )
