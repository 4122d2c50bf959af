"""SOLQ's checkpoints: every key and shape of the original has its place in ours, and the other way."""

import argparse
import json

import pytest
import torch

from helpers.reference import reference
from uniquery.backbones.resnet import ResNet
from uniquery.backbones.swin import Swin
from uniquery.segmenters.solq import SOLQ, SOLQConfig
from uniquery.weights.foreign import to_uniquery_names
from uniquery.weights.foreign.solq import is_solq, original_solq_names, solq_names
from uniquery.weights.model_file import read_foreign

SMALL = SOLQConfig(
    queries=5, channels=32, heads=4, encoder_layers=2, decoder_layers=3, width=16, mask_size=16, vector_length=20
)
# The 80 categories of COCO, from its annotation file.
COCO = [
    *range(1, 12), *range(13, 26), 27, 28, *range(31, 45), *range(46, 66), 67, 70, *range(72, 83), *range(84, 91)
]  # fmt: skip


def small_model(classes: int = 80) -> SOLQ:
    torch.manual_seed(0)
    return SOLQ(ResNet(50, norm="frozen", stem_channels=4, width=4), classes, SMALL)


@pytest.fixture(scope="module")
def shapes() -> dict[str, list[int]]:
    """Of the full original with a ResNet-50."""
    return json.loads(reference("parity", "solq", "full_state_dict_shapes.json").read_text())


@pytest.mark.realdata
def test_every_tensor_of_the_full_original(shapes):
    theirs = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with torch.device("meta"):
        model = SOLQ(ResNet(50, norm="frozen"), 80)
    ours = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    assert is_solq(theirs)
    assert {name: list(tensor.shape) for name, tensor in solq_names(theirs).items()} == ours
    back = original_solq_names(model.state_dict())
    assert {name: list(tensor.shape) for name, tensor in back.items()} == shapes


def test_there_and_back():
    state = small_model().state_dict()
    theirs = original_solq_names(state)
    assert is_solq(theirs)
    assert len(theirs) == len(state) + 3 * 6 + 2 * 6  # the boxes' alias, and the vectors' in two more layers
    again = to_uniquery_names(theirs)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_an_alias_is_the_same_tensor():
    theirs = original_solq_names(small_model().state_dict())
    for layer in range(3):
        assert theirs[f"vector_embed.{layer}.layers.1.weight"] is theirs["vector_embed.0.layers.1.weight"]
        name = f"bbox_embed.{layer}.layers.2.bias"
        assert theirs[f"transformer.decoder.{name}"] is theirs[name]


def test_classes_are_category_ids_there():
    assert len(COCO) == 80
    weight, bias = torch.randn(91, 32), torch.randn(91)
    ours = solq_names({"class_embed.1.weight": weight, "class_embed.1.bias": bias})
    assert torch.equal(ours["decoder.classes.1.weight"], weight[COCO])
    assert torch.equal(ours["decoder.classes.1.bias"], bias[COCO])
    theirs = original_solq_names(ours)
    assert torch.equal(theirs["class_embed.1.weight"][COCO], weight[COCO])
    unused = [i for i in range(91) if i not in COCO]
    assert len(unused) == 11
    logits = torch.randn(5, 32) @ theirs["class_embed.1.weight"].T + theirs["class_embed.1.bias"]
    assert (logits[:, unused].sigmoid() < 1e-6).all()


def test_other_numbers_of_classes_stay():
    state = small_model(20).state_dict()
    theirs = original_solq_names(state)
    assert theirs["class_embed.0.weight"].shape == (20, 32)
    assert torch.equal(solq_names(theirs)["decoder.classes.0.bias"], state["decoder.classes.0.bias"])


def test_a_swin():
    """The original does not normalize a Swin's first output: ours then has a normalization that changes nothing."""
    model = SOLQ(Swin(32, (1, 1, 1, 1), window=4), 80, SMALL)
    state = model.state_dict()
    theirs = original_solq_names(state)
    assert {"backbone.0.body.layers.0.downsample.norm.weight", "backbone.0.body.norm1.bias"} <= set(theirs)
    assert not any(name.startswith("backbone.0.body.norm0.") for name in theirs)
    theirs["backbone.0.body.layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(1)
    again = to_uniquery_names(theirs)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_a_published_file(tmp_path):
    model, other = small_model(), small_model()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    content = {"model": original_solq_names(model.state_dict()), "args": argparse.Namespace(lr=2e-4), "epoch": 49}
    torch.save(content, tmp_path / "solq.pth")
    other.load_state_dict(to_uniquery_names(read_foreign(tmp_path / "solq.pth")))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
