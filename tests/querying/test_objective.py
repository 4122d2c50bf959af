"""The whole objective on a small CondInst: identities, limit cases, state."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from helpers.small_segmenters import small
from uniquery.backbones import BackboneConfig
from uniquery.masks.geometry import mask_boxes
from uniquery.querying import (
    EquivarianceSettings,
    InterSceneLoss,
    InterSceneSettings,
    PixelSampling,
    UniqueQuerying,
    sample_pixels,
    view_of,
)
from uniquery.querying.keyed_random import keyed_generator
from uniquery.segmenters import build_segmenter, set_prediction
from uniquery.segmenters.condinst import CondInstConfig
from uniquery.structures import Images, Targets

IDENTITY = {"flip": 0.0, "crop": None}
BOTH = {
    "inter": InterSceneSettings(capacity=500, sampling=PixelSampling(count=5)),
    "equivariance": EquivarianceSettings(),
}


def segmenter(seed=0):
    torch.manual_seed(seed)
    config = CondInstConfig(channels=32, head_convs=1, mask_channels=32, mask_convs=1, mask_norm="group", levels=4)
    return build_segmenter(config, BackboneConfig(name="tiny", weights="random"), 3).train()


def batch(counts=(3, 2), size=96, first_id=0):
    torch.manual_seed(1)
    ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    targets = []
    for i, count in enumerate(counts):
        masks = torch.zeros(count, size, size, dtype=torch.bool)
        for k in range(count):
            y, x, r = 16 + 20 * k, 24 + 18 * k, 8 + 4 * k
            masks[k] = (ys - y) ** 2 + (xs - x) ** 2 < r**2
        targets.append(Targets(torch.arange(count) % 3, mask_boxes(masks), masks, first_id + i))
    pixels = torch.randint(0, 256, (len(counts), 3, size, size), dtype=torch.uint8)
    return Images(pixels, ((size, size),) * len(counts)), targets


def test_off_is_the_base_to_the_bit():
    model = segmenter()
    images, targets = batch()
    outputs = model(images)
    base = model.losses(outputs, targets, model.assign(outputs, targets))
    ours = UniqueQuerying(model)(images, targets)
    assert list(ours) == list(base)
    assert all(torch.equal(ours[name], base[name]) for name in base)


@pytest.mark.parametrize("views", ["paired", "extra"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [("condinst", ["loss_mask"]), ("solov2", ["loss_mask"]), ("mask2former", ["loss_mask", "loss_dice"])],
)
def test_identity_makes_l_equi_the_base_mask_loss(name, parts, views, monkeypatch):
    table = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(set_prediction, "draw_points", lambda count, extent, like: table[:count])
    model = segmenter() if name == "condinst" else small(name).train()
    images, targets = batch()
    base = UniqueQuerying(model)(images, targets)
    ours = UniqueQuerying(model, equivariance=EquivarianceSettings(weight=3.0, **IDENTITY, views=views))(
        images, targets
    )
    assert ours["loss_equi"].item() == pytest.approx(3 * sum(base[part].item() for part in parts), rel=1e-5)
    for part in parts:
        assert ours[part].item() == pytest.approx(base[part].item(), rel=1e-5)


def test_identity_makes_feature_equivariance_zero():
    settings = EquivarianceSettings(**IDENTITY, target="features")
    losses = UniqueQuerying(segmenter(), equivariance=settings)(*batch())
    assert losses["loss_equi"].item() == pytest.approx(0, abs=1e-9)


def test_an_untrained_net_does_not_follow_a_flip():
    losses = UniqueQuerying(segmenter(), equivariance=EquivarianceSettings(flip=1.0, crop=None, target="features"))(
        *batch()
    )
    assert losses["loss_equi"].item() > 1e-6


def test_lambda_zero_is_plain_augmentation():
    losses = UniqueQuerying(segmenter(), equivariance=EquivarianceSettings(weight=0.0))(*batch())
    assert "loss_equi" not in losses


def test_paired_views_carry_the_base_loss_at_their_own_size():
    """The mean of the base losses of images and views; a view is as large as what it shows, not padded to its image."""
    model = segmenter()
    images, targets = batch()
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    group = EquivarianceSettings(weight=0.0, flip=1.0, crop=(0.6, 0.7))
    losses = UniqueQuerying(model, equivariance=group)(images, targets)
    originals, views = seen
    assert torch.equal(originals.pixels, images.pixels)
    assert views.pixels.shape[-2:] == (64, 64)
    transforms = group.draw(images.sizes, keyed_generator(0, 0, 0), [keyed_generator(0, 0, 0, i, 0, 0) for i in (0, 1)])
    again, view_targets = view_of(images, targets, transforms)
    assert torch.equal(again.pixels, views.pixels)
    halves = [UniqueQuerying(model)(images, targets), UniqueQuerying(model)(again, view_targets)]
    for name, loss in losses.items():
        assert loss.item() == pytest.approx(sum(half[name].item() for half in halves) / 2, rel=1e-5), name


def test_l_inter_is_the_mean_over_the_queries_of_images_and_views():
    """Not the mean of two means: views show fewer instances, and so have fewer queries."""
    model = segmenter()
    images, targets = batch()
    crops = EquivarianceSettings(weight=0.0, flip=0.0, crop=(0.4, 0.4))
    objective = UniqueQuerying(model, inter=InterSceneSettings(capacity=5000), equivariance=crops)
    loss = objective(images, targets)["loss_inter"]
    queries, ids = objective._last_queries
    assert 0 < (queries.image >= 2).sum() < (queries.image < 2).sum()
    stored = objective.memory.read()
    costs = []
    for i in range(len(queries)):
        logits = model.similarity(queries[i : i + 1], stored[stored.image_ids != ids[i]])
        costs.append((0.9 * logits.sigmoid() ** 2.5 * torch.nn.functional.softplus(logits)).mean())
    assert loss.item() == pytest.approx(torch.stack(costs).mean().item(), rel=1e-4)


def test_the_order_of_images_does_not_change_the_memory():
    images, targets = batch((3, 2, 1))
    rows = []
    for order in ([0, 1, 2], [2, 0, 1]):
        objective = UniqueQuerying(segmenter(), **BOTH)
        objective(Images(images.pixels[order], images.sizes), [targets[i] for i in order])
        rows.append(objective.memory.read())
    assert torch.equal(rows[0].image_ids, rows[1].image_ids)
    assert torch.equal(rows[0].locations, rows[1].locations)


def test_gradients_of_l_equi_reach_queries_of_the_view_and_features_of_the_original():
    model = segmenter()
    losses = UniqueQuerying(model, equivariance=EquivarianceSettings(views="extra"))(*batch())
    losses["loss_equi"].backward()
    assert model.head.controller.weight.grad.abs().sum() > 0
    assert model.mask_branch.tower[-1].weight.grad.abs().sum() > 0


def test_inter_scene_ignores_the_current_image_its_view_and_its_last_visit():
    objective = UniqueQuerying(
        segmenter(), inter=InterSceneSettings(capacity=5000), equivariance=EquivarianceSettings(**IDENTITY)
    )
    images, targets = batch(counts=(3,), first_id=42)
    for _ in range(3):
        losses = objective(images, targets)
        assert len(objective.memory) > 0
        assert losses["loss_inter"].item() == 0


def test_inter_scene_sees_other_images_and_trains_the_filters_only():
    model = segmenter()
    objective = UniqueQuerying(model, inter=InterSceneSettings(capacity=5000))
    loss = objective(*batch())["loss_inter"]
    assert loss.item() > 0
    loss.backward()
    assert model.head.controller.weight.grad.abs().sum() > 0
    assert model.mask_branch.tower[-1].weight.grad is None


def test_ramp_and_weight():
    plain, ramped = (
        UniqueQuerying(segmenter(), inter=InterSceneSettings(weight=w, ramp_steps=r, capacity=0))
        for w, r in ((1.0, 0), (2.0, 4))
    )
    images, targets = batch()
    shares = []
    for _ in range(5):
        torch.manual_seed(3)
        a = plain(images, targets)["loss_inter"]
        torch.manual_seed(3)
        b = ramped(images, targets)["loss_inter"]
        shares.append((b / a).item())
    assert shares == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0], rel=1e-4)


def test_caps_on_queries_and_negatives():
    settings = InterSceneSettings(capacity=5000, max_queries=2, negatives_per_step=3)
    loss = UniqueQuerying(segmenter(), inter=settings)(*batch())["loss_inter"]
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("counts", [(3, 2), (0, 0), (0, 3), (1,)])
@pytest.mark.parametrize("views", ["paired", "extra"])
def test_finite_losses_and_a_gradient_for_every_parameter(counts, views):
    model = segmenter()
    settings = {**BOTH, "equivariance": EquivarianceSettings(views=views)}
    losses = UniqueQuerying(model, **settings)(*batch(counts))
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize(
    "group", [EquivarianceSettings(rotate=(0, 60), scale=(0.5, 2.0)), EquivarianceSettings(combine="choose")]
)
def test_the_enlarged_family_trains(group):
    losses = UniqueQuerying(segmenter(), equivariance=group)(*batch())
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_bfloat16_is_close():
    images, targets = batch()
    values = []
    for enabled in (False, True):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses = UniqueQuerying(segmenter(), **BOTH)(images, targets)
        sum(losses.values()).backward()
        values.append({name: loss.item() for name, loss in losses.items()})
    for name in values[0]:
        assert values[1][name] == pytest.approx(values[0][name], rel=0.1, abs=1e-3), name


def test_same_parameters_as_the_segmenter():
    model = segmenter()
    names = {name.removeprefix("segmenter.") for name in UniqueQuerying(model, **BOTH).state_dict()}
    assert names == set(model.state_dict())


def test_a_restored_objective_goes_on_the_same():
    images, targets = batch()
    first = UniqueQuerying(segmenter(), **BOTH)
    for _ in range(2):
        first(images, targets)
    second = UniqueQuerying(copy.deepcopy(first.segmenter), **BOTH)
    second.load_algorithm_state({k: v.clone() for k, v in first.algorithm_state().items()})
    results = []
    for objective in (first, second):
        torch.manual_seed(9)
        results.append(objective(images, targets))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert second.forwards == first.forwards


def test_evaluation_does_not_write_to_the_memory():
    objective = UniqueQuerying(segmenter(), **BOTH).eval()
    objective(*batch())
    assert len(objective.memory) == 0


def test_bad_settings():
    with pytest.raises(ValueError, match=r"weight\n.*greater than or equal to 0"):
        EquivarianceSettings(weight=-1)
    with pytest.raises(ValueError, match="paired"):
        EquivarianceSettings(weight=0, views="extra")
    with pytest.raises(ValueError, match=r"weight\n.*greater than or equal to 0"):
        InterSceneSettings(weight=-1)
    for wrong in ({"max_queries": 0}, {"negatives_per_step": 0}):
        with pytest.raises(ValueError, match="greater than 0"):
            InterSceneSettings(**wrong)
    for wrong, choices in (({"queries": "Matched"}, "'all' or 'matched'"), ({"layers": "first"}, "'last' or 'all'")):
        with pytest.raises(ValueError, match=choices):
            InterSceneSettings(**wrong)
    for wrong, choices in (({"views": "Paired"}, "'paired' or 'extra'"), ({"target": "mask"}, "'masks' or 'features'")):
        with pytest.raises(ValueError, match=choices):
            EquivarianceSettings(**wrong)


def test_a_push_larger_than_the_memory_keeps_pixels_of_all_images():
    objective = UniqueQuerying(segmenter(), inter=InterSceneSettings(capacity=20, sampling="dense"))
    objective(*batch())
    assert len(objective.memory) == 20
    assert objective.memory.read().image_ids.unique().tolist() == [0, 1]


def test_statistics_are_of_matched_queries_of_all_images():
    objective = UniqueQuerying(small("mask2former").train(), inter=InterSceneSettings(capacity=500))
    images, targets = batch(counts=(1, 3))
    objective(images, targets)
    seen = []
    similarity = objective.segmenter.similarity
    objective.segmenter.similarity = lambda queries, pixels: (seen.append(queries), similarity(queries, pixels))[1]
    assert 0 < objective.statistics()["cross_scene_response"] < 1
    assert seen[0].image.unique().tolist() == [0, 1]
    assert (seen[0].target >= 0).all()


def test_the_fresh_response_does_not_depend_on_old_pixels():
    objective = UniqueQuerying(segmenter(), inter=InterSceneSettings(capacity=500))
    for _ in range(2):
        objective(*batch())
    before = objective.statistics()
    old = len(objective.memory) - len(objective.memory.newest())
    objective.memory.read().embeddings[:old] *= 100
    after = objective.statistics()
    assert old > 0
    assert after["fresh_response"] == before["fresh_response"]
    assert after["cross_scene_response"] != before["cross_scene_response"]


class TestSetPrediction:
    """A segmenter with several decoder layers, whose queries mostly own nothing."""

    def loss(self, **settings):
        torch.manual_seed(0)
        model = small("mask2former").train()
        images, targets = batch()
        objective = UniqueQuerying(model, inter=InterSceneSettings(capacity=500, **settings))
        objective.memory.push(
            sample_pixels(model(images).pixels, [replace(t, image_id=99) for t in targets], PixelSampling(name="dense"))
        )
        torch.manual_seed(0)
        return model, objective(images, targets)["loss_inter"], objective

    def test_matched_queries_are_fewer(self):
        _, _, everyone = self.loss(queries="all")
        _, _, matched = self.loss(queries="matched")
        assert len(everyone._last_queries[0]) == 2 * everyone.segmenter.config.queries
        assert len(matched._last_queries[0]) == 5
        assert (matched._last_queries[0].target >= 0).all()

    def test_layers_are_averaged(self):
        model, mean, objective = self.loss(layers="all")
        images, targets = batch()
        torch.manual_seed(0)
        outputs = model(images)
        layers = model.layer_queries(outputs, model.assign(outputs, targets))
        assert len(layers) > 1
        stored = objective.memory.read()
        single = [
            InterSceneLoss(dot_product_scale=1.0)(q, torch.tensor([t.image_id for t in targets])[q.image], stored)
            for q in layers
        ]
        assert mean.item() == pytest.approx(torch.stack(single).mean().item(), rel=1e-4)
        assert mean.item() != pytest.approx(single[-1].item(), rel=1e-4)

    def test_equivariance_takes_matched_queries_only(self):
        torch.manual_seed(0)
        model = small("mask2former").train()
        seen = []
        original = model.mask_loss
        model.mask_loss = lambda logits, queries, targets: (seen.append(queries), original(logits, queries, targets))[1]
        losses = UniqueQuerying(model, equivariance=EquivarianceSettings(**IDENTITY))(*batch())
        assert losses["loss_equi"].isfinite()
        assert (seen[-1].target >= 0).all()
        assert sorted(seen[-1].image.tolist()) == [0, 0, 0, 1, 1]


def test_stuff_queries_are_to_fire_on_their_stuff():
    """The panoptic rule reaches the loss: the same scene costs otherwise when its instances are stuff."""
    values = []
    for things in (None, torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)):
        model = segmenter()
        images, targets = batch((3,))
        objective = UniqueQuerying(model, inter=InterSceneSettings(capacity=500))
        other = [replace(t, image_id=99, things=things) for t in targets]
        objective.memory.push(sample_pixels(model(images).pixels, other, PixelSampling(name="dense")))
        values.append(objective(images, [replace(t, things=things) for t in targets])["loss_inter"].item())
    assert values[0] == values[1]
    assert values[2] != values[0]
