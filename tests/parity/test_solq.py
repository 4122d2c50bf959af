"""SOLQ equals the original on the same weights."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from helpers.reference import reference
from uniquery.backbones.resnet import TORCHVISION_PIXELS, ResNet
from uniquery.layers.norm import ConvNorm
from uniquery.layers.normalize import Normalize
from uniquery.segmenters.solq import SOLQ, SOLQConfig
from uniquery.structures import Images, Targets
from uniquery.weights.foreign.solq import solq_keys

pytestmark = [pytest.mark.realdata, pytest.mark.usefixtures("original_rounding")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LAYERS = 2
PADDED = (96, 128)


@pytest.fixture
def original_rounding(monkeypatch):
    """See the conftest; SOLQ's own frozen normalization always scales and shifts, and its pixels are first in 0..1."""

    def normalize(self, images):
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        x = (images.pixels / 255 - mean[:, None, None]) / std[:, None, None]
        for pixels, (height, width) in zip(x, images.sizes, strict=True):
            pixels[:, height:] = 0
            pixels[:, :, width:] = 0
        return x

    def forward(self, x):
        scale, shift = self.norm.scale_and_shift()
        y = F.conv2d(x, self.weight, None, self.stride, self.padding, self.dilation, self.groups)
        return y * scale[:, None, None] + shift[:, None, None]

    monkeypatch.setattr(Normalize, "forward", normalize)
    monkeypatch.setattr(ConvNorm, "forward", forward)


@pytest.fixture(scope="module")
def io():
    return load_file(reference("parity", "solq", "io.safetensors"))


@pytest.fixture
def model():
    """The reference's small configuration with its weights; its classes are category ids."""
    config = SOLQConfig(
        queries=20, channels=64, heads=4, encoder_layers=2, decoder_layers=LAYERS, width=64, vector_width=64, dropout=0
    )
    backbone = ResNet(50, norm="frozen", stem_channels=8, width=4, res2_channels=16)
    backbone.freeze(2)
    model = SOLQ(backbone, 91, config)
    model.load_state_dict(solq_keys(load_file(reference("parity", "solq", "state_dict.safetensors"))))
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
        return F.pad(masks, (0, PADDED[1] - masks.shape[2], 0, PADDED[0] - masks.shape[1])).bool()

    return [
        Targets(io[f"target.{i}.labels_1based"], io[f"target.{i}.boxes"], padded(io[f"target.{i}.masks"]), i)
        for i in range(2)
    ]


def check_outputs(io, model, outputs):
    torch.testing.assert_close(outputs.embeddings, io["eval.hs"], **CLOSE)
    torch.testing.assert_close(outputs.boxes[:-1].detach(), io["eval.inter_references"][:-1], **CLOSE)
    vectors = model.vectors(outputs.embeddings)
    for layer in range(LAYERS):
        name = "eval.out." + ("" if layer == LAYERS - 1 else f"aux_outputs.{layer}.")
        torch.testing.assert_close(outputs.logits[layer], io[f"{name}pred_logits"], **CLOSE)
        torch.testing.assert_close(outputs.boxes[layer], io[f"{name}pred_boxes"], **CLOSE)
        torch.testing.assert_close(vectors[layer], io[f"{name}pred_vectors"], **CLOSE)


def test_pixels(io, images, monkeypatch):
    monkeypatch.undo()  # with our rounding
    normalize = Normalize(TORCHVISION_PIXELS.mean, TORCHVISION_PIXELS.std, TORCHVISION_PIXELS.order)
    torch.testing.assert_close(normalize(images), io["input.padded_normalised"], rtol=1e-5, atol=1e-5)


def test_outputs_in_evaluation(io, model, images):
    pixels = model.normalize(images)
    assert torch.equal(pixels, io["input.padded_normalised"])
    features = model.backbone(pixels)
    for level, stride in enumerate((8, 16, 32, 32)):  # that the features are equal is in test_resnet_parity
        projected = model.encoder.norms[level](model.encoder.projections[level](features[stride]))
        torch.testing.assert_close(projected, io[f"eval.input_proj.{level}"], **CLOSE)
    tokens = model.encoder(features, images.sizes)
    assert [height * width for height, width in tokens.shapes] == [192, 48, 12, 4]
    for level in range(3):
        padding = io[f"eval.mask.{level}"].bool().flatten(1)
        start = sum(h * w for h, w in tokens.shapes[:level])
        assert torch.equal(~tokens.valid[:, start : start + padding.shape[1]], padding)
    torch.testing.assert_close(tokens.values[tokens.valid], io["eval.encoder_memory"][tokens.valid], **CLOSE)
    outputs = model(images)
    check_outputs(io, model, outputs)
    finest = io["eval.encoder_memory"][:, :192].masked_fill(io["eval.mask.0"].bool().flatten(1)[..., None], 0)
    torch.testing.assert_close(outputs.pixels.embeddings.flatten(2).mT, finest, **CLOSE)


