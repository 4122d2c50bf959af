"""The predictions of a run beside its validation data: what a report analyzes without the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from uniquery.data.coco import CocoData
from uniquery.data.dataset import GroundTruth, Row, is_panoptic
from uniquery.errors import UserError
from uniquery.evaluation.error_summary import ImageTruth, results_by_image, truth_by_image
from uniquery.training.batches import open_validation_data
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import SCORE_THRESHOLD, Thresholds, read_model_info


@dataclass(frozen=True)
class EvaluatedRun:
    """The predictions of a run's best weights, and its validation data.

    Attributes:
        folder: of the run.
        seed: of the run.
        data: its validation data.
        results: COCO results.
        thresholds: those in the model file; None if they were not chosen.
        max_detections: how many detections its evaluation scores; None: the protocol's number.
    """

    folder: Path
    seed: int
    data: CocoData
    results: list[Row]
    thresholds: Thresholds | None
    max_detections: int | None

    @property
    def is_panoptic(self) -> bool:
        """Whether its data has things and stuff, for which errors and curves of instances are not defined."""
        return is_panoptic(self.data.categories)

    @property
    def score_thresholds(self) -> dict[int, float]:
        """The least score of each class that counts and is drawn, by category id."""
        scores = self.thresholds.scores if self.thresholds else None
        known = {c.name: n for n, c in enumerate(read_model_info(self.folder).categories)} if scores else {}
        return {
            category.id: scores[known[category.name]] if scores else SCORE_THRESHOLD
            for category in self.data.categories
        }

    @property
    def ground_truth(self) -> GroundTruth:
        """Of its validation data."""
        return _ground_truth(self.data)[0]

    @property
    def images(self) -> dict[int, ImageTruth]:
        """The ground truth of each image."""
        return _ground_truth(self.data)[1]

    @cached_property
    def predictions(self) -> dict[int, list[Row]]:
        """By image, the predictions that reach the score threshold of their class."""
        return results_by_image(self.results, self.ground_truth, self.score_thresholds)

    def shares_data_with(self, other: EvaluatedRun) -> bool:
        """Whether both were evaluated on the same data with the same classes, and can be compared image by image."""
        return self.data is other.data and not self.is_panoptic


@lru_cache(maxsize=1)
def _ground_truth(data: CocoData) -> tuple[GroundTruth, dict[int, ImageTruth]]:
    """Runs on the same data share it, and what is measured on it."""
    truth = data.ground_truth()
    return truth, truth_by_image(truth)


def read_evaluated(folder: Path, *, warn: Callable[[str], object] = warnings.warn) -> EvaluatedRun | None:
    """The predictions of a run; None if it has none, or if its data is no longer there, which is a warning."""
    run = RunFolder(folder)
    if not run.config_file.is_file() or not run.predictions_file.is_file():
        return None
    try:
        config, info = run.read_config(), read_model_info(folder)
        if config.data.val is None:
            return None
        classes = [category.name for category in info.categories]
        data = open_validation_data(config.data.val, classes, info.bit_depth)
        results = run.read_predictions()
        evaluated = EvaluatedRun(folder, config.seed, data, results, info.thresholds, config.eval.max_detections)
        if not evaluated.is_panoptic:
            _ = evaluated.predictions  # checks every result
    except (UserError, ValueError, KeyError) as error:  # data, predictions or the version have changed since
        warn(f"The report of {folder} has no pictures: {error}")
        return None
    return evaluated
