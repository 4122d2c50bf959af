"""The errors of a whole set of results: how many instances and predictions are of each kind, in groups of instances."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from uniquery.data.dataset import Row
from uniquery.data.lvis import NEGATIVE, NOT_EXHAUSTIVE, class_lists
from uniquery.evaluation.coco import read_detections, read_objects, select_images
from uniquery.evaluation.entries import AnyGroundTruth, read_ground_truth
from uniquery.evaluation.errors import ImageErrors, LabeledRle, image_errors
from uniquery.evaluation.inference import Progress
from uniquery.evaluation.instance_traits import Traits, instance_traits
from uniquery.weights.model_file import SCORE_THRESHOLD

ALL = ("all", "all instances")
"""The group of all instances."""

Group = tuple[str, str]
ScoreThresholds = float | Mapping[int, float]
"""The least score of a prediction that counts: one for all, or one for each category id."""


@dataclass(frozen=True)
class ImageTruth:
    """The ground truth of an image; labels are category ids.

    Attributes:
        instances: label and mask, crowd regions excluded.
        crowds: label and mask of crowd regions.
        labeled_classes: the classes that it is labeled for, as in LVIS; None: all.
    """

    instances: list[LabeledRle] = field(default_factory=list)
    crowds: list[LabeledRle] = field(default_factory=list)
    labeled_classes: frozenset[int] | None = None

    @cached_property
    def traits(self) -> list[Traits]:
        """What makes each of the instances hard."""
        return instance_traits([mask for _, mask in self.instances])

    def errors(self, predicted: Sequence[Row]) -> ImageErrors:
        """The errors of some predictions, which are COCO results, best first."""
        masks = [(row["category_id"], row["segmentation"]) for row in predicted]
        return image_errors(self.instances, masks, crowds=self.crowds, labeled_classes=self.labeled_classes)


def truth_by_image(truth: AnyGroundTruth) -> dict[int, ImageTruth]:
    """The ground truth of each image.

    Raises:
        DataError: an annotation is wrong.
    """
    ground_truth = read_ground_truth(truth)
    by_image: dict[int, list[Row]] = {i: [] for i in ground_truth.images}
    for one in read_objects(ground_truth, "segm", frozenset(by_image)):
        by_image[one["image_id"]].append(one)
    return {
        image_id: ImageTruth(
            [(one["category_id"], one["segmentation"]) for one in rows if not one["iscrowd"]],
            [(one["category_id"], one["segmentation"]) for one in rows if one["iscrowd"]],
            _labeled_classes(ground_truth.images[image_id], rows),
        )
        for image_id, rows in by_image.items()
    }


def _labeled_classes(image: Row, annotations: Sequence[Row]) -> frozenset[int] | None:
    lists = class_lists(image)
    if NEGATIVE not in lists:
        return None
    present = {one["category_id"] for one in annotations}
    return frozenset(present.union(lists[NEGATIVE])) - frozenset(lists.get(NOT_EXHAUSTIVE, ()))


def results_by_image(
    results: Sequence[Row], truth: AnyGroundTruth, score_thresholds: ScoreThresholds = SCORE_THRESHOLD
) -> dict[int, list[Row]]:
    """The predictions of each image that reach the score threshold, best first.

    Raises:
        DataError: a result is wrong.
    """
    ground_truth = read_ground_truth(truth)
    grouped: dict[int, list[Row]] = defaultdict(list)
    for one in read_detections(results, ground_truth, "segm", select_images(ground_truth, None)):
        if one["score"] >= least_score(score_thresholds, one["category_id"]):
            grouped[one["image_id"]].append(one)
    return {image_id: sorted(rows, key=lambda row: -row["score"]) for image_id, rows in grouped.items()}


def least_score(score_thresholds: ScoreThresholds, category_id: int) -> float:
    """The score threshold of a class.

    >>> least_score(0.5, 7), least_score({7: 0.3}, 7), least_score({7: 0.3}, 8)
    (0.5, 0.3, 0.5)
    """
    if isinstance(score_thresholds, Mapping):
        return score_thresholds.get(category_id, SCORE_THRESHOLD)
    return score_thresholds


@dataclass
class ErrorSummary:
    """Counts over images.

    Attributes:
        instances: (trait, group) → kind → instances.
        predictions: kind → predictions.
        boundary: (trait, group) → the boundary IoU of each instance that was found.
    """

    instances: dict[Group, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    predictions: Counter[str] = field(default_factory=Counter)
    boundary: dict[Group, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, traits: Sequence[Traits], errors: ImageErrors) -> None:
        """Counts one image."""
        self.predictions.update(outcome.kind for outcome in errors.predictions)
        for one, outcome in zip(traits, errors.instances, strict=True):
            for group in (ALL, *one.groups.items()):
                self.instances[group][outcome.kind] += 1
                if outcome.boundary_iou is not None:
                    self.boundary[group].append(outcome.boundary_iou)

    def count(self, group: Group = ALL) -> int:
        """How many instances a group has."""
        return self.instances[group].total() if group in self.instances else 0

    def share(self, kind: str, group: Group = ALL) -> float | None:
        """The percentage of a group's instances that are of a kind; None for an empty group."""
        count = self.count(group)
        return 100 * self.instances[group][kind] / count if count else None

    def mean_boundary_iou(self, group: Group = ALL) -> float | None:
        """In percent, over the instances of a group that were found; None if none was."""
        values = self.boundary.get(group)
        return 100 * sum(values) / len(values) if values else None


def summarize_errors(
    truth: Mapping[int, ImageTruth],
    predictions: Mapping[int, Sequence[Row]],
    *,
    progress: Progress = lambda *_: None,
) -> ErrorSummary:
    """The errors of all images, from `truth_by_image` and `results_by_image`."""
    summary = ErrorSummary()
    for done, (image_id, image) in enumerate(truth.items(), 1):
        summary.add(image.traits, image.errors(predictions.get(image_id, ())))
        progress(done, len(truth))
    return summary
