"""Is one run better than another? Differences with intervals over images, and over seeds if there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

from uniquery.errors import UserError
from uniquery.evaluation.coco import describe_metric
from uniquery.evaluation.compare import (
    LEAST_IMAGES,
    Difference,
    ImageComparison,
    ImageInterval,
    compare_over_images,
    mean_interval,
    paired_difference,
)
from uniquery.evaluation.inference import Progress, part_of
from uniquery.report.charts import Interval, interval_chart
from uniquery.report.evaluated import EvaluatedRun
from uniquery.report.tables import format_interval, number


@dataclass(frozen=True)
class VerdictRow:
    """A metric or a class: the values of both sides in percent, their difference, and a verdict in words."""

    name: str
    note: str
    control: float
    variant: float
    images: ImageInterval | None
    seeds: Difference | None

    @property
    def verdict(self) -> str:
        """Over seeds if there are several, else about these weights only."""
        if self.seeds is not None:
            return self.seeds.verdict
        return self.images.verdict if self.images else ""

    @property
    def css_class(self) -> str:
        """Its color in the style sheet."""
        return {"helps": "better", "better": "better", "hurts": "worse", "worse": "worse"}.get(self.verdict, "")

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Both values and both differences, for the table."""
        images, seeds = self.images, self.seeds
        return (
            number(self.control, 1),
            number(self.variant, 1),
            format_interval(images.delta, images.low, images.high) if images else "",
            format_interval(seeds.mean, seeds.low, seeds.high) if seeds else "",
        )


@dataclass(frozen=True)
class Verdict:
    """The comparison of two sides.

    Attributes:
        control: name of what is compared with.
        variant: name of what is compared.
        seeds: how many pairs of runs there are.
        metrics: overall and by size.
        classes: AP of each class.
    """

    control: str
    variant: str
    seeds: int
    metrics: tuple[VerdictRow, ...]
    classes: tuple[VerdictRow, ...]

    @property
    def least_images(self) -> int:
        """How many images an interval needs."""
        return LEAST_IMAGES

    @property
    def sentence(self) -> str:
        """The answer about AP."""
        first = self.metrics[0]
        if first.seeds is not None:
            difference, source = first.texts[3], f"the 95 % interval is over {self.seeds} seeds"
        elif first.images is not None and first.images.low is None:
            difference, source = first.texts[2], f"an interval needs at least {LEAST_IMAGES} images with instances"
        else:
            difference, source = first.texts[2], "the 95 % interval is over the validation images"
        answer = {"better": "better on these images", "worse": "worse on these images"}.get(
            first.verdict, first.verdict
        )
        hint = "" if first.seeds else " It says nothing about other seeds: give several runs of each with --against."
        return (
            f"{self.variant} minus {self.control}, best weights of each: {difference} mask {first.name}, {answer}; "
            f"{source}.{hint}"
        )

    @property
    def chart(self) -> Markup:
        """The differences of the metrics."""
        intervals = []
        for row in self.metrics:
            one = row.seeds or row.images
            if one is not None:
                value = one.mean if isinstance(one, Difference) else one.delta
                intervals.append(Interval(row.name, value, one.low, one.high))
        over = "seeds" if self.metrics[0].seeds else "images"
        return interval_chart(intervals, title=f"{self.variant} minus {self.control}, over {over}", x_label="percent")


def compare_sides(
    control: Sequence[EvaluatedRun],
    variant: Sequence[EvaluatedRun],
    names: tuple[str, str],
    progress: Progress = lambda *_: None,
) -> Verdict:
    """Compares one run with another, or several with several, paired by seed.

    Args:
        control: runs that are compared with.
        variant: runs that are compared; all on the same data.
        names: of both sides.
        progress: called with how much is done, and how much there is.

    Raises:
        UserError: the seeds of several runs cannot be paired, or the data differs.
    """
    pairs = pair_by_seed(control, variant)
    for before, after in pairs:
        if not after.shares_data_with(before):
            raise UserError(f"{after.folder} and {before.folder} were not evaluated on the same instances and classes.")
    compared = [
        compare_over_images(
            before.ground_truth,
            before.results,
            after.results,
            max_detections=min((n for n in (before.max_detections, after.max_detections) if n), default=None),
            progress=part_of(progress, number, len(pairs)),
        )
        for number, (before, after) in enumerate(pairs)
    ]
    return Verdict(
        *names,
        len(pairs),
        tuple(_rows(compared, [c.metrics for c in compared], [c.values for c in compared], describe=True)),
        tuple(_rows(compared, [c.per_class for c in compared], [c.class_values for c in compared], describe=False)),
    )


def pair_by_seed(
    control: Sequence[EvaluatedRun], variant: Sequence[EvaluatedRun]
) -> list[tuple[EvaluatedRun, EvaluatedRun]]:
    """The runs of two sides with the same seed; a single run of each is a pair whatever its seed.

    Raises:
        UserError: a side has two runs of one seed, or they share no seed.
    """
    if len(control) == len(variant) == 1:
        return [(control[0], variant[0])]
    by_seed: list[dict[int, EvaluatedRun]] = []
    for side in (control, variant):
        runs: dict[int, EvaluatedRun] = {}
        for run in side:
            if run.seed in runs:
                raise UserError(
                    f"{runs[run.seed].folder} and {run.folder} have the same seed ({run.seed}): give one run for each "
                    "seed."
                )
            runs[run.seed] = run
        by_seed.append(runs)
    shared = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not shared:
        seeds = [", ".join(map(str, sorted(runs))) for runs in by_seed]
        raise UserError(
            f"The runs are paired by seed, but have none in common ({seeds[1]} against {seeds[0]}): train both sides "
            "with the same seeds."
        )
    return [(by_seed[0][seed], by_seed[1][seed]) for seed in shared]


def _rows(
    compared: Sequence[ImageComparison],
    intervals: Sequence[dict[str, ImageInterval]],
    values: Sequence[dict[str, tuple[float, float]]],
    *,
    describe: bool,
) -> list[VerdictRow]:
    rows = []
    for name in values[0]:
        control, variant = ({seed: v[name][side] for seed, v in enumerate(values)} for side in (0, 1))
        seeds = paired_difference(control, variant) if len(compared) > 1 else None
        images = mean_interval([one[name] for one in intervals])
        note = describe_metric(name) if describe else ""
        rows.append(VerdictRow(name, note, fmean(control.values()), fmean(variant.values()), images, seeds))
    return rows
