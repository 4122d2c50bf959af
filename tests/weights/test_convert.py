"""`uniquery weights convert`: models to other projects' files, and their files to models."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import uniquery
from helpers.reference import reference
from helpers.small_segmenters import drawn
from uniquery.backbones import BackboneConfig
from uniquery.cli import main
from uniquery.data.augment import TestSize
from uniquery.data.dataset import Category
from uniquery.segmenters import build_segmenter
from uniquery.segmenters.condinst import CondInstConfig
from uniquery.segmenters.mask2former import Mask2FormerConfig
from uniquery.segmenters.solov2 import SOLOv2Config
from uniquery.training.checkpoint import save_checkpoint
from uniquery.weights.convert import convert_to_ours, convert_to_theirs
from uniquery.weights.model_file import ModelInfo, load_model

CLASSES = (Category(3, "cell"), Category(17, "debris"))
RESNET = BackboneConfig(name="resnet18", weights="random", norm="frozen")
SETTINGS = {
    "condinst": CondInstConfig(channels=32, head_convs=1, mask_channels=32, mask_convs=1),
    "solov2": SOLOv2Config(channels=32, head_channels=32, head_convs=1, mask_channels=32, kernel_channels=32),
    "mask2former": Mask2FormerConfig(
        queries=8, channels=64, heads=4, encoder_layers=1, encoder_width=64, decoder_layers=2, decoder_width=64
    ),
}


def info(name: str, backbone: BackboneConfig = RESNET) -> ModelInfo:
    return ModelInfo(SETTINGS[name], backbone, CLASSES, TestSize(short=64, longest=96))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with the best model of a run, by segmenter and backbone."""
    runs: dict[tuple[str, str], Path] = {}

    def run(name: str, backbone: BackboneConfig = RESNET) -> Path:
        key = name, backbone.model_dump_json()
        if key not in runs:
            runs[key] = save(tmp_path_factory.mktemp("run"), name, backbone)
        return runs[key]

    return run


def save(folder: Path, name: str, backbone: BackboneConfig) -> Path:
    torch.manual_seed(0)
    model = build_segmenter(SETTINGS[name], backbone, len(CLASSES), pretrained=False)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.02 * torch.randn(tensor.shape).abs())
    save_checkpoint(folder / "best", model.state_dict(), info(name, backbone))
    return folder


@pytest.fixture
def categories(tmp_path) -> Path:
    path = tmp_path / "classes.json"
    rows = [{"id": 17, "name": "debris"}, {"id": 3, "name": "cell"}]
    path.write_text(json.dumps({"images": [{"id": 1}], "annotations": [], "categories": rows}))
    return path


def equal(first: Path, second: Path) -> bool:
    a, b = load_model(first)[0].state_dict(), load_model(second)[0].state_dict()
    return list(a) == list(b) and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize(
    ("name", "project", "suffix"),
    [
        ("condinst", "original", ".pth"),
        ("condinst", "original", ".safetensors"),
        ("solov2", "original", ".pth"),
        ("mask2former", "original", ".pth"),
        ("mask2former", "huggingface", ".safetensors"),
    ],
)
def test_out_and_in_again_is_the_same_model(tmp_path, trained, name, project, suffix):
    run, theirs, back = trained(name), tmp_path / f"theirs{suffix}", tmp_path / "back.safetensors"
    out = convert_to_theirs(run, theirs, project)
    done = convert_to_ours(theirs, back, info(name))
    assert (out.project, done.project) == (project, project)
    assert (out.dropped, done.dropped) == (0, 0)
    assert done.missing == sum(key.endswith("num_batches_tracked") for key in load_file(back)) - sum(
        key.endswith("num_batches_tracked") for key in load_file(run / "best" / "model.safetensors")
    )
    assert equal(run, back)
    assert uniquery.load(back, device="cpu").classes == ("cell", "debris")


@pytest.mark.parametrize("project", ["original", "huggingface"])
def test_swin_out_and_in_again(tmp_path, trained, project):
    swin = BackboneConfig(name="swin_tiny", weights="random")
    run = trained("mask2former", swin)
    convert_to_theirs(run, tmp_path / "theirs.pth", project)
    convert_to_ours(tmp_path / "theirs.pth", tmp_path / "back.safetensors", info("mask2former", swin))
    assert equal(run, tmp_path / "back.safetensors")


