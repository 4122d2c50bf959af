"""ResNets with deformable stages; what holds for every backbone is in test_backbone_contract.py."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import save_file

from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.backbones.key_maps import resnet_key
from uniquery.backbones.pretrained import load_weights
from uniquery.backbones.resnet import Bottleneck, DeformableBottleneck, ResNet, is_optional_in_resnet
from uniquery.errors import CheckpointError
from uniquery.layers.deformable_conv import deformable_conv2d

SMALL = {"norm": "frozen", "stem_channels": 8, "width": 4}
DEFORMABLE = {**SMALL, "deformable_stages": ("res4", "res5")}


def small(**settings) -> ResNet:
    torch.manual_seed(0)
    return ResNet(50, **{**DEFORMABLE, **settings})


def test_every_block_of_the_chosen_stages_and_no_other():
    blocks = {stage: list(getattr(small(), stage)) for stage in ("res2", "res3", "res4", "res5")}
    for stage, of_stage in blocks.items():
        wanted = DeformableBottleneck if stage in ("res4", "res5") else Bottleneck
        assert {type(block) for block in of_stage} == {wanted}


@pytest.mark.parametrize(("stride_in_1x1", "stride"), [(False, 2), (True, 1)])
def test_offsets_have_the_resolution_of_the_3x3(stride_in_1x1, stride):
    first, second, *_ = small(stride_in_1x1=stride_in_1x1).res4
    assert first.conv2.stride == first.conv2_offset.stride == (stride, stride)
    assert second.conv2.stride == second.conv2_offset.stride == (1, 1)


@pytest.mark.parametrize("stride_in_1x1", [False, True])
@torch.no_grad()
def test_with_new_offsets_it_is_the_plain_network(stride_in_1x1):
    plain = ResNet(50, **SMALL, stride_in_1x1=stride_in_1x1).double()
    deformable = small(stride_in_1x1=stride_in_1x1).double()
    missing, unexpected = deformable.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all(is_optional_in_resnet(key) for key in missing)
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    for ours, expected in zip(deformable(images).values(), plain(images).values(), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("modulated", [False, True])
@torch.no_grad()
def test_a_block_by_hand(modulated):
    """As in detectron2: channels 0 to 17 are offsets, the others, after a sigmoid, factors."""
    block = small(modulated=modulated).double().res4[0]
    for layer in (block.conv1, block.conv2, block.conv3, block.shortcut):
        layer.norm.weight.uniform_(0.5, 2)
        layer.norm.bias.normal_()
        layer.norm.running_mean.normal_()
    for parameter in block.conv2_offset.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 32, 8, 6, dtype=torch.float64)

    def norm(y, layer):
        return (y - layer.norm.running_mean[:, None, None]) / (
            layer.norm.running_var[:, None, None] + 1e-5
        ).sqrt() * layer.norm.weight[:, None, None] + layer.norm.bias[:, None, None]

    inner = norm(F.conv2d(x, block.conv1.weight), block.conv1).relu()
    offset = F.conv2d(inner, block.conv2_offset.weight, block.conv2_offset.bias, stride=2, padding=1)
    assert offset.shape[1] == (27 if modulated else 18)
    mask = offset[:, 18:].sigmoid() if modulated else None
    spatial = deformable_conv2d(inner, offset[:, :18], block.conv2.weight, mask=mask, stride=2, padding=1)
    out = norm(F.conv2d(norm(spatial, block.conv2).relu(), block.conv3.weight), block.conv3)
    shortcut = norm(F.conv2d(x, block.shortcut.weight, stride=2), block.shortcut)
    torch.testing.assert_close(block(x), (out + shortcut).relu())


def test_a_step_moves_the_offsets():
    backbone = small()
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
    sum(feature.square().mean() for feature in backbone(torch.randn(1, 3, 64, 64)).values()).backward()
    optimizer.step()
    assert all(block.conv2_offset.weight.any() for stage in (backbone.res4, backbone.res5) for block in stage)


class TestWeights:
    def test_those_of_a_plain_network_leave_the_offsets_at_zero(self, tmp_path):
        path = tmp_path / "plain.safetensors"
        save_file(ResNet(50, **SMALL).state_dict(), path)
        backbone = small()
        report = load_weights(backbone, path, resnet_key, is_optional=is_optional_in_resnet)
        assert len(report.missing) == 2 * (6 + 3)
        assert not backbone.res4[0].conv2_offset.weight.any()
        with pytest.raises(CheckpointError, match=r"lacks 18 of the .*conv2_offset"):
            load_weights(small(), path, resnet_key)

    def test_those_of_detectron2_are_loaded_with_offsets(self, tmp_path):
        original = small()
        for stage in (original.res4, original.res5):
            for block in stage:
                torch.nn.init.normal_(block.conv2_offset.weight)
        path = tmp_path / "model.safetensors"
        save_file({f"backbone.{key}": value for key, value in original.state_dict().items()}, path)
        loaded = small()
        assert not load_weights(loaded, path, resnet_key).missing
        assert torch.equal(loaded.res5[2].conv2_offset.weight, original.res5[2].conv2_offset.weight)


class TestSettings:
    def test_a_configuration_builds_it(self):
        config = BackboneConfig(
            name="resnet50", weights="random", deformable_stages=("res5",), modulated=True, frozen_stages=2
        )
        with torch.device("meta"):
            backbone = build_backbone(config)
        assert isinstance(backbone.res5[1], DeformableBottleneck)
        assert backbone.res5[1].conv2_offset.weight.shape == (27, 512, 3, 3)
        assert not isinstance(backbone.res4[1], DeformableBottleneck)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"name": "resnet18", "deformable_stages": ["res5"]}, "setting of resnet50 and resnet101"),
            ({"name": "tiny", "deformable_stages": ["res5"]}, "remove it for 'tiny'"),
            ({"name": "resnet50", "deformable_stages": ["res6"]}, "res6"),
            ({"name": "resnet50", "modulated": True}, "give 'deformable_stages' too"),
        ],
    )
    def test_mistakes(self, fields, words):
        with pytest.raises(ValidationError, match=words):
            BackboneConfig(**fields)

    def test_basic_blocks_cannot_be_deformable(self):
        with pytest.raises(ValueError, match="ResNet-18 has no bottlenecks"):
            ResNet(18, norm="frozen", deformable_stages=("res5",))
