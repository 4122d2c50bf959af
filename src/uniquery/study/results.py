"""The result of one run as a small json, and the comparison of all runs of a study."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from uniquery.data.coco import CocoData
from uniquery.data.dataset import is_panoptic
from uniquery.errors import UserError
from uniquery.evaluation.compare import (
    Difference,
    ImageInterval,
    compare_over_images,
    mean_interval,
    paired_difference,
)
from uniquery.settings import Settings
from uniquery.study.plan import START, PlannedRun, StudySettings
from uniquery.training.batches import open_validation_data
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import read_model_info


class Evaluation(Settings):
    """One evaluation of a run.

    Attributes:
        step: optimizer steps so far.
        images: image forwards so far, views included.
        metrics: in percent.
    """

    step: int
    images: int
    metrics: dict[str, float | None]


class RunResult(Settings):
    """What a study keeps of a run.

    Attributes:
        data: name of the data set.
        variant: name of the variant.
        seed: of the run.
        key: hash of its settings.
        headline: the metric that is compared.
        evaluations: in order; the last one counts.
        diagnosis: numbers of `uniquery diagnose`.
        seconds: of training and evaluation.
        peak_memory_gb: of the process, or of the GPU.
        versions: of Python, torch and uniquery, and the device.
    """

    data: str
    variant: str | None
    seed: int
    key: str
    headline: str
    evaluations: tuple[Evaluation, ...] = Field(min_length=1)
    diagnosis: dict[str, Any]
    seconds: float
    peak_memory_gb: float
    versions: dict[str, str]

    @property
    def score(self) -> float | None:
        """The headline metric of the last evaluation: the weights at the end, not the best on the way."""
        return self.evaluations[-1].metrics.get(self.headline)


def read_result(path: Path) -> RunResult | None:
    """A result, or None if the run has none yet.

    Raises:
        UserError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return RunResult.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not the result of a run ({reason}); remove it to run it again.") from None


@dataclass(frozen=True)
class Row:
    """A variant on a data set.

    Attributes:
        data: name of the data set.
        variant: name of the variant.
        control: the variant that it is compared with; None for a control without one.
        results: of its seeds, in order.
        start: the result of the base that its runs start from, if there is one.
        difference: to the control over seeds; None for the control and without a shared seed.
        images_by_seed: the same difference of each seed with an interval by bootstrap over images.
    """

    data: str
    variant: str
    control: str | None
    results: tuple[RunResult, ...]
    start: RunResult | None
    difference: Difference | None
    images_by_seed: Mapping[int, ImageInterval] = field(default_factory=dict)

    @property
    def images(self) -> ImageInterval | None:
        """The intervals over images, the mean over seeds."""
        return mean_interval(list(self.images_by_seed.values()))

    @property
    def steps_and_forwards(self) -> tuple[int, int]:
        """Optimizer steps and image forwards of a run."""
        last = self.results[0].evaluations[-1]
        return last.step, last.images

    @property
    def scores(self) -> list[float]:
        """The headline metric of each seed that has one."""
        return [score for result in self.results if (score := result.score) is not None]

    @property
    def mean(self) -> float | None:
        """Of the scores."""
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the scores; None for fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def verdict(self) -> str:
        """In words."""
        if self.control is None:
            return "control"
        return self.difference.verdict if self.difference else "no run to compare with yet"


def compare_runs(study: StudySettings, results: Sequence[RunResult]) -> list[Row]:
    """A row for each variant on each data set that has a result, compared with its control over seeds."""
    grouped: dict[tuple[str, str], dict[int, RunResult]] = {}
    starts: dict[str, RunResult] = {}
    for result in results:
        if result.variant is None:
            starts[result.data] = result
        else:
            grouped.setdefault((result.data, result.variant), {})[result.seed] = result
    rows = []
    for data in dict.fromkeys(data for data, _ in grouped):
        for variant in study.variants:
            by_seed = grouped.get((data, variant), {})
            if by_seed:
                control = study.control_of(variant)
                is_control = control == variant
                difference = None if is_control else _difference(grouped.get((data, control), {}), by_seed)
                ordered = tuple(by_seed[seed] for seed in sorted(by_seed))
                rows.append(Row(data, variant, None if is_control else control, ordered, starts.get(data), difference))
    return rows


