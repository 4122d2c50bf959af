"""Paired differences over seeds, against scipy's own test and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from helpers.coco_sets import random_set
from uniquery.evaluation import evaluate
from uniquery.evaluation.compare import (
    LEAST_IMAGES,
    MOST_SEEDS,
    ImageInterval,
    compare_over_images,
    image_score,
    mean_interval,
    paired_difference,
)
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
        ([0.5], "cannot tell: run at least 3 seeds"),
        ([0.5, 0.51], "cannot tell: run at least 3 seeds"),
        ([0.001, -1.0, 1.0], f"more than {MOST_SEEDS} seeds"),
        ([0.0, 0.0, 0.0], "no difference: less than 0.1 either way"),
        ([-0.012, -0.013, -0.012], "no difference: less than 0.1 either way"),
        ([-0.1, -0.12, -0.11], "hurts"),
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


class TestOverImages:
    def truth_and_results(self, shifts):
        images = [{"id": i, "height": 32, "width": 32} for i in range(len(shifts))]
        rows = [{"image_id": i, "category_id": 1, "segmentation": square(4, 4, 16)} for i in range(len(shifts))]
        annotations = [{**row, "id": i + 1, "iscrowd": 0} for i, row in enumerate(rows)]
        results = [
            {**row, "segmentation": square(4 + shift, 4, 16), "score": 0.9}
            for row, shift in zip(rows, shifts, strict=True)
        ]
        return {"images": images, "categories": [{"id": 1, "name": "a"}], "annotations": annotations}, results

    @pytest.mark.parametrize("seed", range(3))
    def test_values_are_those_of_two_evaluations(self, seed):
        truth, control = random_set(seed)
        variant = [{**row, "score": round(1 - row["score"], 1)} for row in control]
        compared = compare_over_images(truth, control, variant, samples=20)
        before, after = (evaluate(truth, results) for results in (control, variant))
        names = ["AP", "AP50", "AP75", "APs", "APm", "APl"]
        assert [*compared.metrics] == [name for name in names if before.values[name] is not None]
        for name, interval in compared.metrics.items():
            assert compared.values[name] == pytest.approx((before.values[name], after.values[name]), abs=1e-9)
            assert interval.delta == pytest.approx(after.values[name] - before.values[name], abs=1e-9)
        measured = {name for name, value in before.per_class.items() if value is not None}
        assert compared.per_class.keys() == measured
        for name in measured:
            assert compared.class_values[name] == pytest.approx((before.per_class[name], after.per_class[name]))

    def test_the_interval_is_that_of_drawn_images(self):
        """A second bootstrap: images are repeated under new ids, and evaluated as they are."""
        rng = np.random.default_rng(0)
        truth, good = self.truth_and_results([0] * 30)
        _, bad = self.truth_and_results(rng.integers(0, 6, 30).tolist())
        differences = []
        for _ in range(150):
            drawn = rng.integers(0, 30, 30).tolist()
            sample = {**truth, "images": [{**truth["images"][i], "id": n} for n, i in enumerate(drawn)]}
            rows = [truth["annotations"], bad, good]
            objects, *sides = ([{**r[i], "image_id": n, "id": n + 1} for n, i in enumerate(drawn)] for r in rows)
            before, after = (evaluate({**sample, "annotations": objects}, side).values["AP"] for side in sides)
            differences.append(after - before)
        interval = compare_over_images(truth, bad, good, samples=2000).metrics["AP"]
        low, high = np.percentile(differences, [2.5, 97.5])
        spread = high - low
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.15 * spread)
        assert interval.verdict == "better"

    def test_equal_results_differ_by_nothing(self):
        truth, results = self.truth_and_results([0, 1, 2, 3, 0, 1])
        compared = compare_over_images(truth, results, results, samples=50)
        assert compared.metrics["AP"] == compared.per_class["a"] == ImageInterval(0, 0, 0, images=6)
        assert compared.metrics["AP"].verdict == "cannot tell"
        assert compare_over_images(truth, results, [], samples=50).metrics["AP"].verdict == "worse"

    def test_nothing_to_measure(self):
        truth, results = self.truth_and_results([0, 1])
        assert compare_over_images({**truth, "annotations": []}, results, [], samples=5).metrics == {}
        assert compare_over_images(truth, [], [], samples=5).metrics["AP"] == ImageInterval(0, None, None, images=2)

    def test_means(self):
        assert mean_interval([ImageInterval(1, 0, 2, 9), ImageInterval(3, 2, 4, 9)]) == ImageInterval(2, 1, 3, 9)
        few = ImageInterval(1, None, None, 2)
        assert mean_interval([few, few]) == few
        assert mean_interval([]) is None

    def test_a_class_in_few_images_has_no_verdict(self):
        """However large the difference: fewer than six images that agree are chance, by a sign test."""
        assert 2 * 0.5 ** (LEAST_IMAGES - 1) > 0.05 > 2 * 0.5**LEAST_IMAGES
        truth, results = self.truth_and_results([0] * 12)
        truth["categories"].append({"id": 2, "name": "b"})
        for row in (*truth["annotations"][:5], *results[:5]):
            row["category_id"] = 2
        compared = compare_over_images(truth, results, [], samples=50)
        assert compared.per_class["a"] == ImageInterval(-100, -100, -100, images=7)
        assert compared.per_class["b"] == ImageInterval(-100, None, None, images=5)
        assert (compared.per_class["a"].verdict, compared.per_class["b"].verdict) == ("worse", "cannot tell: 5 images")
        assert compared.metrics["AP"].images == compared.metrics["APs"].images == 12

    def test_progress_grows_to_the_end(self):
        truth, results = self.truth_and_results([0, 1, 2, 3])
        seen = []
        compare_over_images(truth, results, results, samples=5, progress=lambda *step: seen.append(step))
        shares = [done / total for done, total in seen]
        assert shares == sorted(set(shares))
        assert shares[0] == 0
        assert 0.7 < shares[-1] < 1
