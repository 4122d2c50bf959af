"""Is one setting better than another? Paired differences over seeds, their intervals, and a verdict in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from hotcoco import mask as coco_mask
from scipy import stats

from uniquery.data.dataset import Row
from uniquery.data.lvis import FREQUENCIES
from uniquery.evaluation.bootstrap import Array, WeightedEvaluation, image_weights
from uniquery.evaluation.coco import AREAS, METRIC_DESCRIPTIONS, category_labels, hotcoco_evaluation
from uniquery.evaluation.entries import AnyGroundTruth, read_ground_truth
from uniquery.evaluation.errors import MATCH_IOU, match_one_to_one
from uniquery.evaluation.lvis import lvis_evaluation
from uniquery.evaluation.protocol import DETECTIONS, Protocol, choose_protocol
from uniquery.masks.rle import Rle

CONFIDENCE = 0.95
_EVALUATIONS = {"coco": hotcoco_evaluation, "lvis": lvis_evaluation}
LEAST_IMAGES = 6  # that 95 % need: if all of fewer images favor one side, that is still chance (sign test, 2 / 2⁵)
LEAST_SEEDS = 3  # two that happen to agree have a short interval
MOST_SEEDS = 100  # beyond this many, more seeds are not a practical advice
NEGLIGIBLE = 0.1  # percent; a smaller difference is of no use, however sure it is


@dataclass(frozen=True)
class Difference:
    """The paired difference of a metric, variant minus control.

    Attributes:
        seeds: seeds that both were measured with.
        mean: mean of the differences.
        std: standard deviation of the differences; None for one seed.
        low: lower end of the 95 % interval of the mean (Student's t); None for one seed.
        high: upper end.
    """

    seeds: tuple[int, ...]
    mean: float
    std: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """In words: "helps", "hurts", "no difference", or "cannot tell" with how many more seeds would be needed."""
        if self.low is None or self.high is None or len(self.seeds) < LEAST_SEEDS:
            return f"cannot tell: run at least {LEAST_SEEDS} seeds"
        if self.low > -NEGLIGIBLE and self.high < NEGLIGIBLE:
            return f"no difference: less than {NEGLIGIBLE} either way"
        if self.low > 0:
            return "helps"
        if self.high < 0:
            return "hurts"
        needed = self.seeds_needed()
        if needed is None:
            return f"cannot tell: a difference this small needs more than {MOST_SEEDS} seeds"
        more = needed - len(self.seeds)
        return f"cannot tell: about {more} more seed{'s' * (more > 1)} needed"

    def seeds_needed(self) -> int | None:
        """The smallest number of seeds whose interval would exclude 0, if mean and spread stay; None if above 100."""
        if self.std is None:
            return None
        for count in range(max(2, len(self.seeds)), MOST_SEEDS + 1):
            if abs(self.mean) > _half_width(self.std, count):
                return count
        return None


def paired_difference(control: Mapping[int, float], variant: Mapping[int, float]) -> Difference:
    """The difference of a metric over the seeds that both have; the mappings are seed → metric.

    Raises:
        ValueError: they share no seed.

    >>> difference = paired_difference({0: 20.0, 1: 21.0, 2: 19.5}, {0: 21.1, 1: 22.0, 2: 20.4})
    >>> f"{difference.mean:.2f} [{difference.low:.2f}, {difference.high:.2f}]", difference.verdict
    ('1.00 [0.75, 1.25]', 'helps')
    """
    seeds = tuple(sorted(control.keys() & variant.keys()))
    if not seeds:
        raise ValueError("variant and control share no seed")
    differences = np.array([variant[seed] - control[seed] for seed in seeds])
    mean = float(differences.mean())
    if len(seeds) == 1:
        return Difference(seeds, mean, None, None, None)
    std = float(differences.std(ddof=1))
    half = _half_width(std, len(seeds))
    return Difference(seeds, mean, std, mean - half, mean + half)


def _half_width(std: float, count: int) -> float:
    """Half of the interval of a mean of `count` values."""
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * std / math.sqrt(count)


@dataclass(frozen=True)
class ImageInterval:
    """The difference of two results on the same images, with an interval over images.

    Attributes:
        delta: variant minus control, in percent.
        low: lower end of the 95 % interval (paired bootstrap over images); None if there are too few images for one.
        high: upper end.
        images: how many images have instances that it is about.
    """

    delta: float
    low: float | None
    high: float | None
    images: int

    @property
    def verdict(self) -> str:
        """In words, about these weights: "better", "worse" or "cannot tell"."""
        if self.low is None or self.high is None:
            return f"cannot tell: {self.images} image{'s' * (self.images != 1)}"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "cannot tell"


def mean_interval(intervals: Sequence[ImageInterval]) -> ImageInterval | None:
    """The mean over seeds, all on the same images; None if there are none."""
    if not intervals:
        return None
    ends = [(one.low, one.high) for one in intervals if one.low is not None and one.high is not None]
    low, high = (fmean(side) for side in zip(*ends, strict=True)) if ends else (None, None)
    return ImageInterval(fmean(one.delta for one in intervals), low, high, intervals[0].images)


@dataclass(frozen=True)
class ImageComparison:
    """Two results on the same images; what cannot be measured is left out.

    Attributes:
        metrics: AP, AP50, AP75, APs, APm, APl; for LVIS also APr, APc, APf.
        per_class: AP of each class by name.
        values: the control's and the variant's value of each metric, in percent.
        class_values: the same of each class.
    """

    metrics: dict[str, ImageInterval]
    per_class: dict[str, ImageInterval]
    values: dict[str, tuple[float, float]]
    class_values: dict[str, tuple[float, float]]


def compare_over_images(
    truth: AnyGroundTruth,
    control: Sequence[Row],
    variant: Sequence[Row],
    *,
    max_detections: int | None = None,
    protocol: Protocol | None = None,
    samples: int = 1000,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> ImageComparison:
    """Mask metrics of one set of COCO results minus those of another, and how much that depends on the images.

    By the rules of `protocol`, by default LVIS's where the data has frequencies; `max_detections` is the protocol's own
    number by default. `progress` is called with how much of the work is done, and how much there is.

    Raises:
        DataError: something is wrong with the ground truth or the results.
    """
    ground_truth = read_ground_truth(truth)
    protocol = choose_protocol(ground_truth, protocol)
    evaluation, limit = _EVALUATIONS[protocol], max_detections or DETECTIONS[protocol]
    sides = []
    for done, results in enumerate((control, variant)):
        progress(done, 4)
        sides.append(WeightedEvaluation(evaluation(ground_truth, results, limit)))
    batches = image_weights(sides, samples, seed)
    labels = category_labels(ground_truth.categories)
    groups = {"": None, **{letter: letter for letter in FREQUENCIES}} if protocol == "lvis" else {"": None}
    members = {
        f"AP{name}": [letter in (None, row.get("frequency")) for row in ground_truth.categories.values()]
        for name, letter in groups.items()
    }
    total = len(sides) * len(batches)
    before, after = (
        _sampled_metrics(
            side,
            batches,
            members,
            list(labels.values()),
            lambda done, start=start: progress(total + start + done, 2 * total),  # type: ignore[misc]
        )
        for start, side in zip((0, len(batches)), sides, strict=True)
    )
    images = _image_counts(sides[0], members, list(labels.values()))
    overall, classes = (_intervals(*three) for three in zip(before, after, images, strict=True))
    return ImageComparison(overall[0], classes[0], overall[1], classes[1])


def _sampled_metrics(
    side: WeightedEvaluation,
    batches: Sequence[Array],
    members: Mapping[str, Sequence[bool]],
    labels: Sequence[str],
    progress: Callable[[int], None],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """In percent, by name: each metric, and AP of each class; of all images first, then of each sample."""
    metrics: dict[str, list[Array]] = {}
    classes: list[Array] = []
    for done, weights in enumerate(batches):
        progress(done)
        values = 100 * side(weights)  # (A, K, T, B)
        for name, chosen in members.items():
            metrics.setdefault(name, []).append(_mean_of_measured(values[0, np.array(chosen, dtype=bool)]))
        metrics.setdefault("AP50", []).append(_mean_of_measured(values[0, :, :1]))
        metrics.setdefault("AP75", []).append(_mean_of_measured(values[0, :, 5:6]))
        for area, letter in enumerate(AREAS, 1):
            metrics.setdefault(f"AP{letter}", []).append(_mean_of_measured(values[area]))
        classes.append(values[0].mean(1))
    order = [name for name in METRIC_DESCRIPTIONS if name in metrics]
    return (
        {name: np.concatenate(metrics[name]) for name in order},
        dict(zip(labels, np.concatenate(classes, axis=1), strict=True)),
    )


def _image_counts(
    side: WeightedEvaluation, members: Mapping[str, Sequence[bool]], labels: Sequence[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """How many images each metric and each class is about."""
    everything = [True] * len(labels)
    metrics = {name: side.images_with_instances(0, chosen) for name, chosen in members.items()}
    metrics |= dict.fromkeys(("AP50", "AP75"), metrics["AP"])
    metrics |= {f"AP{letter}": side.images_with_instances(area, everything) for area, letter in enumerate(AREAS, 1)}
    one_class = np.eye(len(labels), dtype=bool).tolist()
    return metrics, {name: side.images_with_instances(0, one_class[k]) for k, name in enumerate(labels)}


def _mean_of_measured(values: Array) -> Array:
    """(B,) of (K, T, B): the mean over all that is not nan; nan if there is nothing."""
    measured = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(measured, values, 0).sum((0, 1)) / measured.sum((0, 1))
    return mean


def _intervals(
    control: Mapping[str, Array], variant: Mapping[str, Array], images: Mapping[str, int]
) -> tuple[dict[str, ImageInterval], dict[str, tuple[float, float]]]:
    """The difference of each metric that both have, and its two values."""
    intervals, values = {}, {}
    tail = 50 * (1 - CONFIDENCE)
    for name, before in control.items():
        difference = variant[name] - before
        if not np.isnan(difference[0]):
            low, high = None, None
            if images[name] >= LEAST_IMAGES:
                low, high = map(float, np.nanpercentile(difference[1:], [tail, 100 - tail]))
            intervals[name] = ImageInterval(float(difference[0]), low, high, images[name])
            values[name] = float(before[0]), float(variant[name][0])
    return intervals, values


def image_score(
    instances: Sequence[tuple[int, Rle]], predicted: Sequence[tuple[int, Rle]], iou: float = MATCH_IOU
) -> float:
    """The F1 score of one image: predictions and instances of the same class with at least `iou`, one to one.

    An image without instances and without predictions scores 1.

    Args:
        instances: (label, mask) of the ground truth.
        predicted: (label, mask), best first.
        iou: smallest IoU of a match.
    """
    if not instances or not predicted:
        return float(not instances and not predicted)
    overlaps = np.asarray(coco_mask.iou([m for _, m in predicted], [m for _, m in instances], [0] * len(instances)))
    same_class = np.array([p for p, _ in predicted])[:, None] == np.array([label for label, _ in instances])
    matches = match_one_to_one(np.where(same_class, overlaps, 0.0), iou)
    return 2 * int((matches >= 0).sum()) / (len(instances) + len(predicted))
