"""SOLOv2 and SOTR equal the originals on the same weights."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from helpers.reference import reference
from uniquery.backbones.resnet import ResNet
from uniquery.layers.padding import GroupNorm
from uniquery.masks.geometry import mask_boxes
from uniquery.segmenters.grid import positive_cells, quarter_masks
from uniquery.segmenters.solov2 import SOLOv2, SOLOv2Config
from uniquery.segmenters.sotr import SOTR, SOTRConfig
from uniquery.structures import Images, Targets
from uniquery.weights.foreign.adelaidet import solov2_names
from uniquery.weights.foreign.sotr import sotr_names

pytestmark = [pytest.mark.realdata, pytest.mark.usefixtures("original_rounding")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
GRIDS = (16, 12, 10, 8, 6)
BACKGROUND = 5


OUR_NAMES = {"solov2": solov2_names, "sotr": sotr_names}
COMMON = {
    "channels": 64,
    "kernel_channels": 64,
    "grids": GRIDS,
    "size_ranges": ((1, 32), (16, 40), (24, 56), (40, 72), (56, 2048)),
    "candidates": 80,
    "max_detections": 20,
}


@pytest.fixture(scope="module", params=["solov2", "sotr"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def io(name):
    return load_file(reference("parity", name, "io.safetensors"))


@pytest.fixture
def model(name):
    """The reference's small configuration with its weights."""
    backbone = ResNet(50, norm="frozen", stride_in_1x1=True, stem_channels=8, width=8, res2_channels=16)
    if name == "solov2":
        config = SOLOv2Config(**COMMON, head_channels=64, head_convs=2, mask_channels=64)
        model = SOLOv2(backbone, BACKGROUND, config)
    else:
        model = SOTR(backbone, BACKGROUND, SOTRConfig(**COMMON, layers=2, heads=4, mask_channels=32))
        for module in model.mask_head.refine.modules():
            if isinstance(module, GroupNorm):
                module.num_groups = 32  # of one channel each, which we avoid; of 128 channels both make 32 groups
    model.load_state_dict(OUR_NAMES[name](load_file(reference("parity", name, "state_dict.safetensors"))))
    return model.eval()


@pytest.fixture
def images(io) -> Images:
    """The original's images (BGR), padded at the bottom and the right to a multiple of 32."""
    pictures = [io[f"input.{i}.image"].flip(0) for i in range(2)]
    sizes = tuple((picture.shape[1], picture.shape[2]) for picture in pictures)
    height, width = (-(-max(side) // 32) * 32 for side in zip(*sizes, strict=True))
    return Images(torch.stack([F.pad(p, (0, width - p.shape[2], 0, height - p.shape[1])) for p in pictures]), sizes)


@pytest.fixture
def truth(io, images) -> list[Targets]:
    height, width = images.pixels.shape[-2:]
    masks = [F.pad(io[f"target.{i}.masks"], (0, width - w, 0, height - h)) for i, (h, w) in enumerate(images.sizes)]
    return [Targets(io[f"target.{i}.classes"], io[f"target.{i}.boxes"], m.bool(), i) for i, m in enumerate(masks)]


def of_levels(io, name):
    """The original's maps of all levels, flattened and joined as ours are."""
    return torch.cat([io[f"{name}.{level}"].flatten(2) for level in range(len(GRIDS))], dim=2).mT


def check_maps(io, outputs):
    torch.testing.assert_close(outputs.pixels.embeddings, io["eval.mask_feats"], **CLOSE)
    torch.testing.assert_close(outputs.logits, of_levels(io, "eval.cate_logits"), **CLOSE)
    torch.testing.assert_close(outputs.kernels, of_levels(io, "eval.kernels"), **CLOSE)


@torch.no_grad()
def test_outputs_in_evaluation(io, model, images):
    torch.testing.assert_close(model.normalize(images), io["eval.padded_normalised_image"], **CLOSE)
    for level, features in enumerate(model.fpn(model.backbone(model.normalize(images))).values()):
        wanted = io[f"eval.backbone.p{level + 2}"]  # its values spread by 16, and rounding with them
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4 * wanted.std().item())
    check_maps(io, model(images))


@torch.no_grad()
@pytest.mark.parametrize("name", ["sotr"], indirect=True)
def test_the_transformer_on_the_coarsest_features(io, model):
    (ours,) = model.transformer([io["eval.backbone.p5"]])
    wanted = io["eval.mask_extra_feat.0"]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4 * wanted.std().item())


