"""What holds for every segmenter of the table. A new one needs an entry in `small_segmenters`, and nothing here."""

import copy
from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from helpers.small_segmenters import EXACT_GRADIENT, NUM_CLASSES, SILENT, SMALL, drawn, small
from uniquery.backbones.swin import Swin
from uniquery.querying import EquivarianceSettings, InterSceneSettings, UniqueQuerying
from uniquery.segmenters import SEGMENTERS
from uniquery.structures import Images, Instances

MIXED = ((96, 128), (70, 90))
BATCHES = {
    "normal": lambda: drawn(MIXED, (4, 3)),
    "no instance": lambda: drawn(MIXED, (0, 0)),
    "one image empty": lambda: drawn(MIXED, (0, 5)),
    "one image": lambda: drawn(MIXED[:1], (4,)),
    "one image without instance": lambda: drawn(MIXED[1:], (0,)),
    "many": lambda: drawn(MIXED, (80, 3), radii=(3, 15)),
    "single pixels": lambda: drawn(MIXED, (5, 2), radii=(0, 0)),
}


@pytest.fixture(params=sorted(SEGMENTERS))
def name(request):
    return request.param


@pytest.fixture
def batch():
    return BATCHES["normal"]()


def losses_of(model, images, targets, seed=1):
    torch.manual_seed(seed)
    return UniqueQuerying(model)(images, targets)


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


def queries_of(model, images, targets):
    outputs = model(images)
    return outputs, model.queries(outputs, model.assign(outputs, targets))


def assert_same_instances(a: Instances, b: Instances) -> None:
    assert a.rles == b.rles
    assert a.size == b.size
    for field in ("scores", "labels", "boxes"):
        assert torch.equal(getattr(a, field), getattr(b, field))


def test_every_segmenter_has_a_small_one():
    assert set(SMALL) == set(SILENT) == set(SEGMENTERS)


class TestQueries:
    def test_shapes(self, name, batch):
        images, targets = batch
        outputs, queries = queries_of(small(name), images, targets)
        pixel_map = outputs.pixels
        count, (h, w) = len(queries), pixel_map.embeddings.shape[-2:]
        assert pixel_map.embeddings.shape[0] == len(images)
        assert (h * pixel_map.stride, w * pixel_map.stride) == images.pixels.shape[-2:]
        assert queries.embeddings.shape[0] == queries.image.shape[0] == queries.target.shape[0] == count > 0
        assert small(name).decode(queries, pixel_map).shape == (count, h, w)
        assert small(name).similarity(queries, pixel_map.of_image(0)[:7]).shape == (count, 7)

    def test_each_owns_an_instance_of_its_image(self, name, batch):
        _, queries = queries_of(small(name), *batch)
        assert set(queries.image.tolist()) == {0, 1}
        for image, target in zip(queries.image.tolist(), queries.target.tolist(), strict=True):
            assert -1 <= target < len(batch[1][image])
        assert (queries.target >= 0).any()

    def test_those_of_the_last_layer_come_last(self, name, batch):
        model = small(name).eval()
        outputs = model(batch[0])
        assignment = model.assign(outputs, batch[1])
        layers = model.layer_queries(outputs, assignment)
        last = model.queries(outputs, assignment)
        for field in fields(last):
            assert torch.equal(getattr(layers[-1], field.name), getattr(last, field.name)), field.name
        for queries in layers:
            owned = queries[queries.target >= 0]
            pairs = list(zip(owned.image.tolist(), owned.target.tolist(), strict=True))
            assert {(i, t) for i, target in enumerate(batch[1]) for t in range(len(target))} >= set(pairs)
            assert pairs

    def test_assign_carries_no_gradient(self, name, batch):
        model = small(name)
        outputs = model(batch[0])
        assert outputs.pixels.embeddings.requires_grad
        assignment = model.assign(outputs, batch[1])
        assert len(assignment) > 0
        tensors = [getattr(assignment, field.name) for field in fields(assignment)]
        assert not any(value.requires_grad for value in tensors if isinstance(value, Tensor))

    def test_decode_is_similarity_pixel_by_pixel(self, name, batch):
        model = small(name).eval()
        outputs, queries = queries_of(model, *batch)
        logits = model.decode(queries, outputs.pixels)
        assert logits.std() > 0.01
        for i in range(2):
            mine = queries.image == i
            pixels = outputs.pixels.of_image(i)
            some = torch.randperm(len(pixels))[:50]
            expected = logits[mine].flatten(1)[:, some]
            torch.testing.assert_close(model.similarity(queries[mine], pixels[some]), expected, rtol=1e-4, atol=1e-5)

    def test_similarity_meets_pixels_of_any_image(self, name, batch):
        model = small(name).eval()
        outputs, queries = queries_of(model, *batch)
        first, second = (outputs.pixels.of_image(i)[:20] for i in range(2))
        both = type(first)(*(torch.cat([getattr(p, f.name) for p in (first, second)]) for f in fields(first)))
        expected = torch.cat([model.similarity(queries, first), model.similarity(queries, second)], dim=1)
        torch.testing.assert_close(model.similarity(queries, both), expected, rtol=1e-4, atol=1e-5)

    def test_decode_finds_the_image_of_shuffled_queries(self, name, batch):
        model = small(name).eval()
        outputs, queries = queries_of(model, *batch)
        order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(0))
        logits = model.decode(queries, outputs.pixels)
        shuffled = model.decode(queries[order], outputs.pixels)
        torch.testing.assert_close(shuffled, logits[order], rtol=1e-4, atol=1e-5)
        for i in range(len(queries)):
            alone = model.similarity(queries[i : i + 1], outputs.pixels.of_image(int(queries.image[i])))
            torch.testing.assert_close(alone.view_as(logits[i]), logits[i], rtol=1e-4, atol=1e-5)

    def test_no_query(self, name, batch):
        model = small(name)
        outputs, queries = queries_of(model, *batch)
        none = queries[:0]
        assert model.similarity(none, outputs.pixels.of_image(0)).shape == (
            0,
            outputs.pixels.of_image(0).locations.shape[0],
        )
        assert model.decode(none, outputs.pixels).shape == (0, *outputs.pixels.embeddings.shape[-2:])


