"""Which predictions to keep: a score threshold for each class, chosen on validation data; and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import hotcoco
import numpy as np
import numpy.typing as npt

from uniquery.data.dataset import Row
from uniquery.errors import UserError
from uniquery.evaluation.coco import category_labels, hotcoco_evaluation
from uniquery.evaluation.entries import AnyGroundTruth, read_ground_truth
from uniquery.evaluation.errors import MATCH_IOU
from uniquery.evaluation.lvis import lvis_evaluation
from uniquery.evaluation.protocol import DETECTIONS, choose_protocol

DEFAULT_SCORE = 0.5
BEST_F1 = "best-f1"
_PRECISION = "precision="
_EVALUATIONS = {"coco": hotcoco_evaluation, "lvis": lvis_evaluation}

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rule:
    """What a threshold is chosen for: the best F1 score, or the best recall with at least a precision.

    Attributes:
        precision: the least precision, above 0 to 1; None for the best F1 score.
    """

    precision: float | None = None

    def __str__(self) -> str:
        return BEST_F1 if self.precision is None else f"{_PRECISION}{self.precision:g}"


def parse_rule(text: str) -> Rule:
    """The rule that a text names.

    Raises:
        UserError: it names none.

    >>> parse_rule("precision=0.95").precision, str(parse_rule("best-f1"))
    (0.95, 'best-f1')
    """
    if text == BEST_F1:
        return Rule()
    try:
        precision = float(text.removeprefix(_PRECISION))
    except ValueError:
        precision = 0.0
    if not text.startswith(_PRECISION) or not 0 < precision <= 1:
        raise UserError(
            f"Thresholds are chosen by {BEST_F1}, or by {_PRECISION} and a number up to 1, not by '{text}'."
        )
    return Rule(precision)


@dataclass(frozen=True)
class ScoredDetections:
    """The detections of a class that count, best score first.

    Attributes:
        scores: (D,).
        is_correct: (D,) which of them find an instance, at IoU 0.5.
        instances: how many instances there are.
    """

    scores: Array
    is_correct: npt.NDArray[np.bool_]
    instances: int

    def at(self, threshold: float) -> OperatingPoint:
        """Precision and recall of the detections that reach a score."""
        kept = self.scores >= threshold
        return OperatingPoint(threshold, int(self.is_correct[kept].sum()), int(kept.sum()), self.instances)

    def curve(self) -> list[OperatingPoint]:
        """The point of each score that occurs, highest first."""
        is_last = np.append(self.scores[1:] != self.scores[:-1], True)[: len(self.scores)]  # of its score
        found = np.cumsum(self.is_correct)
        return [
            OperatingPoint(float(self.scores[end]), int(found[end]), int(end) + 1, self.instances)
            for end in np.flatnonzero(is_last)
        ]


@dataclass(frozen=True)
class OperatingPoint:
    """The detections that reach a threshold.

    Attributes:
        threshold: the least score.
        found: how many of them find an instance.
        kept: how many there are.
        instances: how many instances there are.
    """

    threshold: float
    found: int
    kept: int
    instances: int

    @property
    def precision(self) -> float | None:
        """Share of the detections that find an instance; None without detections."""
        return self.found / self.kept if self.kept else None

    @property
    def recall(self) -> float | None:
        """Share of the instances that are found; None without instances."""
        return self.found / self.instances if self.instances else None

    @property
    def f1(self) -> float | None:
        """The harmonic mean of precision and recall; None without detections and instances."""
        return 2 * self.found / (self.kept + self.instances) if self.kept + self.instances else None


@dataclass(frozen=True)
class Scores:
    """How the scores of results relate to what is correct.

    Attributes:
        classes: category id → its detections.
        names: category id → a name of its own.
        calibration_error: mean difference of score and precision, over ten bins of scores, weighted by their
            detections; None without detections.
        bins: mean score, precision and number of the detections in each bin that has some.
    """

    classes: Mapping[int, ScoredDetections]
    names: Mapping[int, str]
    calibration_error: float | None
    bins: tuple[tuple[float, float, int], ...]


def read_scores(truth: AnyGroundTruth, results: Sequence[Row], max_detections: int | None = None) -> Scores:
    """Which detections are correct at IoU 0.5, by COCO's rules, or LVIS's where the data has frequencies.

    Raises:
        DataError: something is wrong with the ground truth or the results.
    """
    ground_truth = read_ground_truth(truth)
    protocol = choose_protocol(ground_truth)
    run = _EVALUATIONS[protocol](ground_truth, results, max_detections or DETECTIONS[protocol])
    calibration = run.calibration(n_bins=10, iou_threshold=MATCH_IOU)
    bins = [(b["avg_confidence"], b["avg_accuracy"], b["count"]) for b in calibration["bins"] if b["count"]]
    return Scores(
        _scored_detections(run, list(ground_truth.categories)),
        category_labels(ground_truth.categories),
        calibration["ece"] if bins else None,
        tuple(bins),
    )


def _scored_detections(run: hotcoco.COCOeval, category_ids: Sequence[int]) -> dict[int, ScoredDetections]:
    whole = list(run.params.area_rng[0])
    parts: dict[int, tuple[list[Array], list[npt.NDArray[np.bool_]]]] = {i: ([], []) for i in category_ids}
    instances = dict.fromkeys(category_ids, 0)
    for entry in run.eval_imgs:
        if entry is None or list(entry["aRng"]) != whole:
            continue
        counts = ~np.asarray(entry["dtIgnore"][0], dtype=bool)
        scores, correct = parts[entry["category_id"]]
        scores.append(np.asarray(entry["dtScores"], dtype=float)[counts])
        correct.append(np.asarray(entry["dtMatched"][0], dtype=bool)[counts])
        instances[entry["category_id"]] += int(np.count_nonzero(entry["gtInDenominator"]))
    classes = {}
    for category_id, (scores, correct) in parts.items():
        joined = np.concatenate([np.empty(0), *scores])
        order = np.argsort(-joined, kind="stable")
        is_correct = np.concatenate([np.empty(0, dtype=bool), *correct])[order]
        classes[category_id] = ScoredDetections(joined[order], is_correct, instances[category_id])
    return classes


@dataclass(frozen=True)
class ChosenThreshold:
    """A point that was chosen for a class, and what was done instead if the rule could not be followed."""

    point: OperatingPoint
    problem: str | None = None


def choose_threshold(detections: ScoredDetections, rule: Rule) -> ChosenThreshold:
    """The threshold of a class: in the middle between the last score that is kept and the first that is not.

    Where the rule cannot be followed, it is 0.5 without instances or detections, and that of the highest precision if
    the wanted one is not reached.
    """
    curve = detections.curve()
    problem: str | None = None
    if not curve or not detections.instances:
        missing = "instances" if not detections.instances else "predictions"
        problem = f"no {missing} in the validation data, so the threshold is {DEFAULT_SCORE}"
        return ChosenThreshold(detections.at(DEFAULT_SCORE), problem)
    if rule.precision is None:
        best = max(curve, key=lambda point: (point.f1 or 0.0, point.threshold))
    else:
        reached = [point for point in curve if (point.precision or 0.0) >= rule.precision]
        if any(point.found for point in reached):
            best = max(reached, key=lambda point: (point.found, point.threshold))
        else:
            best = max(curve, key=lambda point: (point.precision or 0.0, point.found))
            problem = f"no precision of {rule.precision:g}, so the threshold is that of the highest precision"
    below = detections.scores[detections.scores < best.threshold]
    threshold = (best.threshold + float(below.max())) / 2 if len(below) else best.threshold
    return ChosenThreshold(detections.at(threshold), problem)
