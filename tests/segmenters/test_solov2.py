"""What is SOLOv2's own, its formulas against loops; what it shares with the others is in test_contract.py."""

import itertools
import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch.autograd import gradcheck

from helpers.reference import reference
from helpers.small_segmenters import NUM_CLASSES, drawn, small
from uniquery import parallel
from uniquery.backbones.resnet import ResNet
from uniquery.layers import winograd
from uniquery.layers.winograd import Winograd
from uniquery.masks.geometry import mask_boxes
from uniquery.masks.losses import dice
from uniquery.masks.paste import rle_boxes
from uniquery.masks.suppression import matrix_nms
from uniquery.segmenters import grid, grid_segmenter
from uniquery.segmenters.grid import find_peaks, positive_cells, quarter_masks
from uniquery.segmenters.solov2 import SOLOv2, SOLOv2Config
from uniquery.structures import Images, Queries, Targets
from uniquery.weights.foreign.adelaidet import is_condinst, is_solov2, solov2_names

SIZES = ((96, 128), (70, 90))
CROWD = {"sizes": ((96, 128), (96, 96)), "counts": (40, 25), "radii": (3, 30)}


@pytest.fixture
def batch():
    return drawn(SIZES, (4, 3))


def pairs_of(assignment):
    return sorted(zip(*(x.tolist() for x in (assignment.image, assignment.query, assignment.target)), strict=True))


