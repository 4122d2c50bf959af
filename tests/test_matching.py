import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.small_segmenters import boxes_of, ellipses
from uniquery.matching import (
    assign_points,
    box_distances,
    hungarian_match,
    ignored_locations,
    mask_centroids,
    mask_costs,
    match_all,
    random_subset,
)
from uniquery.structures import Assignment, Targets, grid_locations

STRIDES = (8, 16, 32)
RANGES = {8: (-1, 24), 16: (24, 48), 32: (48, 1e8)}
HEIGHT, WIDTH = 96, 128


def naive_centroid(mask):
    xs, ys = [], []
    for y, row in enumerate(mask.tolist()):
        for x, is_set in enumerate(row):
            if is_set:
                xs.append(x)
                ys.append(y)
    return (sum(xs) / len(xs), sum(ys) / len(ys)) if xs else (0.0, 0.0)


def naive_assign(locations, strides, ranges, targets, radius):
    """One location, one instance at a time; Python's min keeps the first of equals."""
    centroids = [naive_centroid(mask) for mask in targets.masks]
    owners = []
    for (x, y), stride, (low, high) in zip(locations.tolist(), strides.tolist(), ranges.tolist(), strict=True):
        rivals = []
        for k, (x0, y0, x1, y1) in enumerate(targets.boxes.tolist()):
            inside = x0 < x < x1 and y0 < y < y1
            cx, cy = centroids[k]
            central = abs(x - cx) < radius * stride and abs(y - cy) < radius * stride
            fits = low <= max(x - x0, y - y0, x1 - x, y1 - y) <= high
            if inside and central and fits:
                rivals.append(((x1 - x0) * (y1 - y0), k))
        owners.append(min(rivals, key=lambda rival: rival[0])[1] if rivals else -1)
    return torch.tensor(owners)


