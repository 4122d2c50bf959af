"""Paired differences over seeds, against scipy's own test and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from uniquery.evaluation.compare import MOST_SEEDS, paired_difference


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
