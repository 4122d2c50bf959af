"""SparseInst equals the original on the same weights, with grouped and with base activation maps."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.reference import reference
from uniquery.backbones.resnet import ResNet
from uniquery.segmenters.sparseinst import SparseInst, SparseInstConfig
from uniquery.structures import Images, PixelMap, Queries, Targets
from uniquery.weights.foreign.sparseinst import sparseinst_names

pytestmark = [pytest.mark.realdata, pytest.mark.usefixtures("original_rounding")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PADDED = (96, 128)
FOLDERS = {4: ("parity", "sparseinst"), 1: ("parity", "sparseinst", "base")}


@pytest.fixture(params=FOLDERS, ids=["grouped", "base"])
def groups(request):
    return request.param


@pytest.fixture
def io(groups):
    return load_file(reference(*FOLDERS[groups], "io.safetensors"))


@pytest.fixture
def model(groups):
    """The reference's small configuration with its weights."""
    config = SparseInstConfig(
        queries=12, channels=32, head_channels=32, head_convs=2, kernel_channels=16, groups=groups
    )
    model = SparseInst(ResNet(50, norm="frozen", stem_channels=8, width=8, res2_channels=16), 5, config)
    model.load_state_dict(sparseinst_names(load_file(reference(*FOLDERS[groups], "state_dict.safetensors"))))
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


def check_outputs(io, outputs):
    torch.testing.assert_close(outputs.pixels.embeddings, io["eval.mask_features"], **CLOSE)
    torch.testing.assert_close(outputs.kernels, io["eval.pred_kernel"], **CLOSE)
    torch.testing.assert_close(outputs.logits, io["eval.decoder.pred_logits"], **CLOSE)
    torch.testing.assert_close(outputs.objectness, io["eval.decoder.pred_scores"].squeeze(2), **CLOSE)


@torch.no_grad()
def test_outputs_in_evaluation(io, model, images):
    pixels = model.normalize(images)
    torch.testing.assert_close(pixels, io["eval.padded_normalised_image"], **CLOSE)
    features = model.backbone(pixels)
    for stride, name in ((8, "res3"), (16, "res4"), (32, "res5")):
        torch.testing.assert_close(features[stride], io[f"eval.resnet.{name}"], **CLOSE)
    pyramid = model.encoder.pyramid
    torch.testing.assert_close(pyramid.context(pyramid.laterals["32"](features[32])), io["eval.ppm"], **CLOSE)
    torch.testing.assert_close(model.encoder(features), io["eval.encoder"], **CLOSE)
    check_outputs(io, model(images))


@torch.no_grad()
def test_activation_maps(io, model, images):
    found = []
    model.instance_branch.activation.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    model(images)
    torch.testing.assert_close(found[0], io["eval.iam_logits"], **CLOSE)


@torch.no_grad()
def test_masks(io, model, images):
    """At half the stride of the embeddings, as they are compared."""
    outputs = model(images)
    probabilities = torch.stack([model._probabilities(outputs, i, slice(None)) for i in range(2)])
    torch.testing.assert_close(probabilities, io["eval.decoder.pred_masks"].sigmoid(), rtol=0, atol=5e-4)
    image = torch.arange(2).repeat_interleave(12)
    queries = Queries(outputs.kernels.flatten(0, 1), image, image)
    decoded = model.decode(queries, PixelMap(outputs.pixels.embeddings, 8))
    doubled = torch.nn.functional.interpolate(decoded[None], scale_factor=2, mode="bilinear")[0].unflatten(0, (2, 12))
    torch.testing.assert_close(doubled, io["eval.decoder.pred_masks"], **CLOSE)


@pytest.mark.parametrize("run", ["eval.out", "eval_resized.out"])
@torch.no_grad()
def test_predictions(io, model, images, run):
    """Ours are sorted by score, the original's by query; 'resized' keeps its first six."""
    sizes = [tuple(io[f"{run}.{i}.pred_masks"].shape[1:]) for i in range(2)]
    for i, instances in enumerate(model.predict(model(images), sizes)):
        wanted = {name: io[f"{run}.{i}.{name}"] for name in ("scores", "pred_classes", "pred_masks")}
        assert len(instances) == len(io[f"eval.out.{i}.scores"])
        for score, label, mask in zip(*wanted.values(), strict=True):
            k = (instances.scores - score).abs().argmin()
            assert instances.scores[k].item() == pytest.approx(score.item(), abs=5e-4)
            assert instances.labels[k] == label
            assert (instances.masks[k] != mask.bool()).float().mean() < 1e-4


@torch.no_grad()
def test_matching(io, model, images, targets):
    assignment = model.assign(model(images), targets)
    for i in range(2):
        mine = assignment[assignment.image == i]
        assert torch.equal(mine.query, io[f"train.matched.{i}.0"])
        assert torch.equal(mine.target, io[f"train.matched.{i}.1"])


def test_training_losses_and_gradients(io, model, images, targets, groups):
    numbers = json.loads(reference(*FOLDERS[groups], "numbers.json").read_text())
    outputs = model.train()(images)
    check_outputs(io, outputs)
    losses = model.losses(outputs, targets, model.assign(outputs, targets))
    original = {"class": "ce", "mask": "mask", "dice": "dice", "objectness": "objectness"}
    assert set(losses) == {f"loss_{name}" for name in original}
    for ours, theirs in original.items():
        assert losses[f"loss_{ours}"].item() == pytest.approx(numbers["losses"][f"loss_{theirs}"], rel=1e-4), ours
    torch.stack(list(losses.values())).sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    wanted = sparseinst_names(load_file(reference(*FOLDERS[groups], "grads.safetensors")))
    assert set(wanted) == set(ours)
    for name, gradient in wanted.items():
        assert ours[name].norm().item() == pytest.approx(gradient.norm().item(), rel=1e-3, abs=1e-6), name
        difference = (ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert difference.item() < 5e-3, name  # beyond the norms: also the direction


@torch.no_grad()
def test_both_mask_losses_are_what_the_views_are_compared_by(model, images, targets):
    outputs = model(images)
    assignment = model.assign(outputs, targets)
    losses = model.losses(outputs, targets, assignment)
    queries = model.queries(outputs, assignment)
    queries = queries[queries.target >= 0]
    alone = model.mask_loss(model.decode(queries, outputs.pixels), queries, targets)
    assert alone.item() == pytest.approx((losses["loss_mask"] + losses["loss_dice"]).item(), rel=1e-6)