class TestLosses:
    @pytest.mark.parametrize("kind", sorted(BATCHES))
    def test_every_parameter_takes_part(self, name, kind):
        model = small(name)
        losses = losses_of(model, *BATCHES[kind]())
        total(losses).backward()
        for key, loss in losses.items():
            assert loss.shape == (), key
            assert loss.isfinite(), key
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
        assert any(parameter.grad.any() for parameter in model.parameters())

    def test_every_trainable_parameter_takes_part_on_a_swin(self, name, batch):
        """It normalizes each output, also one that the segmenter does not use."""
        model = SEGMENTERS[name](Swin(16, (1, 1, 1, 1), window=4, head_channels=8), NUM_CLASSES, SMALL[name])
        total(losses_of(model, *batch)).backward()
        assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        norms = [model.backbone.get_submodule(f"stage{i}.norm") for i in (1, 2, 3, 4)]
        is_used = [norm.weight.requires_grad for norm in norms]
        assert is_used == [norm.weight.grad is not None for norm in norms]
        assert is_used[1:] == [True, True, True]

    def test_the_gradient_is_that_of_the_losses(self, name, batch):
        """Along one random direction through all parameters, in float64."""
        model = small(name, **EXACT_GRADIENT.get(name, {})).double()
        images, targets = batch
        assignment = model.assign(model(images), targets)

        def loss():
            torch.manual_seed(1)
            return total(model.losses(model(images), targets, assignment))

        value = loss()
        assert value.dtype == torch.float64
        value.backward()
        torch.manual_seed(2)
        direction = [torch.randn_like(p) for p in model.parameters()]
        along = sum((p.grad * d).sum() for p, d in zip(model.parameters(), direction, strict=True)).item()
        step = 1e-7
        sides = []
        for sign in (1, -2):
            for p, d in zip(model.parameters(), direction, strict=True):
                p.data.add_(d, alpha=sign * step)
            sides.append(loss().item())
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(along, rel=1e-4)

    def test_double_precision_agrees(self, name, batch):
        model = small(name)
        single, double = losses_of(model, *batch), losses_of(copy.deepcopy(model).double(), *batch)
        for key, loss in single.items():
            assert loss.item() == pytest.approx(double[key].item(), rel=1e-3), key

    def test_half_precision_is_close(self, name, batch):
        model = small(name)
        single = losses_of(model, *batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = losses_of(model, *batch)
        total(half).backward()
        for key, loss in single.items():
            assert half[key].item() == pytest.approx(loss.item(), rel=5e-2), key
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    def test_the_same_seed_gives_the_same(self, name, batch):
        first, second = (losses_of(small(name), *batch) for _ in range(2))
        assert first.keys() == second.keys()
        for key, loss in first.items():
            assert torch.equal(loss, second[key]), key

    def test_a_training_step_is_deterministic(self, name, batch):
        def stepped():
            model = small(name)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(2):
                optimizer.zero_grad()
                total(losses_of(model, *batch)).backward()
                optimizer.step()
            return model.state_dict()

        first, second = stepped(), stepped()
        start = small(name).state_dict()
        for key, value in first.items():
            assert torch.equal(value, second[key]), key
        assert any(not torch.equal(value, start[key]) for key, value in first.items())

    def test_padding_does_not_matter(self, name, batch):
        images, targets = batch
        soiled = images.pixels.clone()
        for pixels, (height, width) in zip(soiled, images.sizes, strict=True):
            pixels[:, height:] = 255
            pixels[:, :, width:] = 255
        assert not torch.equal(soiled, images.pixels)
        clean, dirty = (losses_of(small(name), Images(p, images.sizes), targets) for p in (images.pixels, soiled))
        for key, loss in clean.items():
            assert torch.equal(loss, dirty[key]), key


class TestMaskLoss:
    """`Targets.valid` says where masks are known; the left half of each image here."""

    @pytest.fixture
    def case(self, name, batch):
        images, targets = batch
        model = small(name)
        outputs, queries = queries_of(model, images, targets)
        queries = queries[queries.target >= 0]
        logits = model.decode(queries, outputs.pixels).detach().requires_grad_()
        edge = images.pixels.shape[-1] // 2
        valid = torch.zeros(images.pixels.shape[-2:], dtype=torch.bool)
        valid[:, :edge] = True
        beyond = edge // outputs.pixels.stride + 2  # cells that no valid pixel is interpolated from
        return model, logits, queries, [replace(t, valid=valid) for t in targets], beyond

    def loss(self, model, logits, queries, targets):
        torch.manual_seed(1)
        return model.mask_loss(logits, queries, targets)

    def test_masks_beyond_do_not_count(self, case):
        model, logits, queries, targets, _ = case
        flipped = [replace(t, masks=t.masks ^ ~t.valid) for t in targets]
        assert torch.equal(self.loss(model, logits, queries, targets), self.loss(model, logits, queries, flipped))
        everywhere = [replace(t, valid=None) for t in flipped]
        assert not torch.equal(
            self.loss(model, logits, queries, targets), self.loss(model, logits, queries, everywhere)
        )

    def test_logits_beyond_do_not_count(self, case):
        model, logits, queries, targets, beyond = case
        loss = self.loss(model, logits, queries, targets)
        loss.backward()
        assert not logits.grad[..., beyond:].any()
        assert logits.grad[..., : beyond - 2].any()
        other = logits.detach().clone()
        other[..., beyond:] = torch.randn_like(other[..., beyond:]) * 9
        assert torch.equal(self.loss(model, other, queries, targets), loss.detach())

    def test_everywhere_valid_is_the_default(self, case):
        model, logits, queries, targets, _ = case
        all_valid = [replace(t, valid=torch.ones_like(t.valid)) for t in targets]
        unsaid = [replace(t, valid=None) for t in targets]
        assert torch.equal(self.loss(model, logits, queries, all_valid), self.loss(model, logits, queries, unsaid))

    def test_nowhere_valid(self, case):
        model, logits, queries, targets, _ = case
        loss = self.loss(model, logits, queries, [replace(t, valid=torch.zeros_like(t.valid)) for t in targets])
        loss.backward()
        assert loss.isfinite()
        assert not logits.grad.any()

    def test_right_masks_cost_less_than_wrong_ones(self, case):
        model, logits, queries, targets, _ = case
        owned = torch.stack([targets[i].masks[t] for i, t in zip(queries.image, queries.target, strict=True)]).float()
        right = 20 * torch.nn.functional.interpolate(owned[:, None], size=logits.shape[-2:], mode="area")[:, 0] - 10
        unsaid = [replace(t, valid=None) for t in targets]
        losses = [self.loss(model, values, queries, unsaid).item() for values in (right, logits.detach(), -right)]
        assert losses == sorted(losses)
        assert losses[0] < 0.5 * losses[2]


class TestInvalidPixels:
    """Of all base losses; what is each segmenter's own is in its file."""

    def gradients(self, name, images, targets):
        model = small(name)
        losses = losses_of(model, images, targets)
        total(losses).backward()
        return losses, {key: parameter.grad for key, parameter in model.named_parameters()}

    def test_everywhere_valid_is_the_default(self, name, batch):
        images, targets = batch
        everywhere = [replace(t, valid=torch.ones(images.pixels.shape[-2:], dtype=torch.bool)) for t in targets]
        (expected, gradients), (losses, found) = (self.gradients(name, images, t) for t in (targets, everywhere))
        for key, loss in expected.items():
            torch.testing.assert_close(losses[key], loss, msg=lambda m, k=key: k + m)
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: k + m)

    @pytest.mark.parametrize("kind", ["normal", "no instance"])
    def test_nowhere_valid(self, name, kind):
        images, targets = BATCHES[kind]()
        nowhere = [replace(t, valid=torch.zeros(images.pixels.shape[-2:], dtype=torch.bool)) for t in targets]
        losses, gradients = self.gradients(name, images, nowhere)
        assert all(loss.isfinite() for loss in losses.values())
        assert all(gradient.isfinite().all() for gradient in gradients.values())

    def test_only_one_image_has_invalid_pixels(self, name, batch):
        """Some predictions of that image have no class gradient; those of the other one keep theirs."""
        images, targets = batch
        valid = torch.ones(images.pixels.shape[-2:], dtype=torch.bool)
        valid[:, 40:] = False
        model = small(name).double()
        outputs = model(images)
        logits = outputs.logits.detach().requires_grad_()
        outputs = replace(outputs, logits=logits)
        gradients = []
        for some in ([replace(targets[0], valid=valid), targets[1]], targets):
            assignment = model.assign(outputs, targets)
            (gradient,) = torch.autograd.grad(model.losses(outputs, some, assignment)["loss_class"], logits)
            gradients.append(gradient.unbind(-3))  # images come third from the right
        ignored = (gradients[0][0] == 0) & (gradients[1][0] != 0)
        assert ignored.any()
        assert not ((gradients[0][1] == 0) & (gradients[1][1] != 0)).any()


