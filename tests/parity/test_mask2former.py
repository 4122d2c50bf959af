"""Mask2Former equals the original on the same weights, and on the same random points."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from helpers.reference import reference
from uniquery.backbones.resnet import ResNet
from uniquery.segmenters.mask2former import Mask2Former, Mask2FormerConfig
from uniquery.segmenters.set_prediction import PointCriterion, SetAssignment
from uniquery.structures import Images, Targets
from uniquery.weights.foreign.mask2former import mask2former_names

pytestmark = [pytest.mark.realdata, pytest.mark.usefixtures("original_rounding")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LAYERS = 4
PADDED = (96, 128)
RECORDED_AS = (1, 2, 3, 0)  # the original computes its last layer first, then the others in order


@pytest.fixture(scope="module")
def io():
    return load_file(reference("parity", "mask2former", "io.safetensors"))


@pytest.fixture
def model():
    """The reference's small configuration with its weights."""
    config = Mask2FormerConfig(
        queries=12,
        channels=64,
        heads=4,
        encoder_layers=2,
        decoder_layers=LAYERS - 1,
        decoder_width=64,
        points=256,
        max_detections=10,
        attend_padding=True,
    )
    backbone = ResNet(50, norm="frozen", stem_channels=8, width=8, res2_channels=16)
    model = Mask2Former(backbone, 5, config)
    foreign = load_file(reference("parity", "mask2former", "state_dict.safetensors"))
    model.load_state_dict(mask2former_names(foreign))
    # A setting; all weights of the reference are stirred.
    model.criterion = replace(model.criterion, label_weights=tuple(foreign["criterion.empty_weight"].tolist()))
    return model.eval()


@pytest.fixture
def images(io) -> Images:
    pixels = torch.zeros(2, 3, *PADDED)
    for i in range(2):
        height, width = io[f"input.{i}.image"].shape[1:]
        pixels[i, :, :height, :width] = io[f"input.{i}.image"]
    return Images(pixels, tuple(tuple(io[f"input.{i}.image"].shape[1:]) for i in range(2)))


@pytest.fixture
def targets(io) -> list[Targets]:
    def padded(masks):
        return torch.nn.functional.pad(masks, (0, PADDED[1] - masks.shape[2], 0, PADDED[0] - masks.shape[1])).bool()

    return [
        Targets(io[f"target.{i}.classes"], io[f"target.{i}.boxes"], padded(io[f"target.{i}.masks"]), i)
        for i in range(2)
    ]


@pytest.fixture
def replay(monkeypatch):
    """Makes the segmenter draw given points, in turn."""

    def replay(*recorded):
        waiting = [points.view(-1, 2) for points in recorded]

        def draw(count, extent, like):
            points = waiting.pop(0)
            assert (len(points), extent) == (count, (1.0, 1.0))
            return points

        monkeypatch.setitem(PointCriterion.mask_losses.__globals__, "draw_points", draw)
        return waiting

    return replay


def check_outputs(io, outputs):
    torch.testing.assert_close(outputs.pixels.embeddings, io["eval.mask_features"], **CLOSE)
    for layer in range(LAYERS):
        name = "eval.predictor." + ("" if layer == LAYERS - 1 else f"aux_outputs.{layer}.")
        torch.testing.assert_close(outputs.logits[layer], io[f"{name}pred_logits"], **CLOSE)
        masks = torch.einsum("bnd,bdhw->bnhw", outputs.embeddings[layer], outputs.pixels.embeddings)
        torch.testing.assert_close(masks, io[f"{name}pred_masks"], **CLOSE)


@torch.no_grad()
def test_outputs_in_evaluation(io, model, images):
    pixels = model.normalize(images)
    torch.testing.assert_close(pixels, io["eval.padded_normalised_image"], **CLOSE)
    features = model.backbone(pixels)
    for stride, name in ((4, "res2"), (8, "res3"), (16, "res4"), (32, "res5")):
        torch.testing.assert_close(features[stride], io[f"eval.resnet.{name}"], **CLOSE)
    levels, _ = model.pixel_decoder(features, (PADDED,) * 2)
    for level, features in enumerate(levels):
        torch.testing.assert_close(features, io[f"eval.multi_scale.{level}"], **CLOSE)
    check_outputs(io, model(images))


