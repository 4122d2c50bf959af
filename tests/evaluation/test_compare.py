"""Paired differences over seeds, against scipy's own test and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from uniquery.evaluation import evaluate
from uniquery.evaluation.compare import MOST_SEEDS, bootstrap_over_images, image_score, paired_difference
from uniquery.masks import rle


def by_seed(values):
    return dict(enumerate(values))


def test_the_interval_is_that_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    control, variant = rng.normal(20, 1, 7), rng.normal(20.5, 1, 7)
    difference = paired_difference(by_seed(control), by_seed(variant))
    interval = stats.ttest_rel(variant, control).confidence_interval(0.95)
    assert difference.mean == pytest.approx((variant - control).mean())
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([1.0, 1.2, 0.9], "helps"),
        ([-1.0, -1.2, -0.9], "hurts"),
        ([1.0, -0.5, 0.9], "cannot tell: about"),
        ([0.5], "cannot tell: one seed"),
        ([0.001, -1.0, 1.0], f"more than {MOST_SEEDS} seeds"),
        ([0.0, 0.0, 0.0], f"more than {MOST_SEEDS} seeds"),
    ],
)
def test_verdicts(differences, verdict):
    control = dict.fromkeys(range(len(differences)), 10.0)
    variant = {seed: 10.0 + d for seed, d in enumerate(differences)}
    assert verdict in paired_difference(control, variant).verdict


def test_the_advised_number_of_seeds_is_the_first_that_decides():
    difference = paired_difference(by_seed([0.0, 0.0, 0.0]), by_seed([1.0, -0.2, 0.9]))
    needed = difference.seeds_needed()
    widths = [stats.t.ppf(0.975, n - 1) * difference.std / math.sqrt(n) for n in (needed - 1, needed)]
    assert widths[1] < difference.mean <= widths[0]
    assert difference.verdict == f"cannot tell: about {needed - 3} more seeds needed"


def test_only_shared_seeds_count():
    difference = paired_difference({0: 1.0, 1: 2.0, 5: 9.0}, {1: 3.0, 0: 1.5, 7: 0.0})
    assert difference.seeds == (0, 1)
    assert difference.mean == pytest.approx(0.75)


def test_no_shared_seed():
    with pytest.raises(ValueError, match="share no seed"):
        paired_difference({0: 1.0}, {1: 1.0})


def square(x, y, side, size=32):
    mask = np.zeros((size, size), np.uint8)
    mask[y : y + side, x : x + side] = 1
    return rle.encode(mask)


class TestImageScore:
    def test_f1_of_one_to_one_matches(self):
        truth = [(0, square(0, 0, 8)), (1, square(16, 16, 8))]
        assert image_score(truth, truth) == 1
        assert image_score(truth, truth[:1]) == pytest.approx(2 / 3)
        assert image_score(truth, [truth[0], truth[0]]) == pytest.approx(0.5)  # a duplicate is a false positive
        assert image_score(truth, [(1, truth[0][1])]) == 0  # another class
        assert image_score(truth, [(0, square(4, 4, 8))]) == 0  # IoU 1/7

    def test_empty_sides(self):
        assert image_score([], []) == 1
        assert image_score([(0, square(0, 0, 4))], []) == 0
        assert image_score([], [(0, square(0, 0, 4))]) == 0


class TestBootstrapOverImages:
    def truth_and_results(self, shifts):
        images = [{"id": i, "height": 32, "width": 32} for i in range(len(shifts))]
        rows = [{"image_id": i, "category_id": 1, "segmentation": square(4, 4, 16)} for i in range(len(shifts))]
        annotations = [{**row, "id": i + 1, "iscrowd": 0} for i, row in enumerate(rows)]
        results = [
            {**row, "segmentation": square(4 + shift, 4, 16), "score": 0.9}
            for row, shift in zip(rows, shifts, strict=True)
        ]
        return {"images": images, "categories": [{"id": 1, "name": "a"}], "annotations": annotations}, results

    def test_the_difference_is_that_of_two_evaluations(self):
        truth, good = self.truth_and_results([0] * 20)
        _, bad = self.truth_and_results([0, 3] * 10)
        interval = bootstrap_over_images(truth, bad, good, samples=200)
        scores = [evaluate(truth, results).values["AP"] for results in (bad, good)]
        assert interval.delta == pytest.approx(scores[1] - scores[0])
        assert 0 < interval.low <= interval.delta <= interval.high

    def test_equal_results_differ_by_nothing(self):
        truth, results = self.truth_and_results([0, 1, 2, 3])
        interval = bootstrap_over_images(truth, results, results, samples=50)
        assert (interval.delta, interval.low, interval.high) == (0, 0, 0)
