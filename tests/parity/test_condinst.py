"""CondInst equals the original on the same weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.reference import reference
from uniquery.backbones.resnet import ResNet
from uniquery.layers.resize import aligned_bilinear
from uniquery.segmenters.condinst import CondInst, CondInstConfig
from uniquery.structures import Images, Targets
from uniquery.weights.foreign.adelaidet import condinst_names

pytestmark = [pytest.mark.realdata, pytest.mark.usefixtures("original_rounding")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LEVELS = 5


@pytest.fixture(scope="module")
def io():
    return load_file(reference("parity", "condinst", "io.safetensors"))


def tiny_condinst() -> CondInst:
    """The reference's small configuration with its weights."""
    config = CondInstConfig(
        channels=64,
        head_convs=2,
        mask_channels=32,
        mask_convs=2,
        size_limits=(12, 20, 32, 48),
        candidates=40,
        max_detections=12,
    )
    backbone = ResNet(50, norm="frozen", stride_in_1x1=True, stem_channels=8, width=4, res2_channels=16)
    model = CondInst(backbone, 5, config)
    foreign = load_file(reference("parity", "condinst", "state_dict.safetensors"))
    model.load_state_dict(condinst_names(foreign))
    return model.eval()


@pytest.fixture
def model():
    return tiny_condinst()


