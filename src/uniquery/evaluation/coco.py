"""COCO's mask and box metrics: hotcoco by default, pycocotools as the reference.

Letters: T IoU thresholds 0.50 to 0.95, R recall points, K categories, A areas (all, small, medium, large), M limits of
detections per image and category.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import hotcoco
import numpy as np
import numpy.typing as npt

from uniquery.data.dataset import GroundTruth, Row
from uniquery.errors import DataError, UserError, did_you_mean
from uniquery.evaluation.entries import (
    AnyGroundTruth,
    IouType,
    area_of,
    check_annotations,
    check_results,
    read_ground_truth,
    read_results,
)

Backend = Literal["hotcoco", "pycocotools"]
Array = npt.NDArray[np.float64]

COCO_DETECTIONS = 100
"""How many detections per image and category COCO scores."""
METRIC_DESCRIPTIONS = {
    "AP": "mean over IoU 0.50 to 0.95",
    "AP50": "IoU ≥ 0.50",
    "AP75": "IoU ≥ 0.75",
    "APs": "small, < 32² pixels",
    "APm": "medium, 32² to 96²",
    "APl": "large, > 96²",
    "AR1": "best 1 per image and class",
    "AR10": "best 10 per image and class",
    "AR100": "best 100 per image and class",
    "ARs": "small, < 32² pixels",
    "ARm": "medium, 32² to 96²",
    "ARl": "large, > 96²",
    "APr": "rare classes, in 1 to 10 training images",
    "APc": "common classes, in 11 to 100",
    "APf": "frequent classes, in more than 100",
}
"""COCO's twelve metrics, in their usual order, and what they are; then those that LVIS adds."""
PANOPTIC_DESCRIPTIONS = {
    "PQ": "panoptic quality, SQ × RQ per class",
    "PQ_th": "PQ of things",
    "PQ_st": "PQ of stuff",
    "SQ": "mean IoU of matched segments",
    "SQ_th": "SQ of things",
    "SQ_st": "SQ of stuff",
    "RQ": "F1 score of matching, IoU > 0.5",
    "RQ_th": "RQ of things",
    "RQ_st": "RQ of stuff",
}
"""The metrics of panoptic segments, in their order, and what they are."""
SUMMARY_METRICS = {"AP": ("AP", "AP50", "AP75")}
"""Headline metric → the few metrics that a short summary shows, the headline first."""

AREAS = ("s", "m", "l")
"""Letters of the size ranges, after all sizes together."""
IOU_TYPES = {"segm": "mask", "bbox": "box"}
"""What is compared → its name."""


@dataclass(frozen=True)
class Metrics:
    """COCO's numbers in percent; None where there is nothing to measure.

    Attributes:
        values: AP, AP50, AP75, APs, APm, APl, AR1, AR10, AR<max_detections>, ARs, ARm, ARl. AR1 and AR10 are there
            only when the limit is larger, so that no name promises more detections than were scored.
        per_class: AP of each class by name, or by "name (id)" where classes share a name.
        per_class_instances: how many instances, crowd regions excluded, the ground truth has of each class.
        iou_type: "segm" for masks, "bbox" for boxes.
        max_detections: how many detections per image and category were scored.
        notes: what a reader of the numbers should know, as sentences.
        headline: the metric that stands for all: the best checkpoint is the one with the highest value.
    """

    values: dict[str, float | None]
    per_class: dict[str, float | None]
    per_class_instances: dict[str, int]
    iou_type: IouType
    max_detections: int
    notes: tuple[str, ...] = ()
    headline: str = "AP"

    @property
    def score(self) -> float | None:
        """The value of the headline metric."""
        return self.values[self.headline]


