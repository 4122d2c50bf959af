import math

import pytest
import torch

from uniquery.masks.losses import PointSampling, PointTargets, draw_points, point_losses
from uniquery.structures import Targets

SAMPLING = PointSampling(points=8, oversample=3.0, importance=0.75)


def case(rows=4, instances=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, SAMPLING.num_candidates, generator=generator, dtype=torch.float64)
    values = torch.rand(instances, SAMPLING.num_candidates, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, instances, (rows,), generator=generator), values


def naive(logits, owned, values, valid=None):
    """(2, R), point by point."""
    results = []
    for row, k in zip(logits.tolist(), owned.tolist(), strict=True):
        usable = [j for j in range(SAMPLING.num_uncertainty_candidates) if valid is None or valid[j]]
        chosen = sorted(usable, key=lambda j: abs(row[j]))[: SAMPLING.num_uncertain]
        chosen += [j for j in range(SAMPLING.num_uncertainty_candidates, len(row)) if valid is None or valid[j]]
        entropy, overlap, p_sum, t_sum = 0.0, 0.0, 0.0, 0.0
        for j in chosen:
            p, t = 1 / (1 + math.exp(-row[j])), values[k, j].item()
            entropy -= t * math.log(p) + (1 - t) * math.log(1 - p)
            overlap, p_sum, t_sum = overlap + p * t, p_sum + p, t_sum + t
        results.append((entropy / max(len(chosen), 1), 1 - (2 * overlap + 1) / (p_sum + t_sum + 1)))
    return torch.tensor(results, dtype=logits.dtype).T


def test_how_many_points():
    assert (SAMPLING.num_uncertain, SAMPLING.num_uncertainty_candidates, SAMPLING.num_candidates) == (6, 24, 26)
    original = PointSampling(12544, 3.0, 0.75)
    assert (original.num_uncertain, original.num_uncertainty_candidates, original.num_candidates) == (
        9408,
        37632,
        40768,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_naive_way(seed):
    logits, owned, values = case(seed=seed)
    torch.testing.assert_close(
        point_losses(logits, owned, PointTargets(values, None), SAMPLING), naive(logits, owned, values)
    )


@pytest.mark.parametrize("share", [0.8, 0.3, 0.0])
def test_invalid_points_do_not_count(share):
    """Down to fewer valid points than there are to choose, and none."""
    logits, owned, values = case()
    valid = torch.rand(SAMPLING.num_candidates, generator=torch.Generator().manual_seed(1)) < share
    logits.requires_grad_()
    losses = point_losses(logits, owned, PointTargets(values, valid), SAMPLING)
    torch.testing.assert_close(losses, naive(logits, owned, values, valid))
    losses.sum().backward()
    assert not logits.grad[:, ~valid].any()


def test_all_valid_is_the_default():
    logits, owned, values = case()
    everywhere = torch.ones(SAMPLING.num_candidates, dtype=torch.bool)
    torch.testing.assert_close(
        point_losses(logits, owned, PointTargets(values, everywhere), SAMPLING),
        point_losses(logits, owned, PointTargets(values, None), SAMPLING),
    )


def test_gradient():
    logits, owned, values = case()
    assert torch.autograd.gradcheck(
        lambda x: point_losses(x, owned, PointTargets(values, None), SAMPLING), logits.requires_grad_()
    )


@pytest.mark.parametrize("importance", [0.0, 1.0])
def test_no_point_or_every_point_by_importance(importance):
    sampling = PointSampling(8, 3.0, importance)
    logits, owned, values = (
        torch.randn(2, sampling.num_candidates),
        torch.tensor([0, 0]),
        torch.rand(1, sampling.num_candidates),
    )
    losses = point_losses(logits, owned, PointTargets(values, None), sampling)
    chosen = logits[:, 24:] if not importance else logits.gather(1, logits.abs().argsort(dim=1)[:, :8])
    expected_values = values[:, 24:].expand(2, -1) if not importance else values[0][logits.abs().argsort(dim=1)[:, :8]]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(chosen, expected_values, reduction="none").mean(1)
    torch.testing.assert_close(losses[0], expected)


def test_points_are_drawn_inside_the_image():
    torch.manual_seed(0)
    points = draw_points(2000, (0.25, 0.5), torch.zeros(1, dtype=torch.float64))
    assert points.dtype == torch.float64
    assert (points >= 0).all()
    assert points.amax(0).tolist() == pytest.approx([0.5, 0.25], abs=1e-3)


def test_targets_at_points():
    masks = torch.zeros(2, 4, 4, dtype=torch.bool)
    masks[0, :, :2] = True
    valid = torch.ones(4, 4, dtype=torch.bool)
    valid[2:] = False
    points = torch.tensor([[0.25, 0.25], [0.5, 0.25], [0.75, 0.9]])
    targets = Targets(torch.zeros(2), torch.zeros(2, 4), masks, valid=valid)
    sampled = PointTargets.sampled(targets, points)
    assert sampled.values.tolist() == [[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]
    assert sampled.valid.tolist() == [True, True, False]
