"""What holds for every backbone of the table, and for both kinds of normalization."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from uniquery.backbones import BACKBONES
from uniquery.backbones.base import STRIDES, StagedBackbone
from uniquery.backbones.efficientnet_lite import EfficientNetLite
from uniquery.backbones.resnet import ResNet
from uniquery.backbones.swin import Swin
from uniquery.backbones.tiny import Tiny
from uniquery.layers.norm import ConvNorm, FrozenBatchNorm2d

SMALL = {
    "basic": lambda norm: ResNet(18, norm=norm, stem_channels=8, width=8),
    "bottleneck": lambda norm: ResNet(50, norm=norm, stem_channels=8, width=4),
    "deformable": lambda norm: deformed(
        ResNet(50, norm=norm, stem_channels=8, width=4, deformable_stages=("res4", "res5"))
    ),
    "modulated": lambda norm: deformed(
        ResNet(50, norm=norm, stride_in_1x1=True, stem_channels=8, width=4, deformable_stages=("res3",), modulated=True)
    ),
    "caffe": lambda norm: ResNet(50, norm=norm, stride_in_1x1=True, stem_channels=8, width=4, res2_channels=24),
    "efficientnet_lite0": lambda norm: EfficientNetLite(0, norm=norm),
    "efficientnet_lite2": lambda norm: EfficientNetLite(2, norm=norm),
    "swin": lambda norm: Swin(8, (2, 2, 2, 2), window=3, head_channels=4, drop_path=0.0),
    "tiny": lambda norm: Tiny(),
}


def deformed(resnet: ResNet) -> ResNet:
    """With offsets that are not 0."""
    for key, parameter in resnet.named_parameters():
        if "conv2_offset" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return resnet


def made(name: str, norm: str = "frozen") -> StagedBackbone:
    """A backbone in which no normalization is the identity."""
    torch.manual_seed(0)
    backbone = SMALL[name](norm)
    for module in backbone.modules():
        if isinstance(module, FrozenBatchNorm2d | nn.BatchNorm2d):
            module.weight.data.uniform_(0.4, 0.8)
            module.bias.data.normal_(std=0.2)
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 2.0)
    return backbone


def loss_of(features: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.stack([feature.pow(2).mean() for feature in features.values()]).sum()


@pytest.fixture(params=sorted(SMALL))
def name(request):
    return request.param


@pytest.mark.parametrize("size", [(64, 96), (65, 97), (33, 70), (1, 31)])
def test_every_stride_rounds_up(name, size):
    backbone = made(name).eval()
    features = backbone(torch.randn(2, 3, *size))
    assert tuple(features) == STRIDES
    for stride, feature in features.items():
        expected = (2, backbone.channels[stride], *(math.ceil(side / stride) for side in size))
        assert feature.shape == expected


@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_the_gradient_reaches_every_parameter(name, norm):
    backbone = made(name, norm)
    features = backbone(torch.randn(2, 3, 64, 64))
    loss_of(features).backward()
    gradients = {key: value.grad for key, value in backbone.named_parameters()}
    assert [key for key, gradient in gradients.items() if gradient is None or not gradient.any()] == []


@pytest.mark.parametrize("norm", ["frozen", "batch"])
@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_frozen_stages_get_no_gradient_and_the_others_do(name, norm, count):
    backbone = made(name, norm)
    backbone.freeze(count)
    loss_of(backbone(torch.randn(2, 3, 64, 64))).backward()
    for index, stage in enumerate(backbone.stages()):
        has_gradient = {parameter.grad is not None for parameter in stage.parameters()}
        assert has_gradient <= {index >= count}


def test_frozen_stages_keep_nothing_for_the_backward_pass(name):
    backbone = made(name, "batch")
    backbone.freeze(2)
    features = backbone(torch.randn(2, 3, 64, 64))
    assert not features[4].requires_grad
    assert features[8].requires_grad


def test_a_training_step_leaves_frozen_stages_untouched_and_moves_the_others(name):
    backbone = made(name, "batch").train()
    backbone.freeze(2)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=0.1)
    loss_of(backbone(torch.randn(2, 3, 64, 64))).backward()
    optimizer.step()
    moved = {key for key, value in backbone.state_dict().items() if not torch.equal(value, before[key])}
    stages = dict.fromkeys(key.split(".")[0] for key in before)
    assert {key.split(".")[0] for key in moved} == set(list(stages)[2:])
    kernels = {key for key, value in backbone.named_parameters() if value.requires_grad and value.ndim == 4}
    statistics = {key for key in before if key.endswith("num_batches_tracked")}
    assert kernels | statistics <= moved


def test_freezing_changes_nothing_in_evaluation(name):
    backbone = made(name, "batch").eval()
    images = torch.randn(1, 3, 64, 64)
    before = backbone(images)
    backbone.freeze(4)
    after = backbone(images)
    for stride in STRIDES:
        torch.testing.assert_close(after[stride], before[stride], rtol=1e-3, atol=1e-4)


def test_training_and_evaluation_are_the_same_with_frozen_normalization(name):
    backbone, images = made(name), torch.randn(2, 3, 65, 64)
    trained, evaluated = backbone.train()(images), backbone.eval()(images)
    assert all(torch.equal(trained[stride], evaluated[stride]) for stride in STRIDES)


def test_batch_normalization_differs_between_training_and_evaluation():
    backbone, images = made("basic", "batch"), torch.randn(2, 3, 64, 64)
    evaluated, trained = backbone.eval()(images), backbone.train()(images)
    assert not torch.allclose(trained[32], evaluated[32], atol=1e-2)


def test_an_image_does_not_see_its_neighbors(name):
    backbone, images = made(name).eval(), torch.randn(3, 3, 64, 64)
    together, alone = backbone(images), backbone(images[1:2])
    for stride in STRIDES:
        torch.testing.assert_close(together[stride][1:2], alone[stride], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["basic", "bottleneck", "efficientnet_lite0", "swin"])
@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_features_lie_channels_last_for_speed(name, norm):
    features = made(name, norm)(torch.randn(2, 3, 64, 64))
    assert all(feature.is_contiguous(memory_format=torch.channels_last) for feature in features.values())


def test_the_input_is_not_changed(name):
    images = torch.randn(1, 3, 64, 64)
    kept = images.clone()
    made(name)(images)
    assert torch.equal(images, kept)


@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_weights_survive_a_file(name, norm, tmp_path):
    backbone, images = made(name, norm).eval(), torch.randn(1, 3, 64, 64)
    save_file(backbone.state_dict(), tmp_path / "backbone.safetensors")
    again = SMALL[name](norm).eval()
    again.load_state_dict(load_file(tmp_path / "backbone.safetensors"))
    assert torch.equal(again(images)[32], backbone(images)[32])


def test_a_frozen_backbone_takes_the_weights_of_a_learning_one(name):
    learning, frozen = made(name, "batch").eval(), SMALL[name]("frozen")
    frozen.load_state_dict(learning.state_dict())
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(frozen(images)[32], learning(images)[32], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_the_table_promises_what_it_builds(name):
    with torch.device("meta"):  # shapes without numbers: the largest has 200 million parameters
        backbone = BACKBONES[name].build("batch", False)
        features = backbone(torch.randn(2, 3, 64, 64))
    assert {stride: feature.shape[1] for stride, feature in features.items()} == backbone.channels
    assert backbone.pixels.order == "RGB"
    assert all(value > 1 for value in backbone.pixels.mean + backbone.pixels.std)


def test_random_weights_neither_vanish_nor_explode(name):
    torch.manual_seed(0)
    features = SMALL[name]("batch")(torch.randn(2, 3, 96, 96))
    assert all(0.05 < feature.std() < 20 for feature in features.values())


def test_tiny_is_quick():
    backbone = Tiny()
    with FlopCounterMode(display=False) as counter:
        backbone(torch.randn(2, 3, 128, 128))[32].sum().backward()
    assert counter.get_total_flops() < 5e8
    assert sum(parameter.numel() for parameter in backbone.parameters()) < 250_000


def test_the_two_conventions_halve_in_different_places():
    strides = {}
    for caffe in (False, True):
        block = ResNet(50, norm="frozen", stride_in_1x1=caffe, stem_channels=8, width=4).res3[0]
        strides[caffe] = [part.stride[0] for part in (block.conv1, block.conv2, block.conv3, block.shortcut)]
    assert strides == {False: [1, 2, 1, 2], True: [2, 1, 1, 2]}


def test_only_the_first_block_of_a_stage_has_a_projection():
    backbone = ResNet(50, norm="frozen", stem_channels=8, width=4)
    for stage in backbone.stages()[1:]:
        assert [isinstance(block.shortcut, ConvNorm) for block in stage] == [True] + [False] * (len(stage) - 1)