def evaluate(
    truth: AnyGroundTruth,
    results: Sequence[Row] | Path | str,
    *,
    iou_type: IouType = "segm",
    max_detections: int = COCO_DETECTIONS,
    backend: Backend = "hotcoco",
    image_ids: Sequence[int] | None = None,
    category_ids: Sequence[int] | None = None,
) -> Metrics:
    """COCO's metrics of detections against ground truth; nothing given is changed.

    The size of a detection (for APs, APm, APl) is its mask's area for masks and its box's for boxes, as in COCO's two
    result formats, whether or not an entry holds both.

    Args:
        truth: the `ground_truth()` of a data set, a COCO dictionary or its file.
        results: COCO results, or their file.
        iou_type: what is compared, masks or boxes; boxes come from the masks where the results hold none.
        max_detections: how many detections per image and category are scored, best first. COCO's own limit is 100.
        backend: what computes the numbers.
        image_ids: the images to score; all by default.
        category_ids: the classes to score; all by default.

    Raises:
        DataError: something is wrong with the ground truth or the results.
        UserError: the backend is not installed, or an argument is out of its range.

    >>> box = {"image_id": 7, "category_id": 0, "bbox": [0, 0, 9, 9]}
    >>> truth = {"images": [{"id": 7}], "categories": [{"id": 0, "name": "cell"}], "annotations": [box]}
    >>> round(evaluate(truth, [{**box, "score": 0.5}], iou_type="bbox").values["AP"], 6)
    100.0
    """
    check_choice("iou_type", iou_type, IOU_TYPES)
    check_choice("backend", backend, _BACKENDS)
    if max_detections < 1:
        raise UserError(f"max_detections is {max_detections} and must be at least 1.")
    ground_truth = select_categories(read_ground_truth(truth), category_ids)
    images = select_images(ground_truth, image_ids)
    objects, detections = (
        read_objects(ground_truth, iou_type, images),
        read_detections(results, ground_truth, iou_type, images),
    )
    limits = _limits(max_detections)
    counts = Counter(one["category_id"] for one in objects if not one["iscrowd"])
    if counts:
        tables = _tables(ground_truth, images, objects), _tables(ground_truth, images, detections)
        precision, recall = _BACKENDS[backend](*tables, iou_type, limits)
    else:
        shape = (len(ground_truth.categories), 1 + len(AREAS), len(limits))
        precision, recall = np.full((10, 101, *shape), -1.0), np.full((10, *shape), -1.0)
    labels = category_labels(ground_truth.categories)
    return Metrics(
        values=_values(precision, recall, limits),
        per_class={label: mean_percent(precision[:, :, k, 0, -1]) for k, label in enumerate(labels.values())},
        per_class_instances={label: counts[category] for category, label in labels.items()},
        iou_type=iou_type,
        max_detections=max_detections,
        notes=_notes(objects, max_detections),
    )


def hotcoco_evaluation(
    truth: AnyGroundTruth, results: Sequence[Row], max_detections: int = COCO_DETECTIONS
) -> hotcoco.COCOeval:
    """The evaluation of masks as hotcoco's own object, with which detection found which instance.

    Raises:
        DataError: something is wrong with the ground truth or the results.
    """
    ground_truth = read_ground_truth(truth)
    images = select_images(ground_truth, None)
    objects, detections = (
        read_objects(ground_truth, "segm", images),
        read_detections(results, ground_truth, "segm", images),
    )
    tables = _tables(ground_truth, images, objects), _tables(ground_truth, images, detections)
    return _run_hotcoco(*tables, "segm", _limits(max_detections))


def _limits(max_detections: int) -> list[int]:
    return [limit for limit in (1, 10) if limit < max_detections] + [max_detections]


def read_objects(truth: GroundTruth, iou_type: IouType, images: frozenset[int]) -> list[Row]:
    """The annotations of these images, checked, and numbered from 1."""
    return [{**one, "id": n} for n, one in enumerate(check_annotations(truth, iou_type, images), 1)]


def select_categories(truth: GroundTruth, category_ids: Sequence[int] | None) -> GroundTruth:
    """The ground truth of some classes; None: of all."""
    if category_ids is None:
        return truth
    selected = set(category_ids)
    categories = {i: row for i, row in truth.categories.items() if i in selected}
    annotations = [a for a in truth.annotations if a.get("category_id") in categories]
    return replace(truth, categories=categories, annotations=annotations)


def select_images(truth: GroundTruth, image_ids: Sequence[int] | None) -> frozenset[int]:
    """The ids of the images to score; None: of all.

    Raises:
        DataError: an id is unknown.
    """
    if image_ids is None:
        return frozenset(truth.images)
    unknown = [i for i in image_ids if i not in truth.images]
    if unknown:
        raise DataError(f"{truth.source} has no image with the id {unknown[0]!r}, which is to be scored.")
    return frozenset(image_ids)


def read_detections(
    results: Sequence[Row] | Path | str, truth: GroundTruth, iou_type: IouType, images: frozenset[int]
) -> list[Row]:
    """The detections on these images, checked, and numbered from 1."""
    if isinstance(results, Path | str):
        entries: Sequence[Row] = read_results(results)
        source = str(results)
    else:
        entries, source = results, "the results"
    return [
        {**one, "id": n, "area": area_of(one), "iscrowd": 0}
        for n, one in enumerate(check_results(entries, truth, iou_type, source), 1)
        if one["image_id"] in images
    ]


def _tables(truth: GroundTruth, images: frozenset[int], annotations: list[Row]) -> dict[str, Any]:
    """What both backends read; masks are run lengths with their own size, so that of the images does not matter.

    The annotations are numbered from 1: to pycocotools, a match with id 0 is no match.
    """
    return {
        "images": [{"id": i, "height": 0, "width": 0} for i in sorted(images)],
        "categories": [{"id": i, "name": str(i)} for i in truth.categories],
        "annotations": annotations,
    }


