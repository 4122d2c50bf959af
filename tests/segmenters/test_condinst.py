"""What is CondInst's own; what it shares with the others is in test_contract.py."""

import json
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from helpers.reference import reference
from helpers.small_segmenters import NUM_CLASSES, drawn, small
from uniquery.backbones.resnet import ResNet
from uniquery.layers.resize import aligned_bilinear
from uniquery.segmenters.condinst import CondInst, CondInstConfig, FCOSHead
from uniquery.weights.foreign.adelaidet import condinst_names

SIZES = ((96, 128), (70, 90))


@pytest.fixture
def batch():
    return drawn(SIZES, (4, 3))


class TestLosses:
    def test_only_masks_are_capped(self, batch):
        images, targets = batch
        capped, free = small("condinst", max_queries=4).eval(), small("condinst").eval()
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
        for name in ("loss_class", "loss_box", "loss_centerness"):
            assert torch.equal(few[name], all_losses[name]), name
        mask_loss = capped.mask_loss(capped.decode(queries, outputs.pixels), queries, targets)
        assert torch.equal(few["loss_mask"], mask_loss)
        assert not torch.equal(few["loss_mask"], all_losses["loss_mask"])

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
        assert model.sizes_of_interest == {4: 32, 8: 64, 16: 128, 32: 256}
        losses = model.losses(outputs, targets, model.assign(outputs, targets))
        torch.stack(list(losses.values())).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_a_finest_stride_of_eight(self, batch):
        model = small("condinst")
        outputs = model(batch[0])
        assert outputs.strides.unique().tolist() == [8, 16, 32, 64, 128]
        assert model.size_ranges == {8: (-1, 64), 16: (64, 128), 32: (128, 256), 64: (256, 512), 128: (512, 1e8)}
        assert model.sizes_of_interest == {8: 64, 16: 128, 32: 256, 64: 512, 128: 1024}
        assert len(outputs.locations) == outputs.logits.shape[1] == 12 * 16 + 6 * 8 + 3 * 4 + 2 * 2 + 1

    def test_given_size_limits(self):
        model = small("condinst", levels=3, size_limits=(10.0, 30.0))
        assert model.size_ranges == {8: (-1, 10), 16: (10, 30), 32: (30, 1e8)}
        assert model.sizes_of_interest == {8: 10, 16: 30, 32: 60}

    def test_the_size_of_interest_of_a_query_is_its_levels(self, batch):
        model = small("condinst", size_limits=(20.0, 30.0, 40.0, 50.0))
        outputs = model(batch[0])
        assignment = model.assign(outputs, batch[1])
        queries = model.queries(outputs, assignment)
        expected = [model.sizes_of_interest[s] for s in outputs.strides[assignment.query].tolist()]
        assert queries.sizes_of_interest.tolist() == expected
        assert len(set(expected)) > 1
        assert torch.equal(queries.locations, outputs.locations[assignment.query])


class TestInvalidPixels:
    """The right part of the first image is invalid."""

    @pytest.fixture
    def case(self, batch):
        images, targets = batch
        valid = torch.ones(96, 128, dtype=torch.bool)
        valid[:, 60:] = False
        targets = [replace(targets[0], valid=valid), targets[1]]
        model = small("condinst").double()
        outputs = model(images)
        assignment = model.assign(outputs, targets)
        owned = set(zip(assignment.image.tolist(), assignment.query.tolist(), strict=True))
        ignored = [
            at
            for at, (x, y) in enumerate(outputs.locations.tolist())
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
        assert loss == pytest.approx(whole - left_out / len(assignment))

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
    def test_the_threshold_is_of_class_times_centerness(self, batch):
        model = small("condinst", score_threshold=0.05).eval()
        model.head.classes.bias.fill_(0.0)
        model.head.centerness.bias.fill_(-2.0)
        outputs = model(batch[0])
        _, labels, scores = model._candidates(outputs, 0)
        both = outputs.logits[0].sigmoid() * outputs.centerness[0].sigmoid()[:, None]
        assert len(scores) == (both > 0.05).sum() > 100
        assert (scores**2 > 0.05).all()
        assert set(labels.tolist()) == set(range(NUM_CLASSES))
        model.head.centerness.bias.fill_(-9.0)
        assert len(model._candidates(model(batch[0]), 0)[0]) == 0

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
                    center = outputs.centerness[i, at].sigmoid()
                    for c, p in enumerate(outputs.logits[i, at].sigmoid()):
                        if p * center > 0.3:
                            found.append((at, c, (p * center).sqrt().item()))
                expected += sorted(found, key=lambda pair: -pair[2])[:5]
            ours = sorted(ours)
            assert [pair[:2] for pair in ours] == [pair[:2] for pair in sorted(expected)]
            assert [pair[2] for pair in ours] == pytest.approx([pair[2] for pair in sorted(expected)], rel=1e-5)

    @torch.no_grad()
    def test_nothing_is_found_in_the_padding(self, batch):
        model = small("condinst", nms_threshold=1.0).eval()
        outputs = model(batch[0])
        at = outputs.locations[model._candidates(outputs, 1)[0]]
        assert ((at[:, 0] > SIZES[1][1] + 20) | (at[:, 1] > SIZES[1][0] + 20)).any()
        boxes = model.predict(outputs, SIZES)[1].boxes
        assert len(boxes)
        assert (boxes[:, 2:] > boxes[:, :2]).all()

    @torch.no_grad()
    def test_boxes_are_the_distances_around_a_location(self, batch):
        model = small("condinst").eval()
        outputs = model(batch[0])
        (instances, _), (height, width) = model.predict(outputs, SIZES), SIZES[0]
        location, _, scores = model._candidates(outputs, 0)
        for score, box in zip(instances.scores.tolist(), instances.boxes.tolist(), strict=True):
            at = location[scores.tolist().index(score)]
            (x, y), stride = outputs.locations[at].tolist(), outputs.strides[at].item()
            left, top, right, bottom = (stride * d for d in outputs.distances[0, at].tolist())
            corners = [max(x - left, 0), max(y - top, 0), min(x + right, width), min(y + bottom, height)]
            assert box == pytest.approx(corners, abs=1e-3)

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


@pytest.mark.parametrize("channels", [32, 256], ids=["plain convolutions", "winograd"])
def test_the_head_is_its_layers_one_by_one(channels):
    """With 256 channels it computes by Winograd's algorithm, and always three predictions in one convolution."""
    torch.manual_seed(0)
    head = FCOSHead(channels, 2, 3, 4).double()
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    levels = [torch.randn(2, channels, *size, dtype=torch.float64) for size in ((6, 8), (3, 5), (2, 2), (1, 1))]
    outputs = head([x.clone() for x in levels])

    def conv(layer, x):
        return F.conv2d(x, layer.weight, layer.bias, padding=1)

    def tower(layers, x):
        for layer in layers:
            x = conv(layer, x) if hasattr(layer, "kernel_size") else layer(x)
        return x

    assert len(outputs) == 4
    for i, x in enumerate(levels):
        boxes = tower(head.box_tower, x)
        expected = (
            conv(head.classes, tower(head.class_tower, x)),
            (conv(head.distances, boxes) * head.scales[i]).relu(),
            conv(head.centerness, boxes),
            conv(head.controller, boxes),
        )
        for ours, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(ours[i], wanted, rtol=1e-9, atol=1e-9)