def naive_cells(target: Targets, extent, config: SOLOv2Config):
    """Cell and instance of each pair, instance by instance and cell by cell, in single precision as the original."""
    pairs, start = [], 0
    for side, (low, high) in zip(config.grids, config.size_ranges, strict=True):
        for k, (mask, (x0, y0, x1, y1)) in enumerate(zip(target.masks, target.boxes.tolist(), strict=True)):
            ys, xs = mask.nonzero(as_tuple=True)
            if not len(ys) or not low <= math.sqrt((x1 - x0) * (y1 - y0)) <= high:
                continue
            spans = []
            for center, length, whole in (
                (ys.double().mean(), y1 - y0, extent[0]),
                (xs.double().mean(), x1 - x0, extent[1]),
            ):
                half = np.float32(0.5 * length) * np.float32(config.center_fraction)
                first, middle, last = (
                    int(np.float32(np.float32(center) + d) / np.float32(whole) // np.float32(1 / side))
                    for d in (-half, 0, half)
                )
                spans.append(range(max(first, middle - 1, 0), min(last, middle + 1, side - 1) + 1))
            pairs += [(start + row * side + column, k) for row, column in itertools.product(*spans)]
        start += side * side
    return sorted(pairs)


class TestAssignment:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
    def test_equals_loops(self, seed, fraction):
        model = small("solov2", center_fraction=fraction)
        images, targets = drawn(**CROWD, seed=seed)
        assignment = model.assign(model(images), targets)
        expected = [
            (i, *pair)
            for i, target in enumerate(targets)
            for pair in naive_cells(target, images.pixels.shape[-2:], model.config)
        ]
        assert len(expected) > 50
        assert pairs_of(assignment) == sorted(expected)

    def test_the_last_instance_names_a_cell_that_two_share(self):
        masks = torch.zeros(3, 64, 64, dtype=torch.bool)
        masks[0, 14:35, 14:35] = masks[1, 18:31, 18:31] = masks[2, 2:7, 2:7] = True
        target = Targets(torch.tensor([2, 1, 0]), mask_boxes(masks), masks)
        model = small("solov2", grids=(4,), size_ranges=((0, 99),))
        images = Images(torch.zeros(1, 3, 64, 64), ((64, 64),))
        outputs = model(images)
        assignment = model.assign(outputs, [target])
        assert pairs_of(assignment) == [(0, 0, 2), (0, 5, 0), (0, 5, 1)]
        image, cell, labels = positive_cells(assignment, [target], 16)
        assert (image.tolist(), cell.tolist(), labels.tolist()) == ([0, 0], [0, 5], [0, 1])
        queries = model.queries(outputs, assignment)  # but both masks train its kernel
        assert sorted(queries.target.tolist()) == [0, 1, 2]
        assert torch.equal(queries.embeddings[queries.target == 0], queries.embeddings[queries.target == 1])


class TestLosses:
    def test_equal_the_formulas(self):
        """Both terms, summed cell by cell and pixel by pixel."""
        model = small("solov2").double()
        images, targets = drawn(((64, 96), (64, 64)), (12, 4), radii=(4, 24))
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        pairs = pairs_of(assignment)
        named = {(i, at): targets[i].labels[t].item() for i, at, t in pairs}  # the last instance comes last
        assert len(named) < len(pairs)
        of_class = of_mask = 0.0
        for i, at in itertools.product(range(2), range(outputs.logits.shape[1])):
            for c, logit in enumerate(outputs.logits[i, at].tolist()):
                p = 1 / (1 + math.exp(-logit))
                hit = named.get((i, at)) == c
                of_class -= 0.25 * (1 - p) ** 2 * math.log(p) if hit else 0.75 * p**2 * math.log(1 - p)
        for i, at, t in pairs:
            both, squares = 0.0, 0.002
            logits = torch.einsum("d,dhw->hw", outputs.kernels[i, at], outputs.pixels.embeddings[i])
            for y, x in itertools.product(*map(range, logits.shape)):
                p = 1 / (1 + math.exp(-logits[y, x].item()))
                m = float(targets[i].masks[t, 4 * y + 1 : 4 * y + 3, 4 * x + 1 : 4 * x + 3].sum() >= 2)
                both, squares = both + p * m, squares + p * p + m
            of_mask += 1 - 2 * both / squares
        losses = model.losses(outputs, targets, assignment)
        assert losses["loss_class"].item() == pytest.approx(of_class / (len(named) + 1))
        assert losses["loss_mask"].item() == pytest.approx(3 * of_mask / len(pairs))

    @pytest.mark.parametrize("valid_part", ["everywhere", "on the left"])
    def test_gradient_of_the_mask_loss(self, valid_part):
        masks = torch.zeros(3, 32, 32, dtype=torch.bool)
        masks[0, 4:20, 4:28] = masks[1, 20:28, :20] = masks[2, 9:, 9:] = True
        targets = [Targets(torch.zeros(len(m)), mask_boxes(m), m) for m in (masks[:2], masks[2:])]
        if valid_part == "on the left":
            valid = torch.arange(32).expand(32, 32) < 14  # cuts through a cell, which is then left out
            targets = [replace(targets[0], valid=valid), targets[1]]
        queries = Queries(torch.zeros(4, 32), torch.tensor([0, 1, 0, 0]), torch.tensor([1, 0, 0, 1]))
        logits = torch.randn(4, 8, 8, dtype=torch.float64, requires_grad=True)
        model = small("solov2")
        assert gradcheck(lambda x: model.mask_loss(x, queries, targets), logits)
        (gradient,) = torch.autograd.grad(model.mask_loss(logits, queries, targets), logits)
        assert gradient[queries.image == 0][:, :, :3].all()
        assert gradient[queries.image == 0][:, :, 3:].any() == (valid_part == "everywhere")
        assert gradient[queries.image == 1].all()

    def test_invalid_pixels_are_left_out_of_the_dice(self):
        _, targets = drawn(((32, 64),), (3,), radii=(6, 12))
        valid = torch.arange(64).expand(32, 64) < 32
        queries = Queries(torch.zeros(3, 32), torch.zeros(3, dtype=torch.int64), torch.arange(3))
        logits = torch.randn(3, 8, 16)
        expected = quarter_masks(targets[0].masks)[..., :8]
        loss = small("solov2").mask_loss(logits, queries, [replace(targets[0], valid=valid)])
        torch.testing.assert_close(loss, 3 * dice(logits[..., :8].sigmoid(), expected, eps=2e-3).mean())

    def test_only_masks_are_capped(self, batch):
        images, targets = batch
        capped, free = small("solov2", max_queries=4).eval(), small("solov2").eval()
        outputs = free(images)
        torch.manual_seed(0)
        every, some, others = (model.assign(outputs, targets) for model in (free, capped, capped))
        assert len(every) == len(some) == len(others) > 6
        assert every.has_query.all()
        assert some.has_query.sum() == others.has_query.sum() == 4
        assert not torch.equal(some.has_query, others.has_query)  # drawn in each step

        queries = capped.queries(outputs, some)
        chosen = free.queries(outputs, every)[some.has_query]
        for field in fields(queries):
            assert torch.equal(getattr(queries, field.name), getattr(chosen, field.name)), field.name
        again = capped.queries(outputs, some)
        assert torch.equal(queries.embeddings, again.embeddings)

        few, all_losses = capped.losses(outputs, targets, some), free.losses(outputs, targets, every)
        for name in ("loss_class",):
            assert torch.equal(few[name], all_losses[name]), name
        mask_loss = capped.mask_loss(capped.decode(queries, outputs.pixels), queries, targets)
        assert torch.equal(few["loss_mask"], mask_loss)
        assert not torch.equal(few["loss_mask"], all_losses["loss_mask"])

    @pytest.mark.parametrize("counts", [(3, 0, 1, 4), (0, 1, 0, 0), (0, 0, 0, 0)])
    def test_two_halves_learn_like_the_whole(self, counts, monkeypatch):
        """Each process meets the mean of what both say, as `parallel` has it; also where that mean is below one."""
        model = small("solov2", center_fraction=0.0).double()
        images, targets = drawn(((64, 64),) * 4, counts)
        halves = [(Images(images.pixels[s], images.sizes[s]), targets[s]) for s in (slice(0, 2), slice(2, 4))]
        whole = gradients(model, images, targets)
        said = [[], []]
        for mine, half in zip(said, halves, strict=True):
            for module in (parallel, grid_segmenter):
                monkeypatch.setattr(module, "all_reduce_mean", lambda v, mine=mine: mine.append(v) or v)
            gradients(model, *half)
        means = [(a + b) / 2 for a, b in zip(*said, strict=True)]
        for module in (parallel, grid_segmenter):
            monkeypatch.setattr(module, "get_world_size", lambda: 2)
        parts = []
        for half in halves:
            told = iter(means)
            for module in (parallel, grid_segmenter):
                monkeypatch.setattr(module, "all_reduce_mean", lambda _, told=told: next(told))
            parts.append(gradients(model, *half))
        for name, gradient in whole.items():
            torch.testing.assert_close((parts[0][name] + parts[1][name]) / 2, gradient, msg=lambda m, n=name: n + m)


def gradients(model, images, targets):
    model.zero_grad()
    outputs = model(images)
    torch.stack(list(model.losses(outputs, targets, model.assign(outputs, targets)).values())).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


class TestForward:
    @pytest.mark.parametrize(
        ("grids", "ranges"),
        [((7,), ((0, 999),)), ((9, 5), ((0, 30), (20, 999))), ((3, 2, 1, 1), ((0, 20), (20, 40), (40, 60), (60, 80)))],
    )
    def test_fewer_levels(self, batch, grids, ranges):
        model = small("solov2", grids=grids, size_ranges=ranges)
        outputs = model(batch[0])
        assert outputs.logits.shape == (2, sum(s * s for s in grids), NUM_CLASSES)
        found = gradients(model, *batch)
        assert all(gradient.isfinite().all() for gradient in found.values())
        assert len(model.eval().predict(outputs, SIZES)) == 2

    @pytest.mark.parametrize("size", [(32, 32), (32, 96)])
    def test_the_smallest_images(self, size):
        images, targets = drawn((size,), (2,), radii=(4, 9))
        model = small("solov2")
        assert all(gradient.isfinite().all() for gradient in gradients(model, images, targets).values())
        (instances,) = model.eval().predict(model(images), [size])
        assert instances.masks.shape[1:] == size

    def test_fewer_products_change_neither_outputs_nor_gradients(self, monkeypatch):
        batch = drawn(((64, 96),), (6,))
        model = small("solov2", channels=256, head_channels=256, head_convs=2).double()
        calls, apply = [], Winograd.apply
        monkeypatch.setattr(Winograd, "apply", lambda *a: calls.append(a[0].shape) or apply(*a))
        outputs, found = model(batch[0]), gradients(model, *batch)
        assert sorted(shape[1] for shape in calls[:4]) == [256, 256, 256, 258]  # all of both towers
        calls.clear()
        monkeypatch.setattr(winograd, "_use_winograd", lambda *_: False)
        expected, wanted = model(batch[0]), gradients(model, *batch)
        assert not calls
        close = {"rtol": 1e-9, "atol": 1e-11}
        torch.testing.assert_close(outputs.logits, expected.logits, **close)
        torch.testing.assert_close(outputs.kernels, expected.kernels, **close)
        for name, gradient in wanted.items():
            assert gradient.any(), name
            torch.testing.assert_close(found[name], gradient, **close, msg=lambda m, n=name: n + m)

    def test_embeddings_are_never_negative(self, batch):
        embeddings = small("solov2")(batch[0]).pixels.embeddings
        assert (embeddings >= 0).all()
        assert embeddings.any()

    def test_kernels_know_where_they_are(self):
        """On an image of one color, classes of a grid's inner cells agree; kernels differ."""
        torch.manual_seed(0)
        model = small("solov2", grids=(12,), size_ranges=((0, 999),)).eval()
        with torch.no_grad():
            logits, kernels = model.head([torch.ones(1, 32, 16, 16)], (12,))
        inner = torch.zeros(12, 12, dtype=torch.bool)
        inner[2:-2, 2:-2] = True
        assert logits[0, inner.flatten()].std(0).max() < 1e-5
        assert kernels[0, inner.flatten()].std(0).min() > 1e-4


class TestMatrixNms:
    @staticmethod
    def naive(masks, scores, labels, sigma):
        """Pair by pair: what a better mask takes away, relative to what it may have lost itself."""

        def overlap(i, j):
            return ((masks[i] & masks[j]).sum() / (masks[i] | masks[j]).sum()).item()

        def worst(i):
            return max([overlap(j, i) for j in range(i) if labels[j] == labels[i]], default=0.0)

        kept = []
        for i, score in enumerate(scores.tolist()):
            factors = [
                math.exp(-sigma * overlap(j, i) ** 2) / math.exp(-sigma * worst(j) ** 2)
                for j in range(i)
                if labels[j] == labels[i]
            ]
            kept.append(score * min([1.0, *factors]))
        return torch.tensor(kept)

    @pytest.mark.parametrize("sigma", [0.5, 2.0])
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_loops(self, seed, sigma):
        _, (target,) = drawn(((48, 64),), (30,), radii=(4, 20), seed=seed)
        scores = torch.rand(30, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
        decayed = matrix_nms(target.masks, scores, target.labels, sigma)
        assert (decayed < 0.95 * scores).any()
        torch.testing.assert_close(decayed, self.naive(target.masks, scores, target.labels, sigma))

    def test_limits(self):
        masks = torch.zeros(3, 4, 4, dtype=torch.bool)
        masks[0, :2] = masks[1, 2:] = masks[2, :2] = True
        scores = torch.tensor([0.9, 0.8, 0.7])
        apart = matrix_nms(masks[:2], scores[:2], torch.zeros(2), 2.0)
        assert torch.equal(apart, scores[:2])
        assert torch.equal(matrix_nms(masks, scores, torch.tensor([0, 0, 1]), 2.0), scores)
        same = matrix_nms(masks, scores, torch.zeros(3), 2.0)
        torch.testing.assert_close(same, scores * torch.tensor([1, 1, math.exp(-2)]))
        assert matrix_nms(masks[:0], scores[:0], scores[:0], 2.0).shape == (0,)


class TestPredict:
    @torch.no_grad()
    def test_equals_the_dense_way(self, batch):
        """Every candidate decoded at once, and resized step by step."""
        model = small("solov2", score_threshold=0.01, candidates=40, max_detections=15).eval()
        outputs = model(batch[0])
        for i, size in enumerate([(192, 256), (41, 67)]):
            scores = outputs.logits[i].sigmoid()
            cells, labels = (find_peaks(scores, model.config.grids) & (scores > 0.01)).nonzero(as_tuple=True)
            maps = torch.einsum("nd,dhw->nhw", outputs.kernels[i, cells], outputs.pixels.embeddings[i]).sigmoid()
            areas = (maps > 0.5).sum((1, 2))
            ends = torch.tensor(model.config.grids).square().cumsum(0)
            strides = torch.tensor([8, 8, 16, 32, 32])[torch.searchsorted(ends, cells, right=True)]
            maskness = (maps * (maps > 0.5)).sum((1, 2)) / areas
            order = (scores[cells, labels] * maskness).where(areas > strides, -1).argsort(descending=True)[:40]
            order = order[areas[order] > strides[order]]
            best = (scores[cells, labels] * maskness)[order]
            decayed = TestMatrixNms.naive(maps[order] > 0.5, best, labels[order], 2.0)
            final = decayed.argsort(descending=True)[:15]
            whole = F.interpolate(maps[order][final][None], scale_factor=4, mode="bilinear")
            dense = F.interpolate(whole[..., : SIZES[i][0], : SIZES[i][1]], size=size, mode="bilinear")[0]
            visible = (dense > 0.5).flatten(1).any(1)
            instances = model.predict(outputs, [size, size])[i]
            torch.testing.assert_close(instances.scores, decayed[final][visible])
            assert torch.equal(instances.labels, labels[order][final][visible])
            decided = (dense[visible] - 0.5).abs() > 1e-5
            assert torch.equal(instances.masks[decided], (dense[visible] > 0.5)[decided])
            assert 0.02 < instances.masks.float().mean() < 0.98

    @torch.no_grad()
    def test_boxes_lie_around_the_masks(self, batch):
        model = small("solov2").eval()
        for instances in model.predict(model(batch[0]), SIZES):
            assert len(instances) > 5
            assert torch.equal(instances.boxes, mask_boxes(instances.masks))
        assert rle_boxes([]).shape == (0, 4)

    @torch.no_grad()
    def test_masks_scored_in_parts_score_the_same(self, batch, monkeypatch):
        model = small("solov2").eval()
        outputs = model(batch[0])
        whole = model._candidates(outputs, 0, 0.5)
        monkeypatch.setattr(grid, "_MASKS_AT_ONCE", 7)
        for a, b in zip(whole, model._candidates(outputs, 0, 0.5), strict=True):
            torch.testing.assert_close(a, b)

    @torch.no_grad()
    def test_the_thresholds(self, batch):
        free, strict = (small("solov2", **s).eval() for s in ({}, {"score_threshold": 0.02, "final_threshold": 0.01}))
        outputs = free(batch[0])
        all_of_them, some = (model.predict(outputs, SIZES)[0] for model in (free, strict))
        assert 0 < len(some) < len(all_of_them)
        assert some.scores.min() >= 0.01
        cells, labels, _ = strict._candidates(outputs, 0, 0.5)
        assert (outputs.logits[0, cells, labels].sigmoid() > 0.02).all()

    @torch.no_grad()
    def test_masks_that_only_lie_in_the_padding_are_dropped(self):
        images, _ = drawn(((64, 64),), (2,))
        model = small("solov2").eval()
        outputs = replace(model(images), sizes=((8, 8),))
        embeddings = outputs.pixels.embeddings.clone()
        embeddings[..., :3, :3] = 0  # a probability of one half, and the mask has to be above
        outputs = replace(outputs, pixels=replace(outputs.pixels, embeddings=embeddings))
        assert len(model._candidates(outputs, 0, 0.5)[0]) > 0
        assert len(model.predict(outputs, [(8, 8)])[0]) == 0

    @torch.no_grad()
    def test_no_more_than_asked_for(self, batch):
        capped, free = (small("solov2", max_detections=count).eval() for count in (3, 100))
        few, all_of_them = (model.predict(model(batch[0]), SIZES)[0] for model in (capped, free))
        assert len(few) == 3 < len(all_of_them)
        assert torch.equal(few.scores, all_of_them.scores[:3])


class TestInvalidPixels:
    """The right part of the first image is invalid."""

    @pytest.fixture
    def case(self, batch):
        images, targets = batch
        valid = torch.ones(96, 128, dtype=torch.bool)
        valid[:, 60:] = False
        targets = [replace(targets[0], valid=valid), targets[1]]
        model = small("solov2").double()
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        owned = set(zip(assignment.image.tolist(), assignment.query.tolist(), strict=True))
        centers = [
            ((column + 0.5) * 128 / side, (row + 0.5) * 96 / side)
            for side in model.config.grids
            for row in range(side)
            for column in range(side)
        ]
        ignored = [
            at
            for at, (x, y) in enumerate(centers)
            if (0, at) not in owned and not valid[min(int(y), 95), min(int(x), 127)]
        ]
        assert len(ignored) > 20
        return model, outputs, targets, assignment, ignored

    def test_the_class_loss_leaves_out_what_owns_nothing_there(self, case):
        model, outputs, targets, assignment, ignored = case
        loss = model.losses(outputs, targets, assignment)["loss_class"].item()
        everywhere = [replace(t, valid=None) for t in targets]
        whole = model.losses(outputs, everywhere, assignment)["loss_class"].item()
        p = outputs.logits[0, ignored].sigmoid()
        left_out = -(0.75 * p**2 * (1 - p).log()).sum().item()
        assert loss == pytest.approx(
            whole - left_out / (len(positive_cells(assignment, targets, outputs.logits.shape[1])[1]) + 1)
        )

    def test_predictions_there_change_nothing(self, case):
        model, outputs, targets, assignment, ignored = case
        results = []
        for perturbed in (False, True):
            logits, embeddings = (t.detach().clone() for t in (outputs.logits, outputs.pixels.embeddings))
            if perturbed:
                logits[0, ignored] += 3 * torch.randn_like(logits[0, ignored])
                embeddings[0, ..., 60 // outputs.pixels.stride + 2 :] += 5
            logits.requires_grad_()
            embeddings.requires_grad_()
            changed = replace(outputs, logits=logits, pixels=replace(outputs.pixels, embeddings=embeddings))
            losses = model.losses(changed, targets, assignment)
            gradients = torch.autograd.grad(sum(losses.values()), (logits, embeddings))
            results.append(({k: v.item() for k, v in losses.items()}, gradients))
        (first, (of_logits, of_embeddings)), (second, others) = results
        assert first == pytest.approx(second, rel=1e-12)
        assert not of_logits[0, ignored].any()
        assert not of_embeddings[0, ..., 60 // outputs.pixels.stride + 2 :].any()
        assert of_embeddings[1].any()
        for a, b in zip((of_logits, of_embeddings), others, strict=True):
            torch.testing.assert_close(a, b)


class TestConfig:
    @pytest.mark.parametrize("count", [1, 4, 6])
    def test_ranges_of_a_wrong_number(self, count):
        with pytest.raises(ValidationError, match=rf"'size_ranges' has {count} values; give 5"):
            SOLOv2Config(size_ranges=[(i, i + 2) for i in range(count)])

    @pytest.mark.parametrize(
        ("ranges", "message"),
        [
            (((4, 4), (4, 9)), "from 0 or more to a larger size"),
            (((-1, 4), (4, 9)), "from 0 or more to a larger size"),
            (((4, 9), (2, 12)), "grow from level to level"),
            (((4, 9), (5, 9)), "grow from level to level"),
            (((1, 30), (40, 90)), "leave out instances of 30 to 40 pixels"),
        ],
    )
    def test_ranges_that_do_not_fit(self, ranges, message):
        with pytest.raises(ValidationError, match=message):
            SOLOv2Config(grids=(8, 4), size_ranges=ranges)

    @pytest.mark.parametrize(
        "setting",
        [
            {"channels": 48},
            {"kernel_channels": 0},
            {"head_convs": 0},
            {"grids": (8, 0)},
            {"grids": ()},
            {"grids": (9, 8, 7, 6, 5, 4)},
            {"mask_threshold": 1.0},
            {"max_queries": 0},
            {"center_fraction": 1.5},
            {"a": 1},
        ],
        ids=str,
    )
    def test_settings_out_of_range(self, setting):
        with pytest.raises(ValidationError, match=next(iter(setting))):
            SOLOv2Config(**setting)

    def test_the_defaults_are_the_originals(self):
        config = SOLOv2Config()
        assert config.grids == (40, 36, 24, 16, 12)
        assert config.size_ranges == ((1, 96), (48, 192), (96, 384), (192, 768), (384, 2048))


@pytest.mark.realdata
def test_the_originals_names_cover_the_full_model():
    shapes = json.loads(reference("parity", "solov2", "full_state_dict_shapes.json").read_text())
    foreign = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.device("meta"):
        model = SOLOv2(ResNet(50, norm="frozen", stride_in_1x1=True), 80)
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in solov2_names(foreign).items()} == ours
    assert is_solov2(foreign)
    assert not is_condinst(foreign)
    assert not is_solov2(model.state_dict())