def batch(io, indices) -> Images:
    """The original's images (BGR), padded at the bottom and the right to a multiple of 32."""
    images = [io[f"input.{i}.image"].flip(0) for i in indices]
    sizes = tuple((image.shape[1], image.shape[2]) for image in images)
    height, width = (-(-max(side) // 32) * 32 for side in zip(*sizes, strict=True))
    pixels = torch.stack(
        [torch.nn.functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    )
    return Images(pixels, sizes)


def targets(io, images: Images) -> list[Targets]:
    height, width = images.pixels.shape[-2:]
    padded = [
        torch.nn.functional.pad(io[f"target.{i}.masks"], (0, width - w, 0, height - h))
        for i, (h, w) in enumerate(images.sizes)
    ]
    return [Targets(io[f"target.{i}.classes"], io[f"target.{i}.boxes"], m.bool(), i) for i, m in enumerate(padded)]


def of_levels(io, name):
    """The original's maps of all levels, flattened and joined as ours are."""
    return torch.cat([io[f"{name}.{level}"].flatten(2) for level in range(LEVELS)], dim=2).mT


@pytest.mark.parametrize("i", [0, 1])
def test_outputs_in_evaluation(io, model, i):
    images = batch(io, [i])
    torch.testing.assert_close(model.normalize(images), io[f"eval{i}.padded_normalised_image"], **CLOSE)
    with torch.no_grad():
        pyramid = model.fpn(model.backbone(model.normalize(images)))
        outputs = model(images)
    for level, features in enumerate(pyramid.values()):
        torch.testing.assert_close(features, io[f"eval{i}.backbone.p{level + 3}"], **CLOSE)
    check_maps(io, outputs, f"eval{i}")


def check_maps(io, outputs, run):
    torch.testing.assert_close(outputs.pixels.embeddings, io[f"{run}.mask_feats"], **CLOSE)
    torch.testing.assert_close(outputs.logits, of_levels(io, f"{run}.fcos.cls_logits"), **CLOSE)
    torch.testing.assert_close(outputs.distances, of_levels(io, f"{run}.fcos.bbox_reg"), **CLOSE)
    torch.testing.assert_close(outputs.centerness, of_levels(io, f"{run}.fcos.ctrness").squeeze(2), **CLOSE)
    torch.testing.assert_close(outputs.filters, of_levels(io, f"{run}.fcos.controller"), **CLOSE)


@pytest.mark.parametrize("i", [0, 1])
@torch.no_grad()
def test_predictions(io, model, i):
    images = batch(io, [i])
    outputs = model(images)
    (instances,) = model.predict(outputs, images.sizes)
    check_instances(io, instances, f"eval{i}.out")


@torch.no_grad()
def test_predictions_at_another_size(io, model):
    for i in (0, 1):
        images = batch(io, [i])
        height, width = images.sizes[0]
        (instances,) = model.predict(model(images), [(int(1.25 * height), int(1.25 * width))])
        check_instances(io, instances[torch.arange(6)], f"eval_resized.out.{i}")


def check_instances(io, instances, run):
    torch.testing.assert_close(instances.scores, io[f"{run}.scores"], rtol=0, atol=5e-4)
    assert torch.equal(instances.labels, io[f"{run}.pred_classes"])
    torch.testing.assert_close(instances.boxes, io[f"{run}.pred_boxes"], rtol=1e-4, atol=1e-3)
    differing = (instances.masks != io[f"{run}.pred_masks"].bool()).float().mean()
    assert differing < 1e-4


@torch.no_grad()
def test_mask_probabilities(io, model):
    for i in (0, 1):
        outputs = model(batch(io, [i]))
        wanted = io[f"eval{i}.mask_head_in.locations"]
        index = (outputs.locations[None] == wanted[:, None]).all(2) & (
            outputs.strides[None] == 8 * 2 ** io[f"eval{i}.mask_head_in.fpn_levels"][:, None]
        )
        location = index.float().argmax(1)
        zeros = torch.zeros_like(location)
        queries = model._queries_at(outputs, zeros, location, zeros - 1)
        torch.testing.assert_close(queries.embeddings, io[f"eval{i}.mask_head_in.mask_head_params"], **CLOSE)
        logits = aligned_bilinear(model.decode(queries, outputs.pixels)[:, None], 2)
        torch.testing.assert_close(logits.sigmoid(), io[f"eval{i}.out.pred_global_masks"], rtol=0, atol=5e-4)


def test_assignment(io, model):
    images = batch(io, [0, 1])
    outputs = model(images)
    assignment = model.assign(outputs, targets(io, images))
    labels = [io[f"train.fcos_targets.labels.{level}"].view(2, -1) for level in range(LEVELS)]
    wanted = torch.cat(labels, dim=1)  # (B, L), 5 is background
    ours = torch.full_like(wanted, 5)
    ours[assignment.image, assignment.query] = torch.stack(
        [
            io[f"target.{i}.classes"][t]
            for i, t in zip(assignment.image.tolist(), assignment.target.tolist(), strict=True)
        ]
    )
    assert torch.equal(ours, wanted)
    owners = torch.cat([io[f"train.fcos_targets.target_inds.{level}"].view(2, -1) for level in range(LEVELS)], dim=1)
    starts = torch.tensor([0, len(io["target.0.classes"])])
    assert torch.equal(assignment.target + starts[assignment.image], owners[assignment.image, assignment.query])


def test_training_losses_and_gradients(io, model):
    numbers = json.loads(reference("parity", "condinst", "numbers.json").read_text())
    model.train()
    images = batch(io, [0, 1])
    outputs = model(images)
    check_maps(io, outputs, "train")
    truth = targets(io, images)
    assignment = model.assign(outputs, truth)
    losses = model.losses(outputs, truth, assignment)
    theirs = {
        "loss_class": "loss_fcos_cls",
        "loss_box": "loss_fcos_loc",
        "loss_centerness": "loss_fcos_ctr",
        "loss_mask": "loss_mask",
    }
    for name, loss in losses.items():
        assert loss.item() == pytest.approx(numbers["losses"][theirs[name]], rel=1e-4), name
    sum(losses.values()).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    foreign = load_file(reference("parity", "condinst", "grads.safetensors"))
    wanted = condinst_names(foreign)
    assert set(wanted) == {name for name, grad in ours.items() if grad is not None}
    for name, gradient in wanted.items():
        assert ours[name].norm().item() == pytest.approx(gradient.norm().item(), rel=1e-3), name
        scale = gradient.norm().clamp(min=1e-6)
        assert ((ours[name] - gradient).norm() / scale).item() < 5e-3, name  # beyond the norms: also the direction
