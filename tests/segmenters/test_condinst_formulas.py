"""CondInst's formulas against loops, and its gradients; equality with the original itself is in parity."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from helpers.small_segmenters import drawn, small
from uniquery.layers.resize import aligned_bilinear
from uniquery.segmenters.condinst import (
    CondInstQueries,
    _centerness,
    _giou_loss,
    num_filter_parameters,
    split_filters,
)
from uniquery.structures import Pixels


class TestDynamicFilters:
    """Each query is a small network of its own."""

    @pytest.fixture
    def case(self):
        torch.manual_seed(0)
        queries = CondInstQueries(
            embeddings=torch.randn(3, 169, dtype=torch.float64) / 2,
            image=torch.zeros(3, dtype=torch.int64),
            target=torch.arange(3),
            locations=torch.tensor([[4.0, 12.0], [100.0, 60.0], [36.0, 4.0]]),
            sizes_of_interest=torch.tensor([64.0, 128.0, 256.0]),
        )
        return queries, Pixels(torch.randn(6, 8, dtype=torch.float64), 8 * torch.randint(0, 20, (6, 2)).float() + 4)

    @staticmethod
    def naive(queries, pixels):
        """Three 1×1 layers over [relative x, relative y, embedding], query by query and pixel by pixel."""
        logits = []
        for filters, location, size in zip(
            queries.embeddings.tolist(), queries.locations, queries.sizes_of_interest, strict=True
        ):
            read = iter(filters)
            shapes = [(8, 10), (8, 8), (1, 8)]
            weights = [[[next(read) for _ in range(i)] for _ in range(o)] for o, i in shapes]
            biases = [[next(read) for _ in range(o)] for o, _ in shapes]
            assert next(read, None) is None
            logits.append([])
            for embedding, at in zip(pixels.embeddings.tolist(), pixels.locations, strict=True):
                values = [*((location - at) / size).tolist(), *embedding]
                for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                    values = [
                        sum(w * v for w, v in zip(row, values, strict=True)) + b
                        for row, b in zip(weight, bias, strict=True)
                    ]
                    if layer < 2:
                        values = [max(v, 0.0) for v in values]
                logits[-1].append(values[0])
        return torch.tensor(logits, dtype=torch.float64)

    def test_equals_loops(self, case):
        model = small("condinst")
        similarity = model.similarity(*case)
        assert similarity.dtype == torch.float64
        torch.testing.assert_close(similarity, self.naive(*case))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sums_in_single_precision_at_least(self, case, dtype):
        queries, pixels = case
        queries = replace(queries, embeddings=queries.embeddings.to(dtype), locations=queries.locations + 4000)
        pixels = Pixels(pixels.embeddings.to(dtype), pixels.locations + 4000)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            similarity = small("condinst").similarity(queries, pixels)
        assert similarity.dtype == torch.float32
        torch.testing.assert_close(similarity.double(), self.naive(queries, pixels), rtol=1e-3, atol=1e-3)

    def test_gradient(self, case):
        queries, pixels = case
        model = small("condinst")

        def similarity(filters, embeddings):
            return model.similarity(replace(queries, embeddings=filters), replace(pixels, embeddings=embeddings))

        assert gradcheck(similarity, (queries.embeddings.requires_grad_(), pixels.embeddings.requires_grad_()))

    def test_count(self):
        assert num_filter_parameters(8) == 8 * 10 + 8 * 8 + 8 + 8 + 8 + 1 == 169
        assert small("condinst").head.controller.out_channels == 169

    def test_all_weights_come_before_all_biases(self):
        weights, biases = split_filters(torch.arange(169)[None], 8)
        assert [w.shape[1:] for w in weights] == [(8, 10), (8, 8), (1, 8)]
        flat = torch.cat([part.flatten() for part in (*weights, *biases)])
        assert torch.equal(flat, torch.arange(169))


class TestBoxLosses:
    @pytest.fixture
    def distances(self):
        torch.manual_seed(0)
        return torch.rand(2, 30, 4, dtype=torch.float64) * 6 + 0.05

    @staticmethod
    def naive_giou(predicted, wanted):
        """1 − (IoU − the empty part of the smallest box around both), from corners; IoU with 1 added to both areas."""
        a, b = ((-d[0], -d[1], d[2], d[3]) for d in (predicted, wanted))

        def area(box):
            return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)

        inner = (max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
        around = (min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3]))
        union = area(a) + area(b) - area(inner)
        return 1 - (area(inner) + 1) / (union + 1) + (area(around) - union) / area(around)

    def test_giou_equals_a_loop(self, distances):
        predicted, wanted = distances
        expected = [self.naive_giou(p, w) for p, w in zip(predicted.tolist(), wanted.tolist(), strict=True)]
        torch.testing.assert_close(_giou_loss(predicted, wanted), torch.tensor(expected, dtype=torch.float64))

    def test_giou_limits(self, distances):
        wanted = distances[0]
        torch.testing.assert_close(_giou_loss(wanted, wanted), torch.zeros_like(wanted[:, 0]))
        nothing = _giou_loss(torch.zeros_like(wanted), wanted)
        area = (wanted[:, 0] + wanted[:, 2]) * (wanted[:, 1] + wanted[:, 3])
        torch.testing.assert_close(nothing, 1 - 1 / (area + 1))
        assert _giou_loss(wanted[:0], wanted[:0]).shape == (0,)

    def test_giou_gradient(self, distances):
        predicted, wanted = distances
        assert gradcheck(lambda p: _giou_loss(p, wanted), predicted.clone().requires_grad_())

    def test_centerness_equals_a_loop(self, distances):
        expected = [
            math.sqrt(min(left, right) / max(left, right) * min(top, bottom) / max(top, bottom))
            for left, top, right, bottom in distances[0].tolist()
        ]
        torch.testing.assert_close(_centerness(distances[0]), torch.tensor(expected, dtype=torch.float64))

    def test_centerness_limits(self):
        centerness = _centerness(torch.tensor([[2.0, 3, 2, 3], [1, 1, 4, 1], [1, 4, 4, 1]]))
        assert centerness.tolist() == [1, 0.5, 0.25]

    def test_centerness_gradient(self, distances):
        assert gradcheck(_centerness, distances[0].clone().requires_grad_())


class TestLosses:
    def test_equal_the_formulas(self):
        """The four terms, summed location by location from the outputs."""
        model = small("condinst").double()
        images, targets = drawn(((96, 128), (70, 90)), (4, 3))
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        losses = {name: loss.item() for name, loss in model.losses(outputs, targets, assignment).items()}
        owner = {
            (i, at): t
            for i, at, t in zip(
                *(x.tolist() for x in (assignment.image, assignment.query, assignment.target)), strict=True
            )
        }
        assert len(owner) > 5
        of_class = of_box = of_center = centers = 0.0
        for i, at in itertools.product(range(2), range(len(outputs.locations))):
            target = owner.get((i, at))
            label = targets[i].labels[target].item() if target is not None else None
            for c, logit in enumerate(outputs.logits[i, at].tolist()):
                p = 1 / (1 + math.exp(-logit))
                of_class -= 0.25 * (1 - p) ** 2 * math.log(p) if c == label else 0.75 * p**2 * math.log(1 - p)
            if target is None:
                continue
            (x, y), (x0, y0, x1, y1) = outputs.locations[at].tolist(), targets[i].boxes[target].tolist()
            wanted = [d / outputs.strides[at].item() for d in (x - x0, y - y0, x1 - x, y1 - y)]
            center = math.sqrt(min(wanted[0::2]) / max(wanted[0::2]) * min(wanted[1::2]) / max(wanted[1::2]))
            centers += center
            of_box += center * TestBoxLosses.naive_giou(outputs.distances[i, at].tolist(), wanted)
            p = 1 / (1 + math.exp(-outputs.centerness[i, at].item()))
            of_center -= center * math.log(p) + (1 - center) * math.log(1 - p)
        assert losses["loss_class"] == pytest.approx(of_class / len(owner))
        assert losses["loss_box"] == pytest.approx(of_box / centers)
        assert losses["loss_centerness"] == pytest.approx(of_center / len(owner))

    @pytest.mark.parametrize("finest", [4, 8])
    def test_masks_are_compared_at_twice_the_maps_resolution(self, finest):
        """Each fine cell is compared with the one ground-truth pixel at its center."""
        images, targets = drawn(((64, 96), (64, 64)), (3, 2))
        model = small("condinst", finest_stride=finest).double()
        outputs = model(images)
        queries = model.queries(outputs, model.assign(outputs, targets))
        logits = model.decode(queries, outputs.pixels)
        fine = aligned_bilinear(logits[:, None], 2)[:, 0].sigmoid()
        step = finest // 2
        expected = 0.0
        for row, i, t in zip(fine, queries.image, queries.target, strict=True):
            both = squares = 0.0
            for y, x in itertools.product(*map(range, row.shape)):
                p, m = row[y, x].item(), float(targets[i].masks[t, step * y + step // 2, step * x + step // 2])
                both, squares = both + p * m, squares + p * p + m * m
            expected += (1 - 2 * both / (squares + 1e-5)) / len(queries)
        assert model.mask_loss(logits, queries, targets).item() == pytest.approx(expected)