class TestPredict:
    @pytest.mark.parametrize("sizes", [MIXED, ((37, 53), (211, 97)), ((1, 1), (5, 300))])
    @torch.no_grad()
    def test_sizes_scores_labels_boxes(self, name, batch, sizes):
        model = small(name).eval()
        results = model.predict(model(batch[0]), sizes)
        assert len(results) == 2
        for instances, (height, width) in zip(results, sizes, strict=True):
            assert len(instances) > 0
            assert instances.masks.shape == (len(instances), height, width)
            assert instances.scores.tolist() == sorted(instances.scores.tolist(), reverse=True)
            assert ((instances.scores >= 0) & (instances.scores <= 1)).all()
            assert ((instances.labels >= 0) & (instances.labels < NUM_CLASSES)).all()
            x0, y0, x1, y1 = instances.boxes.T
            assert ((x0 >= 0) & (x0 <= x1) & (x1 <= width)).all()
            assert ((y0 >= 0) & (y0 <= y1) & (y1 <= height)).all()

    @torch.no_grad()
    def test_odd_image_sizes(self, name):
        images, _ = drawn(((65, 33), (31, 127)), (1, 1))
        model = small(name).eval()
        for instances, size in zip(model.predict(model(images), images.sizes), images.sizes, strict=True):
            assert instances.masks.shape == (len(instances), *size)

    @torch.no_grad()
    def test_nothing_above_the_threshold(self, name, batch):
        model = small(name, **SILENT[name]).eval()
        for instances, size in zip(model.predict(model(batch[0]), MIXED), MIXED, strict=True):
            assert len(instances) == 0
            assert instances.masks.shape == (0, *size)
            assert instances.boxes.shape == (0, 4)

    @torch.no_grad()
    def test_a_higher_mask_threshold_gives_smaller_masks(self, name, batch):
        model = small(name).eval()
        outputs = model(batch[0])
        low, high = (model.predict(outputs, MIXED, mask_threshold=t)[0] for t in (0.3, 0.7))
        assert low.masks.sum() > high.masks.sum()
        if torch.equal(low.scores, high.scores):  # unless masks take part in the scores
            assert not (high.masks & ~low.masks).any()

    @torch.no_grad()
    def test_neighbors_in_the_batch_do_not_matter(self, name, batch):
        images, _ = batch
        model = small(name).eval()
        together = model.predict(model(images), MIXED)
        for i in range(2):
            alone = Images(images.pixels[i : i + 1], images.sizes[i : i + 1])
            (instances,) = model.predict(model(alone), MIXED[i : i + 1])
            torch.testing.assert_close(instances.scores, together[i].scores, rtol=1e-4, atol=1e-5)

    @torch.no_grad()
    def test_a_saved_model_predicts_the_same(self, name, batch, tmp_path):
        model = small(name)
        model(batch[0])  # in training mode, so that running statistics are not what they start from
        torch.save(model.state_dict(), tmp_path / "model.pt")
        other = small(name, seed=5)
        predictions = [m.eval().predict(m(batch[0]), MIXED) for m in (model, other)]
        assert not torch.equal(predictions[0][0].scores, predictions[1][0].scores)
        other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
        for before, after in zip(predictions[0], other.predict(other(batch[0]), MIXED), strict=True):
            assert_same_instances(before, after)

    @torch.no_grad()
    def test_twice_the_same(self, name, batch):
        model = small(name).eval()
        first, second = (model.predict(model(batch[0]), MIXED) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert_same_instances(a, b)

    @torch.no_grad()
    def test_half_and_double_precision(self, name, batch):
        model = small(name).eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model.predict(model(batch[0]), MIXED)
        double = model.double().predict(model(batch[0]), MIXED)
        for a, b in zip(half, double, strict=True):
            assert a.scores[0].item() == pytest.approx(b.scores[0].item(), abs=0.05)
            assert a.masks.shape[1:] == b.masks.shape[1:]


class TestAlgorithm:
    SETTINGS: ClassVar = {
        "inter": lambda: {"inter": InterSceneSettings(capacity=500)},
        "paired": lambda: {"equivariance": EquivarianceSettings()},
        "both": lambda: {"inter": InterSceneSettings(capacity=500), "equivariance": EquivarianceSettings()},
        "all layers, extra": lambda: {
            "inter": InterSceneSettings(capacity=500, layers="all", queries="matched"),
            "equivariance": EquivarianceSettings(views="extra"),
        },
        "features": lambda: {"equivariance": EquivarianceSettings(target="features")},
    }

    @pytest.mark.parametrize("settings", sorted(SETTINGS))
    @pytest.mark.parametrize("kind", ["normal", "no instance", "one image"])
    def test_finite_and_every_parameter_takes_part(self, name, settings, kind):
        model = small(name)
        objective = UniqueQuerying(model, **self.SETTINGS[settings]())
        for _ in range(2):  # the second time, the memory holds pixels of before
            losses = objective(*BATCHES[kind]())
        total(losses).backward()
        assert all(loss.isfinite() for loss in losses.values())
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key

    def test_off_it_is_the_segmenters_own_objective(self, name, batch):
        images, targets = batch
        model = small(name)
        torch.manual_seed(1)
        outputs = model(images)
        own = model.losses(outputs, targets, model.assign(outputs, targets))
        wrapped = losses_of(model, images, targets)
        assert own.keys() == wrapped.keys()
        assert all(torch.equal(own[key], wrapped[key]) for key in own)

    def test_it_adds_no_parameter(self, name):
        model = small(name)
        objective = UniqueQuerying(model, **self.SETTINGS["both"]())
        assert {k.removeprefix("segmenter.") for k in objective.state_dict()} == set(model.state_dict())

    def test_inter_scene_loss_falls_when_it_is_minimized(self, name, batch):
        """Of queries against pixels of other images: twenty steps on L_inter alone."""
        images, targets = batch
        model = small(name)
        objective = UniqueQuerying(model, inter=InterSceneSettings(capacity=500))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        values = []
        for _ in range(20):
            optimizer.zero_grad()
            torch.manual_seed(1)
            loss = objective(images, targets)["loss_inter"]
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        assert values[-1] < 0.7 * values[0]