@torch.no_grad()
@pytest.mark.parametrize("name", ["solov2"], indirect=True)
def test_candidates(io, model, images):
    outputs = model(images)
    for i in range(2):
        _, labels, scores = model._candidates(outputs, i, mask_threshold=0.5)
        assert torch.equal(labels, io[f"eval.matrix_nms.{i}.in_labels"])
        torch.testing.assert_close(scores, io[f"eval.matrix_nms.{i}.in_scores"], rtol=0, atol=5e-4)


@torch.no_grad()
def test_predictions(io, model, images):
    for i, instances in enumerate(model.predict(model(images), images.sizes)):
        check_instances(io, instances, f"eval.out.{i}")


@torch.no_grad()
def test_predictions_at_another_size(io, model, images):
    sizes = [(int(1.25 * height), int(1.25 * width)) for height, width in images.sizes]
    for i, instances in enumerate(model.predict(model(images), sizes)):
        kept = torch.arange(len(io[f"eval_resized.out.{i}.scores"]))
        check_instances(io, instances[kept], f"eval_resized.out.{i}")


def check_instances(io, instances, run):
    torch.testing.assert_close(instances.scores, io[f"{run}.scores"], rtol=0, atol=5e-4)
    assert torch.equal(instances.labels, io[f"{run}.pred_classes"])
    differing = (instances.masks != io[f"{run}.pred_masks"].bool()).float().mean()
    assert differing < 1e-4
    assert torch.equal(instances.boxes, mask_boxes(instances.masks))  # the original's boxes are zeros


def test_assignment(io, model, images, truth):
    assignment = model.assign(model(images), truth)
    image, cell, labels = positive_cells(assignment, truth, sum(s * s for s in GRIDS))
    ours = torch.full((2, sum(s * s for s in GRIDS)), BACKGROUND)
    ours[image, cell] = labels
    for i, masks in enumerate(quarter_masks(t.masks) for t in truth):
        starts = [sum(s * s for s in GRIDS[:level]) for level in range(len(GRIDS))]
        wanted = [io[f"train.target.cate_label.{i}.{level}"].flatten() for level in range(len(GRIDS))]
        assert torch.equal(ours[i], torch.cat(wanted))
        positive = [io[f"train.target.ins_ind_label.{i}.{level}"] for level in range(len(GRIDS))]
        assert torch.equal((ours[i] != BACKGROUND), torch.cat(positive).bool())
        mine = assignment[assignment.image == i]
        pairs = [
            (start + at.item(), mask.bool().tolist())
            for level, start in enumerate(starts)
            for at, mask in zip(
                io[f"train.target.grid_order.{i}.{level}"], io[f"train.target.ins_label.{i}.{level}"], strict=True
            )
        ]
        owned = [(at.item(), masks[t].tolist()) for at, t in zip(mine.query, mine.target, strict=True)]
        assert sorted(owned) == sorted(pairs)


def test_training_losses_and_gradients(io, model, name, images, truth):
    numbers = json.loads(reference("parity", name, "numbers.json").read_text())
    outputs = model.train()(images)
    check_maps(io, outputs)
    losses = model.losses(outputs, truth, model.assign(outputs, truth))
    theirs = {"loss_class": "loss_cate", "loss_mask": "loss_ins"}
    assert losses.keys() == theirs.keys()
    for key, loss in losses.items():
        assert loss.item() == pytest.approx(numbers["losses"][theirs[key]], rel=1e-4), key
    sum(losses.values()).backward()
    ours = {key: p.grad for key, p in model.named_parameters()}
    wanted = OUR_NAMES[name](load_file(reference("parity", name, "grads.safetensors")))
    assert set(wanted) == {key for key, grad in ours.items() if grad is not None}
    for key, gradient in wanted.items():
        assert ours[key].norm().item() == pytest.approx(gradient.norm().item(), rel=1e-3), key
        scale = gradient.norm().clamp(min=1e-6)
        assert ((ours[key] - gradient).norm() / scale).item() < 5e-3, key  # beyond the norms: also the direction
