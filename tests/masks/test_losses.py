import math

import pytest
import torch
from torch.autograd import gradcheck

from uniquery.masks.losses import dice, sigmoid_focal


def naive_dice(probabilities, targets, eps=1e-5):
    losses = []
    for p_map, t_map in zip(probabilities.tolist(), targets.tolist(), strict=True):
        both = p_squares = t_squares = 0.0
        for p_row, t_row in zip(p_map, t_map, strict=True):
            for p, t in zip(p_row, t_row, strict=True):
                both += p * t
                p_squares += p * p
                t_squares += t * t
        losses.append(1 - 2 * both / (p_squares + t_squares + eps))
    return torch.tensor(losses, dtype=torch.float64)


def naive_focal(logit, target, alpha, gamma):
    p = 1 / (1 + math.exp(-logit))
    positive = -alpha * (1 - p) ** gamma * math.log(p)
    negative = -(1 - alpha) * p**gamma * math.log(1 - p)
    return positive if target else negative


@pytest.fixture
def maps():
    torch.manual_seed(0)
    probabilities = torch.rand(4, 5, 6, dtype=torch.float64)
    return probabilities, torch.rand(4, 5, 6) > 0.6


class TestDice:
    def test_equals_the_formula(self, maps):
        probabilities, targets = maps
        torch.testing.assert_close(dice(probabilities, targets), naive_dice(probabilities, targets.double()))

    def test_soft_targets(self, maps):
        probabilities, _ = maps
        soft = torch.rand_like(probabilities)
        torch.testing.assert_close(dice(probabilities, soft), naive_dice(probabilities, soft))

    def test_one_value_per_row_whatever_the_shape(self, maps):
        probabilities, targets = maps
        torch.testing.assert_close(
            dice(probabilities.flatten(1), targets.flatten(1)), dice(probabilities[:, None], targets[:, None])
        )
        assert dice(probabilities[:0], targets[:0]).shape == (0,)

    def test_limits(self):
        mask = torch.tensor([[1.0, 1, 0, 0]])
        assert dice(mask, mask).item() == pytest.approx(0, abs=1e-4)
        assert dice(1 - mask, mask).item() == 1
        assert dice(torch.zeros(1, 4), torch.zeros(1, 4)).item() == 1
        assert dice(mask, mask, eps=2.0).item() == pytest.approx(1 - 4 / 6)

    def test_gradient(self, maps):
        probabilities, targets = maps
        assert gradcheck(lambda p: dice(p, targets), probabilities.requires_grad_())


class TestSigmoidFocal:
    @pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.7, 1.0), (0.5, 3.5)])
    def test_equals_the_formula(self, alpha, gamma):
        torch.manual_seed(0)
        logits, targets = 3 * torch.randn(4, 7, dtype=torch.float64), torch.rand(4, 7) > 0.7
        expected = [
            [naive_focal(logit, target, alpha, gamma) for logit, target in zip(*rows, strict=True)]
            for rows in zip(logits.tolist(), targets.tolist(), strict=True)
        ]
        torch.testing.assert_close(
            sigmoid_focal(logits, targets, alpha, gamma), torch.tensor(expected, dtype=torch.float64)
        )

    def test_defaults_are_the_papers(self):
        logits, targets = torch.tensor([0.3, -1.2]), torch.tensor([1.0, 0.0])
        expected = [naive_focal(0.3, True, 0.25, 2.0), naive_focal(-1.2, False, 0.25, 2.0)]
        torch.testing.assert_close(sigmoid_focal(logits, targets), torch.tensor(expected))

    def test_without_focus_it_is_half_the_cross_entropy(self):
        torch.manual_seed(0)
        logits, targets = torch.randn(50), (torch.rand(50) > 0.5).float()
        cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        torch.testing.assert_close(sigmoid_focal(logits, targets, alpha=0.5, gamma=0.0), cross_entropy / 2)

    def test_extreme_logits_stay_finite(self):
        logits = torch.tensor([200.0, -200.0, 200.0, -200.0], requires_grad=True)
        loss = sigmoid_focal(logits, torch.tensor([1.0, 0.0, 0.0, 1.0]))
        loss.sum().backward()
        torch.testing.assert_close(loss.detach(), torch.tensor([0.0, 0.0, 0.75 * 200, 0.25 * 200]))
        torch.testing.assert_close(logits.grad, torch.tensor([0.0, 0.0, 0.75, -0.25]))

    def test_gradient(self):
        torch.manual_seed(0)
        targets = torch.rand(3, 5) > 0.5
        assert gradcheck(
            lambda x: sigmoid_focal(x, targets), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        )