@pytest.fixture(scope="module")
def levels():
    """Locations, strides and size ranges of three levels."""
    locations = [grid_locations(HEIGHT // s, WIDTH // s, s) for s in STRIDES]
    strides = torch.cat([torch.full((len(at),), s) for s, at in zip(STRIDES, locations, strict=True)])
    ranges = torch.tensor([RANGES[s] for s in strides.tolist()])
    return torch.cat(locations), strides, ranges


def random_targets(count, seed, radii=(2, 40)):
    generator = torch.Generator().manual_seed(seed)
    masks = ellipses((HEIGHT, WIDTH), (HEIGHT, WIDTH), count, radii, generator)
    return Targets(torch.zeros(count, dtype=torch.int64), boxes_of(masks), masks)


class TestAssignPoints:
    @pytest.mark.parametrize(("count", "seed"), [(1, 0), (2, 1), (7, 2), (20, 3), (20, 4), (64, 5), (65, 6), (150, 7)])
    def test_equals_a_double_loop(self, levels, count, seed):
        targets = random_targets(count, seed)
        owners = assign_points(*levels, targets)
        assert torch.equal(owners, naive_assign(*levels, targets, radius=1.5))
        assert (owners >= 0).any()

    @pytest.mark.parametrize("radius", [0.75, 3.0])
    def test_other_radii(self, levels, radius):
        targets = random_targets(12, seed=8)
        assert torch.equal(
            assign_points(*levels, targets, radius=radius), naive_assign(*levels, targets, radius=radius)
        )

    @pytest.mark.parametrize("twin", [1, 5, 63, 64, 70, 129])
    def test_of_equal_boxes_the_first_wins(self, levels, twin):
        targets = random_targets(130, seed=9)
        targets.masks[twin], targets.boxes[twin] = targets.masks[0], targets.boxes[0]
        small = targets.boxes.clone()
        small[:] = torch.tensor([1000.0, 1000, 1001, 1001])
        small[[0, twin]] = targets.boxes[[0, twin]]
        alone = Targets(targets.labels, small, targets.masks)
        owners = assign_points(*levels, alone)
        assert set(owners.tolist()) == {-1, 0}
        assert torch.equal(owners, naive_assign(*levels, alone, radius=1.5))
        crowded = assign_points(*levels, targets)
        assert torch.equal(crowded, naive_assign(*levels, targets, radius=1.5))

    def test_the_smallest_wins_across_chunks(self, levels):
        big = random_targets(1, seed=10, radii=(30, 30))
        targets = big[torch.zeros(100, dtype=torch.int64)]
        inner = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
        x, y = mask_centroids(big.masks)[0].round().int().tolist()
        inner[y - 9 : y + 10, x - 9 : x + 10] = True
        targets.masks[80], targets.boxes[80] = inner, boxes_of(inner[None])[0]
        owners = assign_points(*levels, targets)
        assert set(owners.tolist()) == {-1, 0, 80}
        assert torch.equal(owners, naive_assign(*levels, targets, radius=1.5))

    def test_no_instances(self, levels):
        owners = assign_points(*levels, random_targets(0, seed=0))
        assert owners.tolist() == [-1] * len(levels[0])
        assert owners.dtype == torch.int64

    def test_both_ends_of_a_size_range_belong_to_it(self):
        mask = torch.zeros(1, 40, 40, dtype=torch.bool)
        mask[:, 4:36, 4:36] = True
        targets = Targets(torch.zeros(1, dtype=torch.int64), boxes_of(mask), mask)
        at = torch.tensor([[20.0, 20.0]] * 4)  # 16 away from each edge
        ranges = torch.tensor([[-1.0, 16], [16, 32], [-1, 15.9], [16.1, 32]])
        assert assign_points(at, torch.full((4,), 8), ranges, targets).tolist() == [0, 0, -1, -1]

    def test_the_edge_of_a_box_is_outside(self):
        mask = torch.zeros(1, 40, 40, dtype=torch.bool)
        mask[:, 8:13, 8:13] = True
        targets = Targets(torch.zeros(1, dtype=torch.int64), boxes_of(mask), mask)
        at = torch.tensor([[8.0, 10.0], [9.0, 10.0], [13.0, 10.0], [10.0, 8.0], [10.0, 12.0]])
        owners = assign_points(at, torch.full((5,), 8), torch.tensor([[-1.0, 1e8]] * 5), targets)
        assert owners.tolist() == [-1, 0, -1, -1, 0]

    def test_needs_no_gradient(self, levels):
        locations, strides, ranges = levels
        owners = assign_points(locations.clone().requires_grad_(), strides, ranges, random_targets(3, seed=0))
        assert not owners.requires_grad


class TestMaskCentroids:
    def test_equals_a_loop(self):
        masks = torch.rand(6, 9, 13, generator=torch.Generator().manual_seed(0)) > 0.7
        expected = torch.tensor([naive_centroid(mask) for mask in masks])
        torch.testing.assert_close(mask_centroids(masks), expected)

    def test_one_pixel_and_none(self):
        masks = torch.zeros(2, 5, 7, dtype=torch.bool)
        masks[0, 3, 6] = True
        assert mask_centroids(masks).tolist() == [[6, 3], [0, 0]]
        assert mask_centroids(masks[:0]).shape == (0, 2)

    def test_a_large_mask_keeps_its_center(self):
        centroid = mask_centroids(torch.ones(1, 2000, 3000, dtype=torch.bool))
        torch.testing.assert_close(centroid, torch.tensor([[1499.5, 999.5]]))


def test_box_distances():
    distances = box_distances(torch.tensor([3.0, 5.0]), torch.tensor([[1.0, 2.0, 10.0, 20.0], [4.0, 5.0, 6.0, 7.0]]))
    assert distances.tolist() == [[2, 3, 7, 15], [-1, 0, 3, 2]]


class TestRandomSubset:
    def test_no_more_than_the_limit(self):
        torch.manual_seed(0)
        subsets = [random_subset(20, 6, torch.device("cpu")) for _ in range(30)]
        assert all(subset.sum() == 6 for subset in subsets)
        assert torch.stack(subsets).any(0).all()
        torch.manual_seed(0)
        assert torch.equal(random_subset(20, 6, torch.device("cpu")), subsets[0])

    def test_draws_nothing_if_all_fit(self):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        for count in (0, 5, 6):
            assert random_subset(count, 6, torch.device("cpu")).tolist() == [True] * count
        assert torch.equal(torch.get_rng_state(), before)


class TestIgnoredLocations:
    def test_the_pixel_under_a_location_decides(self):
        valid = torch.ones(4, 6, dtype=torch.bool)
        valid[1:3, 2:] = False
        empty = Targets(torch.zeros(0), torch.zeros(0, 4), torch.zeros(0, 4, 6, dtype=torch.bool))
        locations = torch.tensor([[1.9, 1.5], [2.0, 1.5], [5.0, 2.9], [5.0, 3.0], [50.0, 2.0], [3.0, 40.0], [3.0, 1.0]])
        assignment = Assignment(torch.tensor([6]), torch.tensor([0]), torch.tensor([0]))  # the last one owns something
        ignored = ignored_locations(locations, assignment, [replace(empty, valid=valid), empty])
        assert ignored.tolist() == [[False, True, True, False, True, False, False], [False] * 7]


@pytest.mark.parametrize("some", [False, True])
def test_mask_costs_pair_by_pair(some):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 20, generator=generator, dtype=torch.float64)
    targets = torch.rand(3, 20, generator=generator, dtype=torch.float64)
    valid = torch.rand(20, generator=generator) > 0.4 if some else None
    cross_entropy, dice = mask_costs(logits, targets, valid)
    used = torch.ones(20, dtype=torch.bool) if valid is None else valid
    for r, k in itertools.product(range(4), range(3)):
        x, t = logits[r, used], targets[k, used]
        p = x.sigmoid()
        torch.testing.assert_close(cross_entropy[r, k], F.binary_cross_entropy_with_logits(x, t))
        torch.testing.assert_close(dice[r, k], 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3), (3, 0)])
def test_the_cheapest_of_all_pairings(shape):
    costs = np.random.default_rng(0).normal(size=shape)
    rows, columns = hungarian_match(costs)
    few, many = sorted(shape)
    tall = costs if shape[0] >= shape[1] else costs.T
    least = min(sum(tall[r, c] for c, r in enumerate(chosen)) for chosen in itertools.permutations(range(many), few))
    assert len(rows) == len(set(rows)) == len(set(columns)) == few
    assert sorted(rows) == list(rows)
    assert costs[rows, columns].sum() == pytest.approx(least)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_costs_that_are_no_numbers(value):
    rows, columns = hungarian_match(np.full((5, 3), value))
    assert len(rows) == len(set(columns)) == 3
    costs = np.ones((2, 2))
    costs[0, 0] = np.nan
    assert [part.tolist() for part in hungarian_match(costs)] == [[0, 1], [1, 0]]


def test_many_tables():
    costs = np.random.default_rng(0).normal(size=(3, 5, 2))
    pairs = match_all(costs)
    assert pairs.shape == (2, 3, 2)
    for layer, table in enumerate(costs):
        assert [part.tolist() for part in hungarian_match(table)] == pairs[:, layer].tolist()
    assert match_all(costs[:, :, :0]).shape == (2, 3, 0)
