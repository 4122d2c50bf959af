"""What is CondInst's own; what it shares with the others is in test_contract.py, equality with the original in parity."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch.autograd import gradcheck

from reference import reference
from small_segmenters import NUM_CLASSES, drawn, small
from uniquery.backbones.resnet import ResNet
from uniquery.layers.resize import aligned_bilinear
from uniquery.segmenters.condinst import (
    CondInst,
    CondInstConfig,
    CondInstQueries,
    _centerness,
    _giou_loss,
    num_filter_parameters,
    split_filters,
)
from uniquery.structures import Pixels
from uniquery.weights.adelaidet import condinst_names

SIZES = ((96, 128), (70, 90))


@pytest.fixture
def batch():
    return drawn(SIZES, (4, 3))


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
            reach=torch.tensor([64.0, 128.0, 256.0]),
        )
        return queries, Pixels(torch.randn(6, 8, dtype=torch.float64), 8 * torch.randint(0, 20, (6, 2)).float() + 4)

    @staticmethod
    def naive(queries, pixels):
        """Three 1×1 layers over [relative x, relative y, embedding], query by query and pixel by pixel."""
        logits = []
        for filters, place, reach in zip(queries.embeddings.tolist(), queries.locations, queries.reach, strict=True):
            read = iter(filters)
            shapes = [(8, 10), (8, 8), (1, 8)]
            weights = [[[next(read) for _ in range(i)] for _ in range(o)] for o, i in shapes]
            biases = [[next(read) for _ in range(o)] for o, _ in shapes]
            assert next(read, None) is None
            logits.append([])
            for embedding, at in zip(pixels.embeddings.tolist(), pixels.locations, strict=True):
                values = [*((place - at) / reach).tolist(), *embedding]
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
    def test_equal_the_formulas(self, batch):
        """The four terms, summed location by location from the outputs."""
        model = small("condinst").double()
        images, targets = batch
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
        of_class = of_box = of_centre = centres = 0.0
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
            centre = math.sqrt(min(wanted[0::2]) / max(wanted[0::2]) * min(wanted[1::2]) / max(wanted[1::2]))
            centres += centre
            of_box += centre * TestBoxLosses.naive_giou(outputs.distances[i, at].tolist(), wanted)
            p = 1 / (1 + math.exp(-outputs.centerness[i, at].item()))
            of_centre -= centre * math.log(p) + (1 - centre) * math.log(1 - p)
        assert losses["loss_class"] == pytest.approx(of_class / len(owner))
        assert losses["loss_box"] == pytest.approx(of_box / centres)
        assert losses["loss_centerness"] == pytest.approx(of_centre / len(owner))

    @pytest.mark.parametrize("finest", [4, 8])
    def test_masks_are_compared_at_twice_the_maps_resolution(self, finest):
        """Each fine cell is compared with the one ground-truth pixel at its centre."""
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

    def test_only_masks_are_capped(self, batch):
        images, targets = batch
        capped, free = small("condinst", max_queries=4).eval(), small("condinst").eval()
        outputs = free(images)
        assignment = free.assign(outputs, targets)
        assert len(assignment) > 12
        assert len(free.queries(outputs, assignment)) == len(assignment)
        torch.manual_seed(0)
        some, others = capped.queries(outputs, assignment), capped.queries(outputs, assignment)
        assert len(some) == len(others) == 4
        assert not torch.equal(some.embeddings, others.embeddings)
        all_filters = free.queries(outputs, assignment).embeddings.tolist()
        assert all(one in all_filters for one in some.embeddings.tolist())
        assert len({tuple(one) for one in some.embeddings.tolist()}) == 4
        few, every = (model.losses(outputs, targets, assignment) for model in (capped, free))
        for name in ("loss_class", "loss_box", "loss_centerness"):
            assert torch.equal(few[name], every[name])
        assert not torch.equal(few["loss_mask"], every["loss_mask"])

    @pytest.mark.parametrize("norm", ["batch", "group"])
    def test_both_norms_of_the_mask_branch(self, batch, norm):
        model = small("condinst", mask_norm=norm)
        outputs = model(batch[0])
        losses = model.losses(outputs, batch[1], model.assign(outputs, batch[1]))
        torch.stack(list(losses.values())).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        running = [key for key in model.state_dict() if key.startswith("mask_branch") and "running" in key]
        assert bool(running) == (norm == "batch")


class TestPyramid:
    def test_a_finest_stride_of_four(self, batch):
        images, targets = batch
        model = small("condinst", finest_stride=4, levels=4)
        outputs = model(images)
        assert outputs.pixels.stride == 4
        assert outputs.pixels.embeddings.shape == (2, 8, 24, 32)
        assert outputs.strides.unique().tolist() == [4, 8, 16, 32]
        assert model.size_ranges == {4: (-1, 32), 8: (32, 64), 16: (64, 128), 32: (128, 1e8)}
        assert model.reaches == {4: 32, 8: 64, 16: 128, 32: 256}
        losses = model.losses(outputs, targets, model.assign(outputs, targets))
        torch.stack(list(losses.values())).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_a_finest_stride_of_eight(self, batch):
        model = small("condinst")
        outputs = model(batch[0])
        assert outputs.strides.unique().tolist() == [8, 16, 32, 64, 128]
        assert model.size_ranges == {8: (-1, 64), 16: (64, 128), 32: (128, 256), 64: (256, 512), 128: (512, 1e8)}
        assert model.reaches == {8: 64, 16: 128, 32: 256, 64: 512, 128: 1024}
        assert len(outputs.locations) == outputs.logits.shape[1] == 12 * 16 + 6 * 8 + 3 * 4 + 2 * 2 + 1

    def test_given_size_limits(self):
        model = small("condinst", levels=3, size_limits=(10.0, 30.0))
        assert model.size_ranges == {8: (-1, 10), 16: (10, 30), 32: (30, 1e8)}
        assert model.reaches == {8: 10, 16: 30, 32: 60}

    def test_a_query_reaches_as_far_as_its_level(self, batch):
        model = small("condinst", size_limits=(20.0, 30.0, 40.0, 50.0))
        outputs = model(batch[0])
        assignment = model.assign(outputs, batch[1])
        queries = model.queries(outputs, assignment)
        expected = [model.reaches[s] for s in outputs.strides[assignment.query].tolist()]
        assert queries.reach.tolist() == expected
        assert len(set(expected)) > 1
        assert torch.equal(queries.locations, outputs.locations[assignment.query])


class TestConfig:
    @pytest.mark.parametrize("limits", [(), (64,), (64, 128, 256), (64, 128, 256, 512, 1024)])
    def test_size_limits_of_a_wrong_length(self, limits):
        with pytest.raises(ValidationError, match=rf"'size_limits' has {len(limits)} values; give 4"):
            CondInstConfig(size_limits=limits)

    @pytest.mark.parametrize("limits", [(64, 64, 128, 256), (64, 32, 128, 256), (0, 64, 128, 256), (-8, 64, 128, 256)])
    def test_size_limits_that_do_not_grow(self, limits):
        with pytest.raises(ValidationError, match="must be positive and grow"):
            CondInstConfig(size_limits=limits)

    def test_levels_too_few_for_the_finest_stride(self):
        with pytest.raises(ValidationError, match="'levels' must be at least 4 with finest_stride 4"):
            CondInstConfig(finest_stride=4, levels=3)

    @pytest.mark.parametrize(
        "setting",
        [{"channels": 48}, {"finest_stride": 16}, {"levels": 2}, {"mask_threshold": 1.0}, {"max_queries": 0}, {"a": 1}],
        ids=str,
    )
    def test_settings_out_of_range(self, setting):
        with pytest.raises(ValidationError, match=next(iter(setting))):
            CondInstConfig(**setting)


class TestPredict:
    @pytest.mark.parametrize("finest", [4, 8])
    @torch.no_grad()
    def test_masks_equal_the_dense_way(self, finest):
        images, _ = drawn(SIZES, (2, 2))
        model = small("condinst", finest_stride=finest).eval()
        outputs = model(images)
        for i, size in enumerate([(192, 256), (41, 67)]):
            instances = model._predict_one(outputs, i, size, 0.5)
            location, _, scores = model._candidates(outputs, i)
            chosen = torch.tensor([location[(scores == score).nonzero()[0, 0]] for score in instances.scores])
            image = torch.full_like(chosen, i)
            logits = model.decode(model._queries_at(outputs, image, chosen, image), outputs.pixels)
            fine = aligned_bilinear(aligned_bilinear(logits[:, None], 2).sigmoid(), finest // 2)
            inside = fine[..., : SIZES[i][0], : SIZES[i][1]]
            dense = F.interpolate(inside, size=size, mode="bilinear", align_corners=False)[:, 0]
            decided = (dense - 0.5).abs() > 1e-5
            assert torch.equal(instances.masks[decided], (dense > 0.5)[decided])
            assert 0.05 < instances.masks.float().mean() < 0.95

    @torch.no_grad()
    def test_the_threshold_is_of_the_class_alone(self, batch):
        """As in the original: centerness ranks what passes, and does not decide what passes."""
        model = small("condinst", score_threshold=0.05).eval()
        model.head.centerness.bias.fill_(-9.0)
        model.head.classes.bias.fill_(0.0)
        outputs = model(batch[0])
        _, labels, scores = model._candidates(outputs, 0)
        probabilities = outputs.logits[0].sigmoid()
        assert len(scores) == (probabilities > 0.05).sum() > 100
        assert scores.max() ** 2 < 0.05
        assert set(labels.tolist()) == set(range(NUM_CLASSES))

    @torch.no_grad()
    def test_candidates_are_the_best_of_each_level(self, batch):
        model = small("condinst", candidates=5, score_threshold=0.3).eval()
        model.head.classes.bias.add_(4.0)
        outputs = model(batch[0])
        for i in range(2):
            ours = zip(*(values.tolist() for values in model._candidates(outputs, i)), strict=True)
            expected = []
            for stride in (8, 16, 32, 64, 128):
                found = []
                for at in (outputs.strides == stride).nonzero().flatten().tolist():
                    centre = outputs.centerness[i, at].sigmoid()
                    for c, p in enumerate(outputs.logits[i, at].sigmoid()):
                        if p > 0.3:
                            found.append((at, c, (p * centre).sqrt().item()))
                expected += sorted(found, key=lambda pair: -pair[2])[:5]
            ours = sorted(ours)
            assert [pair[:2] for pair in ours] == [pair[:2] for pair in sorted(expected)]
            assert [pair[2] for pair in ours] == pytest.approx([pair[2] for pair in sorted(expected)], rel=1e-5)

    @torch.no_grad()
    def test_no_more_than_asked_for(self, batch):
        capped, free = (small("condinst", max_detections=count).eval() for count in (3, 100))
        few, all_of_them = (model.predict(model(batch[0]), SIZES)[0] for model in (capped, free))
        assert len(few) == 3 < len(all_of_them)
        assert torch.equal(few.scores, all_of_them.scores[:3])


@pytest.mark.realdata
def test_the_originals_names_cover_the_full_model():
    shapes = json.loads(reference("parity", "condinst", "full_state_dict_shapes.json").read_text())
    foreign = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.device("meta"):
        model = CondInst(ResNet(50, norm="frozen", stride_in_1x1=True), 80)
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in condinst_names(foreign).items()} == ours
