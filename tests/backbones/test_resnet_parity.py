"""The ResNet equals the originals' on the same weights, in both conventions, by the key map that loads them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.reference import reference
from uniquery.backbones.key_maps import resnet_key
from uniquery.backbones.pretrained import load_weights
from uniquery.backbones.resnet import ResNet

pytestmark = pytest.mark.realdata
# SOLQ's reference counts the maps from stride 8.
MAPS = {4: ("res2",), 8: ("res3", "0"), 16: ("res4", "1"), 32: ("res5", "2")}
RUNS = [
    ("condinst", 4, True, "eval0"),
    ("condinst", 4, True, "eval1"),
    ("condinst", 4, True, "train"),
    ("solov2", 8, True, "eval"),
    ("sotr", 8, True, "eval"),
    ("mask2former", 8, False, "eval"),
    ("sparseinst", 8, False, "eval"),
    ("solq", 4, False, "eval"),
]


def resnet_of(model: str, width: int, stride_in_1x1: bool) -> ResNet:
    resnet = ResNet(50, norm="frozen", stride_in_1x1=stride_in_1x1, stem_channels=8, width=width, res2_channels=16)
    report = load_weights(resnet, reference("parity", model, "state_dict.safetensors"), resnet_key)
    assert set(report.loaded) == set(resnet.state_dict())
    return resnet


def compared(model: str, width: int, stride_in_1x1: bool, run: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    io = load_file(reference("parity", model, "io.safetensors"))
    images = io["input.padded_normalised" if model == "solq" else f"{run}.padded_normalised_image"]
    features = resnet_of(model, width, stride_in_1x1)(images)
    names = {f"{run}.resnet.{name}": stride for stride, names in MAPS.items() for name in names}
    return {stride: (features[stride], io[name]) for name, stride in names.items() if name in io}


@pytest.mark.parametrize(("model", "width", "stride_in_1x1", "run"), RUNS)
def test_features_equal_the_originals(model, width, stride_in_1x1, run):
    """To 1e-4; after fifty layers, to 1e-4 of the map's range.

    These networks amplify rounding: the original itself is as far from its float64 result as we are.
    """
    maps = compared(model, width, stride_in_1x1, run)
    assert {8, 16, 32} <= set(maps)
    for stride, (ours, original) in maps.items():
        slack = original.abs().max().item() if stride > 8 else 1.0
        torch.testing.assert_close(ours, original, rtol=1e-4, atol=1e-4 * slack)


@pytest.mark.parametrize(("model", "width", "stride_in_1x1", "run"), [RUNS[0], RUNS[-1]])
def test_the_other_convention_would_not_pass(model, width, stride_in_1x1, run):
    ours, original = compared(model, width, not stride_in_1x1, run)[8]
    assert (ours - original).abs().max() > 0.1


@pytest.mark.parametrize("model", ["condinst", "solov2", "sotr", "mask2former", "sparseinst", "solq"])
def test_checkpoints_of_the_full_originals_name_every_tensor(model):
    """By the names and shapes of the full models: detectron2's, and in SOLQ torchvision's."""
    content = json.loads(reference("parity", model, "full_state_dict_shapes.json").read_text())
    shapes = {resnet_key(key): shape for key, shape in content.items()}
    ours = ResNet(50, norm="frozen").state_dict()
    assert {key: shapes.get(key) for key in ours} == {key: list(value.shape) for key, value in ours.items()}
