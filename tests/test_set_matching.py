import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from uniquery.matching import cheapest_pairs, mask_costs, match_all


@pytest.mark.parametrize("some", [False, True])
def test_mask_costs_pair_by_pair(some):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 20, generator=generator, dtype=torch.float64)
    wanted = torch.rand(3, 20, generator=generator, dtype=torch.float64)
    known = torch.rand(20, generator=generator) > 0.4 if some else None
    cross_entropy, dice = mask_costs(logits, wanted, known)
    used = torch.ones(20, dtype=torch.bool) if known is None else known
    for r, k in itertools.product(range(4), range(3)):
        x, t = logits[r, used], wanted[k, used]
        p = x.sigmoid()
        torch.testing.assert_close(cross_entropy[r, k], F.binary_cross_entropy_with_logits(x, t))
        torch.testing.assert_close(dice[r, k], 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3), (3, 0)])
def test_the_cheapest_of_all_pairings(shape):
    costs = np.random.default_rng(0).normal(size=shape)
    rows, columns = cheapest_pairs(costs)
    few, many = sorted(shape)
    tall = costs if shape[0] >= shape[1] else costs.T
    least = min(sum(tall[r, c] for c, r in enumerate(chosen)) for chosen in itertools.permutations(range(many), few))
    assert len(rows) == len(set(rows)) == len(set(columns)) == few
    assert sorted(rows) == list(rows)
    assert costs[rows, columns].sum() == pytest.approx(least)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_costs_that_are_no_numbers(value):
    rows, columns = cheapest_pairs(np.full((5, 3), value))
    assert len(rows) == len(set(columns)) == 3
    costs = np.ones((2, 2))
    costs[0, 0] = np.nan
    assert [part.tolist() for part in cheapest_pairs(costs)] == [[0, 1], [1, 0]]


def test_many_tables():
    costs = np.random.default_rng(0).normal(size=(3, 5, 2))
    pairs = match_all(costs)
    assert pairs.shape == (2, 3, 2)
    for layer, table in enumerate(costs):
        assert [part.tolist() for part in cheapest_pairs(table)] == pairs[:, layer].tolist()
    assert match_all(costs[:, :, :0]).shape == (2, 3, 0)
