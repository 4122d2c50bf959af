"""Matching and losses of predicted boxes, against versions written out pair by pair."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers.small_segmenters import NUM_CLASSES, drawn, small
from uniquery.segmenters.box_set import (
    BoxCriterion,
    BoxOutputs,
    generalized_iou,
    mostly_invalid_boxes,
    to_corners,
    valid_share,
)
from uniquery.segmenters.set_prediction import match_layers
from uniquery.structures import PixelMap

SIZES = ((96, 128), (70, 90))
LAYERS, QUERIES, LENGTH = 3, 9, 5
CRITERION = BoxCriterion(class_weight=2.0, box_weight=5.0, giou_weight=2.0, vector_weight=3.0)


def naive_giou(a, b) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    around = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return width * height / union - (around - union) / around


def corners_of(box) -> list[float]:
    x, y, width, height = box
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def share_of_image(box, size) -> list[float]:
    x0, y0, x1, y1 = box
    height, width = size
    return [(x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height]


@pytest.fixture
def case():
    """Random predictions in float64, targets, and the matched pairs."""
    _, targets = drawn(SIZES, (4, 3))
    torch.manual_seed(0)
    outputs = BoxOutputs(
        PixelMap(torch.zeros(2, 1, 12, 16), 8),
        logits=torch.randn(LAYERS, 2, QUERIES, NUM_CLASSES, dtype=torch.float64),
        boxes=torch.rand(LAYERS, 2, QUERIES, 4, dtype=torch.float64) * 0.6 + 0.2,
        embeddings=torch.zeros(LAYERS, 2, QUERIES, 1),
        sizes=SIZES,
    )
    return outputs, targets, match_layers(CRITERION.costs(outputs, targets), targets, NUM_CLASSES)


def pairs_of(assignment, layer):
    """(image, query) → target."""
    columns = assignment.image, assignment.layer_query[:, layer], assignment.layer_target[:, layer]
    return {(i, q): t for i, q, t in zip(*(c.tolist() for c in columns), strict=True)}


def focal(logit: float, positive: bool) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -0.25 * (1 - p) ** 2 * math.log(p) if positive else -0.75 * p**2 * math.log(1 - p)


class TestGeneralizedIoU:
    def test_pair_by_pair(self):
        torch.manual_seed(0)
        a, b = (to_corners(torch.rand(n, 4, dtype=torch.float64) + 0.01) for n in (6, 5))
        table = generalized_iou(a[:, None], b)
        for i, j in itertools.product(range(6), range(5)):
            assert table[i, j].item() == pytest.approx(naive_giou(a[i].tolist(), b[j].tolist()), abs=1e-12)

    def test_its_range(self):
        same, far = torch.tensor([0.1, 0.1, 0.4, 0.5]), torch.tensor([100.0, 100.0, 100.1, 100.1])
        assert generalized_iou(same, same).item() == pytest.approx(1)
        assert generalized_iou(same, far).item() == pytest.approx(-1, abs=1e-3)

    def test_boxes_without_area_are_finite(self):
        point = torch.full((4,), 0.3, requires_grad=True)
        value = generalized_iou(point, torch.full((4,), 0.3))
        value.backward()
        assert value.isfinite()
        assert point.grad.isfinite().all()

    def test_gradient(self):
        torch.manual_seed(0)
        a, b = (to_corners(torch.rand(4, 4, dtype=torch.float64) + 0.1).requires_grad_() for _ in range(2))
        assert torch.autograd.gradcheck(generalized_iou, (a, b))


class TestValidShare:
    def test_pixel_by_pixel(self):
        generator = torch.Generator().manual_seed(0)
        valid = torch.rand(12, 17, generator=generator) > 0.4
        boxes = torch.rand(40, 2, 2, generator=generator) * 24 - 4
        boxes = torch.cat([boxes.amin(1), boxes.amax(1)], dim=1)
        for box, share in zip(boxes, valid_share(boxes, valid), strict=True):
            x0, y0, x1, y1 = box.tolist()
            inside = [
                valid[y, x].item()
                for y in range(12)
                for x in range(17)
                if x0 < x + 1 and x < x1 and y0 < y + 1 and y < y1
            ]
            assert share.item() == pytest.approx(sum(inside) / len(inside) if inside else 1)

    def test_all_is_valid(self):
        boxes = torch.rand(2, 3, 4)
        assert valid_share(boxes, None).tolist() == [[1, 1, 1]] * 2


class TestCosts:
    def test_pair_by_pair(self, case):
        outputs, targets, _ = case
        for i, costs in enumerate(CRITERION.costs(outputs, targets)):
            assert costs.shape == (LAYERS, QUERIES, len(targets[i]))
            for layer, q, k in itertools.product(range(LAYERS), range(QUERIES), range(len(targets[i]))):
                logit = outputs.logits[layer, i, q, targets[i].labels[k]].item()
                box = outputs.boxes[layer, i, q].tolist()
                wanted = share_of_image(targets[i].boxes[k].tolist(), SIZES[i])
                expected = 2 * (focal(logit, True) - focal(logit, False))
                expected += 5 * sum(abs(a - b) for a, b in zip(box, wanted, strict=True))
                expected -= 2 * naive_giou(corners_of(box), corners_of(wanted))
                assert costs[layer, q, k].item() == pytest.approx(expected, rel=1e-5)

    def test_the_masks_and_the_padding_do_not_matter(self, case):
        outputs, targets, _ = case
        changed = [replace(t, masks=F.pad(~t.masks, (0, 32, 0, 64))) for t in targets]
        for a, b in zip(CRITERION.costs(outputs, targets), CRITERION.costs(outputs, changed), strict=True):
            assert torch.equal(a, b)


def losses_by_hand(outputs, targets, assignment, vectors, target_vectors, ignored=(), shares=None):
    """Class, box, GIoU and vector loss of each layer."""
    starts = [0, len(targets[0])]
    count = sum(len(t) for t in targets)
    result = []
    for layer in range(LAYERS):
        owned = pairs_of(assignment, layer)
        classes = boxes = overlap = distance = weights = 0.0
        for i, q in itertools.product(range(2), range(QUERIES)):
            target = owned.get((i, q))
            if target is not None or (layer, i, q) not in ignored:
                for c, logit in enumerate(outputs.logits[layer, i, q].tolist()):
                    classes += focal(logit, target is not None and targets[i].labels[target] == c)
        for row, ((i, q), target) in enumerate(owned.items()):
            box = outputs.boxes[layer, i, q].tolist()
            wanted = share_of_image(targets[i].boxes[target].tolist(), SIZES[i])
            boxes += sum(abs(a - b) for a, b in zip(box, wanted, strict=True))
            overlap += 1 - naive_giou(corners_of(box), corners_of(wanted))
            weight = 1.0 if shares is None else shares[starts[i] + target]
            difference = vectors[row, layer] - target_vectors[starts[i] + target]
            distance += weight * difference.abs().mean().item()
            weights += weight
        result.append([2 * classes / count, 5 * boxes / count, 2 * overlap / count, 3 * distance / max(weights, 1)])
    return result


NAMES = ("loss_class", "loss_box", "loss_giou", "loss_vector")


class TestLosses:
    @pytest.fixture
    def vectors(self, case):
        """Of matched queries, and of instances."""
        torch.manual_seed(1)
        return torch.randn(len(case[2]), LAYERS, LENGTH, dtype=torch.float64), torch.randn(7, LENGTH)

    def test_query_by_query(self, case, vectors):
        outputs, targets, assignment = case
        losses = CRITERION.losses(outputs, targets, assignment, *vectors)
        expected = losses_by_hand(outputs, targets, assignment, *vectors)
        assert [losses[name].item() for name in NAMES] == pytest.approx(expected[-1], rel=1e-6)
        assert losses["loss_auxiliary"].item() == pytest.approx(sum(map(sum, expected[:-1])), rel=1e-6)

    def test_invalid_pixels(self, case, vectors):
        """Unmatched queries there are no negatives, and vectors count by the valid share of their box."""
        outputs, targets, assignment = case
        valid = torch.ones(96, 128, dtype=torch.bool)
        valid[:, 50:] = False
        targets = [replace(targets[0], valid=valid), targets[1]]
        ignored = mostly_invalid_boxes(outputs, targets)
        assert not ignored[:, 1].any()
        for layer, q in itertools.product(range(LAYERS), range(QUERIES)):
            x0, _, x1, _ = corners_of(outputs.boxes[layer, 0, q].tolist())
            left, right = max(math.floor(128 * x0), 0), min(math.ceil(128 * x1), 128)
            assert ignored[layer, 0, q] == (2 * (min(50, right) - min(left, 50)) < right - left)
        there = set(map(tuple, ignored.nonzero().tolist()))
        matched = {(layer, *pair) for layer in range(LAYERS) for pair in pairs_of(assignment, layer)}
        assert there - matched
        shares = torch.cat([valid_share(t.boxes, t.valid) for t in targets]).tolist()
        assert min(shares) < 0.9
        losses = CRITERION.losses(outputs, targets, assignment, *vectors)
        expected = losses_by_hand(outputs, targets, assignment, *vectors, ignored=there, shares=shares)
        assert [losses[name].item() for name in NAMES] == pytest.approx(expected[-1], rel=1e-6)
        assert losses["loss_auxiliary"].item() == pytest.approx(sum(map(sum, expected[:-1])), rel=1e-6)

    def test_gradients(self, case, vectors):
        outputs, targets, assignment = case
        predicted = vectors[0].requires_grad_()

        def total(logits, boxes, predicted):
            changed = replace(outputs, logits=logits, boxes=boxes)
            return torch.stack(
                list(CRITERION.losses(changed, targets, assignment, predicted, vectors[1]).values())
            ).sum()

        leaves = outputs.logits.clone().requires_grad_(), outputs.boxes.clone().requires_grad_()
        assert torch.autograd.gradcheck(total, (*leaves, predicted), fast_mode=True)

    def test_no_instance(self, case):
        outputs, targets, _ = case
        none = [t[:0] for t in targets]
        logits, boxes = (t.clone().requires_grad_() for t in (outputs.logits, outputs.boxes))
        outputs = replace(outputs, logits=logits, boxes=boxes)
        assignment = match_layers(CRITERION.costs(outputs, none), none, NUM_CLASSES)
        predicted = torch.zeros(0, LAYERS, LENGTH, requires_grad=True)
        losses = CRITERION.losses(outputs, none, assignment, predicted, torch.zeros(0, LENGTH))
        torch.stack(list(losses.values())).sum().backward()
        assert losses["loss_class"] > 0
        assert [losses[name].item() for name in NAMES[1:]] == [0, 0, 0]
        assert logits.grad.any()
        assert not boxes.grad.any()
        assert predicted.grad is not None


def test_more_instances_than_queries():
    """As many as there are queries are matched; the rest still count in the divisor."""
    images, targets = drawn(SIZES, (7, 3), radii=(3, 15))
    model = small("solq", queries=5)
    outputs = model(images)
    assignment = model.assign(outputs, targets)
    assert assignment.image.tolist() == [0] * 5 + [1] * 3
    assert all(loss.isfinite() for loss in model.losses(outputs, targets, assignment).values())
    expected = model.criterion.box_losses(outputs, targets, assignment)["loss_box"][-1] * 10 / 8
    fewer = [targets[0][assignment.target[:5]], targets[1]]
    renumbered = assignment.layer_target.clone()
    for layer in range(renumbered.shape[1]):
        if layer < renumbered.shape[1] - 1:
            renumbered[:5, layer] = 0  # only the last layer is compared
    renumbered[:5, -1] = torch.arange(5)
    again = model.criterion.box_losses(outputs, fewer, replace(assignment, layer_target=renumbered))["loss_box"][-1]
    torch.testing.assert_close(again, expected)