def _with_hotcoco(
    truth: dict[str, Any], detections: dict[str, Any], iou_type: IouType, limits: list[int]
) -> tuple[Array, Array]:
    run = _run_hotcoco(truth, detections, iou_type, limits)
    run.accumulate()
    assert run.eval is not None
    return run.eval["precision"], run.eval["recall"]


def _run_hotcoco(
    truth: dict[str, Any], detections: dict[str, Any], iou_type: IouType, limits: list[int]
) -> hotcoco.COCOeval:
    run = hotcoco.COCOeval(hotcoco.COCO(truth), hotcoco.COCO(detections), iou_type)
    run.params.max_dets = limits
    run.evaluate()
    return run


def _with_pycocotools(
    truth: dict[str, Any], detections: dict[str, Any], iou_type: IouType, limits: list[int]
) -> tuple[Array, Array]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise UserError("The backend pycocotools is missing: pip install 'uniquery[pycocotools]'.") from error
    with contextlib.redirect_stdout(io.StringIO()):
        sides = COCO(), COCO()
        for side, tables in zip(sides, (truth, detections), strict=True):
            side.dataset = tables
            side.createIndex()
        run = COCOeval(*sides, iou_type)
        run.params.maxDets = limits
        run.evaluate()
        run.accumulate()
    return run.eval["precision"], run.eval["recall"]


_BACKENDS: dict[str, Callable[[dict[str, Any], dict[str, Any], IouType, list[int]], tuple[Array, Array]]] = {
    "hotcoco": _with_hotcoco,
    "pycocotools": _with_pycocotools,
}


def _values(precision: Array, recall: Array, limits: list[int]) -> dict[str, float | None]:
    """COCO's numbers from what was accumulated: precision (T, R, K, A, M) and recall (T, K, A, M)."""
    return {
        "AP": mean_percent(precision[..., 0, -1]),
        "AP50": mean_percent(precision[0, ..., 0, -1]),
        "AP75": mean_percent(precision[5, ..., 0, -1]),
        **{f"AP{letter}": mean_percent(precision[..., a, -1]) for a, letter in enumerate(AREAS, 1)},
        **{f"AR{limit}": mean_percent(recall[..., 0, m]) for m, limit in enumerate(limits)},
        **{f"AR{letter}": mean_percent(recall[..., a, -1]) for a, letter in enumerate(AREAS, 1)},
    }


def mean_percent(values: Array) -> float | None:
    """In percent, over what was measured: the backends mark everything else by −1.

    >>> mean_percent(np.array([0.5, -1.0, 1.0])), mean_percent(np.array([-1.0]))
    (75.0, None)
    """
    measured = values[values > -1]
    return 100 * float(measured.mean()) if measured.size else None


def category_labels(categories: Mapping[int, Row]) -> dict[int, str]:
    """A different name for each category id.

    >>> category_labels({1: {"name": "bat"}, 2: {"name": "bat"}, 3: {"name": "cat"}, 4: {}})
    {1: 'bat (1)', 2: 'bat (2)', 3: 'cat', 4: 'category 4'}
    """
    names = {i: str(category.get("name", f"category {i}")) for i, category in categories.items()}
    counts = Counter(names.values())
    labels = {i: name if counts[name] == 1 else f"{name} ({i})" for i, name in names.items()}
    if len(set(labels.values())) == len(labels):
        return labels
    return {i: f"{name} ({i})" for i, name in names.items()}


def _notes(objects: Sequence[Row], max_detections: int) -> tuple[str, ...]:
    counts = Counter(one["image_id"] for one in objects if not one["iscrowd"])
    over = [count for count in counts.values() if count > max_detections]
    if not over:
        return ()
    images = "1 image has" if len(over) == 1 else f"{len(over)} images have"
    return (
        f"{images} more than {max_detections} instances (the most: {max(over)}), but only the {max_detections} best "
        f"detections per image and class are scored; raise max_detections to measure them all.",
    )


def describe_metric(name: str) -> str:
    """What a metric is, for readers who do not know COCO's names; empty if it is not one of COCO's.

    >>> describe_metric("AP50"), describe_metric("APs"), describe_metric("AR300")
    ('IoU ≥ 0.50', 'small, < 32² pixels', 'best 300 per image and class')
    >>> describe_metric("AR@300"), describe_metric("ARs@300")
    ('best 300 per image', 'small, < 32² pixels')
    """
    kind, _, limit = name.partition("@")
    if limit:
        return f"best {limit} per image" if kind == "AR" else METRIC_DESCRIPTIONS.get(kind, "")
    if name.startswith("AR") and name[2:].isdecimal():
        return f"best {name[2:]} per image and class"
    return METRIC_DESCRIPTIONS.get(name) or PANOPTIC_DESCRIPTIONS.get(name, "")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raises a UserError if a value is not one of the choices."""
    if value not in choices:
        raise UserError(f"{name} is {value!r}; it is one of {', '.join(choices)}.{did_you_mean(value, choices)}")