@pytest.mark.parametrize("run", ["eval.out", "eval_resized.out"])
@torch.no_grad()
def test_predictions(io, model, images, run):
    """Ours are sorted by the final score, the original's by that of the class; 'resized' keeps the first six."""
    sizes = [tuple(io[f"{run}.{i}.pred_masks"].shape[1:]) for i in range(2)]
    for i, instances in enumerate(model.predict(model(images), sizes)):
        wanted = {name: io[f"{run}.{i}.{name}"] for name in ("scores", "pred_classes", "pred_masks")}
        assert len(instances) == 10
        for score, label, mask in zip(*wanted.values(), strict=True):
            k = (instances.scores - score).abs().argmin()
            assert instances.scores[k].item() == pytest.approx(score.item(), abs=1e-4)
            assert instances.labels[k] == label
            assert (instances.masks[k] != mask.bool()).float().mean() < 1e-4


def of_layer(outputs, layer):
    """The same outputs, as if there were no other layer."""
    return replace(outputs, logits=outputs.logits[layer][None], embeddings=outputs.embeddings[layer][None])


def matched(io, model, outputs, targets, layer, replay) -> SetAssignment:
    first = 4 * RECORDED_AS[layer]
    waiting = replay(*(io[f"train.rand.{first + i:03}"] for i in range(2)))
    assignment = model.assign(of_layer(outputs, layer), targets)
    assert not waiting
    return assignment


def test_matching(io, model, images, targets, replay):
    outputs = model(images)
    for layer in range(LAYERS):
        assignment = matched(io, model, outputs, targets, layer, replay)
        for i in range(2):
            mine = assignment[assignment.image == i]
            wanted = [io[f"train.matched.{RECORDED_AS[layer]}.{i}.{part}"] for part in range(2)]
            assert torch.equal(mine.query, wanted[0])
            assert torch.equal(mine.target, wanted[1])


def layer_losses(io, model, outputs, targets, layer, replay):
    """Class, mask and dice loss of one layer. The original draws points for each mask: so each is given alone."""
    assignment = matched(io, model, outputs, targets, layer, replay)
    first = 4 * RECORDED_AS[layer]
    candidates = torch.cat([io[f"train.rand.{first + 2:03}"], io[f"train.rand.{first + 3:03}"]], dim=1)
    alone = of_layer(outputs, layer)
    masks = torch.zeros(2, 1)
    for row in range(len(assignment)):
        waiting = replay(candidates[row])
        masks = masks + model.criterion.mask_losses(alone, targets, assignment[row : row + 1], model._extents(alone))
        assert not waiting
    return torch.cat([model.criterion.class_losses(alone, targets, assignment), *masks])


def test_training_losses_and_gradients(io, model, images, targets, replay):
    numbers = json.loads(reference("parity", "mask2former", "numbers.json").read_text())["losses"]
    outputs = model.train()(images)
    check_outputs(io, outputs)
    losses = [layer_losses(io, model, outputs, targets, layer, replay) for layer in range(LAYERS)]
    for layer, of_layer_ in enumerate(losses):
        suffix = "" if layer == LAYERS - 1 else f"_{layer}"
        for name, loss in zip(("loss_ce", "loss_mask", "loss_dice"), of_layer_, strict=True):
            assert loss.item() == pytest.approx(numbers[name + suffix], rel=1e-4), name + suffix
    torch.stack(losses).sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    wanted = mask2former_names(load_file(reference("parity", "mask2former", "grads.safetensors")))
    assert set(wanted) == {name for name, grad in ours.items() if grad is not None}
    for name, gradient in wanted.items():
        scale = gradient.norm().clamp(min=1e-6)
        assert ours[name].norm().item() == pytest.approx(gradient.norm().item(), rel=1e-3, abs=1e-6), name
        assert ((ours[name] - gradient).norm() / scale).item() < 5e-3, name  # beyond the norms: also the direction


def test_the_losses_are_those_of_the_layers(io, model, images, targets):
    """What the tests above put together layer by layer is what `losses` returns."""
    outputs = model(images)
    assignment = model.assign(outputs, targets)
    torch.manual_seed(0)
    losses = model.losses(outputs, targets, assignment)
    torch.manual_seed(0)
    masks = model.criterion.mask_losses(outputs, targets, assignment, model._extents(outputs))
    classes = model.criterion.class_losses(outputs, targets, assignment)
    total = sum(loss.item() for loss in losses.values())
    assert total == pytest.approx((masks.sum() + classes.sum()).item(), rel=1e-6)
    assert [losses[f"loss_{name}"].item() for name in ("class", "mask", "dice")] == [
        values[-1].item() for values in (classes, *masks)
    ]