def test_files_hold_plain_tensors_as_the_originals_loaders_expect(tmp_path, trained):
    run = trained("mask2former")
    convert_to_theirs(run, tmp_path / "a.pth")
    convert_to_theirs(run, tmp_path / "b.pth", "huggingface")
    convert_to_theirs(run, tmp_path / "b.safetensors", "huggingface")
    original = torch.load(tmp_path / "a.pth", weights_only=True)
    assert list(original) == ["model"]
    assert all(type(tensor) is torch.Tensor for tensor in original["model"].values())
    hugging_face = torch.load(tmp_path / "b.pth", weights_only=True)
    assert set(hugging_face) == set(load_file(tmp_path / "b.safetensors"))
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it transformers refuses a file


@pytest.mark.parametrize("kind", ["resnet", "swin"])
def test_a_model_runs_in_hugging_faces_code(tmp_path, trained, kind):
    transformers = pytest.importorskip("transformers")
    backbone = RESNET if kind == "resnet" else BackboneConfig(name="swin_tiny", weights="random")
    run = trained("mask2former", backbone)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    convert_to_theirs(run, theirs / "model.safetensors", "huggingface")
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    widths = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    transformers.Mask2FormerConfig(
        backbone_config=transformers.ResNetConfig(**widths, layer_type="basic", **stages)
        if kind == "resnet"
        else transformers.SwinConfig(**stages),
        num_labels=2,
        feature_size=64,
        mask_feature_size=64,
        hidden_dim=64,
        encoder_layers=1,
        encoder_feedforward_dim=64,
        decoder_layers=3,
        dim_feedforward=64,
        num_attention_heads=4,
        num_queries=8,
    ).save_pretrained(theirs)
    model, loading = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(theirs, output_loading_info=True)
    assert not loading["unexpected_keys"]
    # Of no effect on the output: class weights of the loss, the norm of a classifier, counts of batches.
    harmless = ("criterion.empty_weight", "swin.layernorm.weight", "swin.layernorm.bias", "num_batches_tracked")
    assert all(key.endswith(harmless) for key in loading["missing_keys"])
    ours, _ = load_model(run)
    images, _ = drawn(((64, 96),), (3,))
    with torch.no_grad():
        outputs, expected = ours.double()(images), model.double()(pixel_values=ours.normalize(images))
    masks = torch.einsum("bnd,bdhw->bnhw", outputs.embeddings[-1], outputs.pixels.embeddings)
    torch.testing.assert_close(outputs.logits[-1], expected.class_queries_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(masks, expected.masks_queries_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.realdata
def test_the_command_makes_a_model_of_a_published_checkpoint(tmp_path, trained, categories, capsys):
    """A file as AdelaiDet writes it, with what is not a weight."""
    run = trained("condinst", RESNET.model_copy(update={"caffe": True}))
    convert_to_theirs(run, tmp_path / "original.pth")
    state = torch.load(tmp_path / "original.pth", weights_only=True)["model"]
    names = json.loads(reference("parity", "condinst", "full_state_dict_shapes.json").read_text())
    extra = [key for key in names if key.startswith("mask_head.")]
    torch.save({"model": state | dict.fromkeys(extra, torch.zeros(1)), "iteration": 9}, tmp_path / "original.pth")
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {name: condinst, channels: 32, head_convs: 1, mask_channels: 32, mask_convs: 1}\n"
        "backbone: {name: resnet18, weights: random, norm: frozen, caffe: true}\n"
        "data: {test_size: {short: 64, longest: 96}}\n"
    )
    arguments = [str(tmp_path / "original.pth"), str(tmp_path / "m.safetensors")]
    assert main(["weights", "convert", *arguments, "--config", str(config), "--categories", str(categories)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "condinst, original names → model file" in printed
    assert f"converted │ {len(state)}" in printed
    assert "dropped │ 2" in printed
    assert "BGR pixels, mean [103.53, 116.28, 123.675]" in printed
    assert "stride in the 1×1" in printed
    assert equal(run, tmp_path / "m.safetensors")
    assert load_model(tmp_path / "m.safetensors")[1] == load_model(run)[1]


def refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main(["weights", "convert", *(str(a) for a in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


class TestBadInput:
    @pytest.fixture
    def run(self, trained):
        return trained("condinst")

    @pytest.fixture
    def theirs(self, run, tmp_path):
        convert_to_theirs(run, tmp_path / "theirs.pth")
        return tmp_path / "theirs.pth"

    @pytest.fixture
    def config(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text(
            "model: {name: condinst, channels: 32, head_convs: 1, mask_channels: 32, mask_convs: 1}\n"
            "backbone: {name: resnet18, weights: random, norm: frozen}\n"
        )
        return path

    def test_nothing_is_replaced_unasked(self, run, tmp_path, capsys):
        output = tmp_path / "out.pth"
        output.write_text("mine")
        assert "exists; give another name, or --overwrite" in refused(capsys, run, output)
        assert output.read_text() == "mine"
        assert main(["weights", "convert", str(run), str(output), "--overwrite"]) == 0
        assert list(torch.load(output, weights_only=True)) == ["model"]

    def test_a_checkpoint_holds_no_settings(self, theirs, categories, tmp_path, capsys):
        output = tmp_path / "m.safetensors"
        assert "give --config and --categories." in refused(capsys, theirs, output)
        assert "give --config." in refused(capsys, theirs, output, "--categories", categories)
        assert not output.exists()

    def test_a_model_has_its_settings(self, run, config, tmp_path, capsys):
        assert "leave out --config" in refused(capsys, run, tmp_path / "o.pth", "--config", config)

    def test_wrong_files(self, run, theirs, config, categories, tmp_path, capsys):
        more = ("--config", config, "--categories", categories)
        assert "No checkpoint at" in refused(capsys, tmp_path / "nothing", tmp_path / "o.pth")
        assert "There is no weights file at" in refused(capsys, tmp_path / "no.pth", tmp_path / "m.safetensors", *more)
        assert "must end in .safetensors or .pth" in refused(capsys, run, tmp_path / "o.onnx")
        assert "must end in .safetensors." in refused(capsys, theirs, tmp_path / "o.pth", *more)
        save_file({"fc.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
        line = refused(capsys, tmp_path / "x.safetensors", tmp_path / "m.safetensors", *more)
        assert "names of no project that is known, for example 'fc.weight'" in line
        assert "Cannot write" in refused(capsys, run, tmp_path / "absent" / "o.pth")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (["model=solov2"], "is a condinst .original., but the configuration's model is solov2"),
            (["model.head_convs=2"], "lacks 8 tensors of the configured model, for example 'head.class_tower.3"),
            (["model.head_convs=0"], "has 8 tensors that the configured model does not have"),
            (["model.mask_channels=64"], r"'mask_branch.*shape \[32, 32, 3, 3\], but \[64, 32, 3, 3\]"),
        ],
    )
    def test_settings_of_another_model(self, theirs, config, categories, tmp_path, capsys, changes, words):
        sets = [part for change in changes for part in ("--set", change)]
        arguments = ("--config", config, "--categories", categories, *sets)
        line = refused(capsys, theirs, tmp_path / "m.safetensors", *arguments)
        assert re.search(words, line), line

    def test_another_number_of_classes(self, theirs, config, categories, tmp_path, capsys):
        content = json.loads(categories.read_text())
        content["categories"].pop()
        categories.write_text(json.dumps(content))
        line = refused(capsys, theirs, tmp_path / "m.safetensors", "--config", config, "--categories", categories)
        assert "'head.classes.weight' has shape [2, 32, 3, 3], but [1, 32, 3, 3] in the configured model" in line

    def test_categories_without_names(self, theirs, config, categories, tmp_path, capsys):
        categories.write_text(json.dumps({"images": [{"id": 1}], "categories": [{"id": 1}]}))
        line = refused(capsys, theirs, tmp_path / "m.safetensors", "--config", config, "--categories", categories)
        assert "every category needs an 'id', a whole number, and a 'name'" in line

    def test_what_the_other_project_does_not_have(self, trained, tmp_path, capsys):
        run = trained("condinst", BackboneConfig(name="tiny", weights="random"))
        assert "has no backbone 'tiny', only resnet" in refused(capsys, run, tmp_path / "o.pth")
        run = trained("solov2")
        line = refused(capsys, run, tmp_path / "o.pth", "--names", "huggingface")
        assert "A solov2 cannot be written with the names of 'huggingface', only of original." in line