@torch.no_grad()
def test_predictions(io, model, images):
    """Boxes of the original may exceed the image; its masks, of which twelve are kept, may be empty."""
    for i, instances in enumerate(model.predict(model(images), images.sizes)):
        wanted = {name: io[f"eval.post.{i}.{name}"] for name in ("scores", "labels", "boxes")}
        masks = io[f"eval.post.{i}.masks_first12"][:, 0].bool()
        limit = torch.tensor(images.sizes[i][::-1] * 2)
        found = 0
        for k, (score, label, box) in enumerate(zip(*wanted.values(), strict=True)):
            box = torch.minimum(box.clamp(min=0), limit)
            same = (instances.labels == label) & ((instances.boxes - box).abs().amax(1) < 0.05)
            assert k >= len(masks) or same.any() == masks[k].any()
            if same.any():
                (j,) = same.nonzero().flatten().tolist()
                assert instances.scores[j].item() == pytest.approx(score.item(), abs=1e-4)
                found += 1
                if k < len(masks):
                    assert (instances.masks[j] != masks[k]).float().mean() < 1e-4
        assert found == len(instances) > 90


def test_matching(io, model, images, targets):
    outputs = model(images)
    assignment = model.assign(outputs, targets)
    for layer in range(LAYERS):
        recorded = LAYERS - 1 - layer  # the original matches its last layer first
        for i in range(2):
            mine = assignment[assignment.image == i]
            wanted = [io[f"train.matched.{recorded}.{i}.{part}"] for part in range(2)]
            assert torch.equal(mine.layer_query[:, layer], wanted[0])
            assert torch.equal(mine.layer_target[:, layer], wanted[1])


def test_target_vectors(io, model, targets):
    vectors = [model.mask_vectors.encode(t.masks, t.boxes)[io[f"train.matched.0.{i}.1"]] for i, t in enumerate(targets)]
    torch.testing.assert_close(torch.cat(vectors), io["train.target_vectors"], **CLOSE)


def test_training_losses_and_gradients(io, model, images, targets):
    numbers = json.loads(reference("parity", "solq", "numbers.json").read_text())
    weights = {"loss_class": ("loss_ce", 2), "loss_box": ("loss_bbox", 5), "loss_giou": ("loss_giou", 2)}
    weights["loss_vector"] = ("loss_vector", 1)  # its factor of 3 is in the original's value
    outputs = model.train()(images)
    check_outputs(io, model, outputs)
    losses = model.losses(outputs, targets, model.assign(outputs, targets))
    for name, (original, weight) in weights.items():
        assert losses[name].item() == pytest.approx(weight * numbers["losses"][original], rel=1e-4), name
    auxiliary = sum(weight * numbers["losses"][f"{original}_0"] for original, weight in weights.values())
    assert losses["loss_auxiliary"].item() == pytest.approx(auxiliary, rel=1e-4)
    total = torch.stack(list(losses.values())).sum()
    assert total.item() == pytest.approx(numbers["loss_sum"], rel=1e-4)
    total.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    # Its parameters have one name each: boxes that of the decoder's alias.
    grads = load_file(reference("parity", "solq", "grads.safetensors"))
    wanted = solq_keys({name.replace("transformer.decoder.bbox_embed", "bbox_embed"): g for name, g in grads.items()})
    assert set(wanted) == {name for name, grad in ours.items() if grad is not None}
    for name, gradient in wanted.items():
        scale = gradient.norm().clamp(min=1e-6)
        assert ours[name].norm().item() == pytest.approx(gradient.norm().item(), rel=1e-3, abs=1e-6), name
        assert ((ours[name] - gradient).norm() / scale).item() < 5e-3, name  # beyond the norms: also the direction