def _difference(control: Mapping[int, RunResult], variant: Mapping[int, RunResult]) -> Difference | None:
    scores = [{seed: s for seed, r in side.items() if (s := r.score) is not None} for side in (control, variant)]
    return paired_difference(*scores) if scores[0].keys() & scores[1].keys() else None


def add_image_intervals(rows: Sequence[Row], runs: Sequence[PlannedRun], summary: Path) -> list[Row]:
    """The rows with the bootstrap over images of each shared seed.

    Where the predictions are no longer there, the interval is that of the study's last summary, if it has one.
    """
    by_key = {(run.data, run.variant, run.seed): run for run in runs}
    known = _summarized_intervals(summary)
    completed = []
    for row in rows:
        intervals = {}
        for seed in row.difference.seeds if row.difference else ():
            pair = [by_key.get((row.data, variant, seed)) for variant in (row.control, row.variant)]
            interval = _image_interval(*pair) or known.get((row.data, row.variant, row.control, seed))
            if interval is not None:
                intervals[seed] = interval
        completed.append(replace(row, images_by_seed=intervals))
    return completed


def _image_interval(control: PlannedRun | None, variant: PlannedRun | None) -> ImageInterval | None:
    """Of mask AP, if the predictions of both are there."""
    before, after = final_predictions(control), final_predictions(variant)
    if before is None or after is None or variant is None:
        return None
    data = validation_data(variant)
    if is_panoptic(data.categories):
        return None
    rules = variant.config.eval
    compared = compare_over_images(
        data.ground_truth(), before, after, max_detections=rules.max_detections, protocol=rules.protocol
    )
    return compared.metrics.get("AP")


def _summarized_intervals(summary: Path) -> dict[tuple[str, str, str | None, int], ImageInterval]:
    """The intervals of a summary by data set, variant, control and seed."""
    try:
        rows = json.loads(summary.read_bytes())["rows"] if summary.is_file() else []
        return {
            (row["data"], row["variant"], row["control"], int(seed)): ImageInterval(**interval)
            for row in rows
            for seed, interval in row.get("images_by_seed", {}).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{summary} is not the summary of a study ({error!r}); remove it, it is made anew.") from None


def final_predictions(run: PlannedRun | None) -> list[dict[str, Any]] | None:
    """COCO results of the last weights of a run, if both are still there.

    Raises:
        UserError: their file is damaged.
    """
    folder = RunFolder(run.config.folder) if run else None
    if folder is None or not folder.last.is_dir() or not folder.final_predictions_file.is_file():
        return None
    try:
        results: list[dict[str, Any]] = json.loads(folder.final_predictions_file.read_bytes())
    except ValueError:
        raise UserError(
            f"{folder.final_predictions_file} is damaged; remove it: the study then has no interval over images for it."
        ) from None
    return results


def validation_data(run: PlannedRun) -> CocoData:
    """The data that a finished run was evaluated on."""
    assert run.config.data.val is not None
    classes = [category.name for category in read_model_info(RunFolder(run.config.folder).last).categories]
    return open_validation_data(run.config.data.val, classes, run.config.data.bit_depth)


def result_seeds(output: Path) -> list[int]:
    """The seeds that a study has results of, sorted."""
    names = (re.search(rf"(?<!--{START})--seed(\d+)$", file.stem) for file in (output / "results").glob("*.json"))
    return sorted({int(name[1]) for name in names if name})


def result_file(output: Path, run: PlannedRun) -> Path:
    """Where the result of a run is."""
    return output / "results" / f"{run.name}.json"
