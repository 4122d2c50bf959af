"""Swin equals Hugging Face's on the same weights, and finds its weights under every published name."""

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from uniquery.backbones import BACKBONES, BackboneConfig, build_backbone
from uniquery.backbones.key_maps import is_optional_in_swin, swin_key, swin_tensors
from uniquery.backbones.pretrained import SWIN_FILES, BackboneLoadReport, imagenet_file, load_weights
from uniquery.backbones.swin import DropPath, Swin, WindowAttention, from_windows, relative_positions, to_windows
from uniquery.errors import CheckpointError
from uniquery.training.config import OptimConfig
from uniquery.training.optim import build_optimizer

CHANNELS, DEPTHS, WINDOW, HEAD_CHANNELS = 8, (2, 2, 4, 2), 3, 4
SIZES = [(64, 96), (65, 97), (33, 70), (1, 31), (100, 50)]


def small(**changes) -> Swin:
    options = {"window": WINDOW, "head_channels": HEAD_CHANNELS, **changes}
    return Swin(CHANNELS, DEPTHS, **options)


def vivid(module: nn.Module) -> nn.Module:
    """The module with weights large enough that every part of it shows in the result."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def loaded(path) -> tuple[Swin, BackboneLoadReport]:
    swin = small().eval()
    return swin, load_weights(swin, path, swin_key, preprocess=swin_tensors, is_optional=is_optional_in_swin)


def norms_of_outputs() -> set[str]:
    return {f"stage{stage}.norm.{part}" for stage in (1, 2, 3, 4) for part in ("weight", "bias")}


@pytest.fixture(scope="module")
def package():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def config(package):
    return package.SwinConfig(
        embed_dim=CHANNELS,
        depths=list(DEPTHS),
        num_heads=[(CHANNELS << level) // HEAD_CHANNELS for level in range(4)],
        window_size=WINDOW,
        out_features=[f"stage{stage}" for stage in (1, 2, 3, 4)],
    )


@pytest.fixture(scope="module")
def oracle(package, config):
    return vivid(package.SwinBackbone(config)).eval()


class TestHuggingFace:
    @pytest.mark.parametrize("size", SIZES)
    def test_features_equal_the_packages(self, oracle, size, tmp_path):
        save_file(oracle.state_dict(), tmp_path / "swin.safetensors")
        ours, report = loaded(tmp_path / "swin.safetensors")
        assert report.missing == ()
        assert {key.split(".")[1] for key in report.unexpected} == {"layernorm"}
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            features, expected = ours(images), oracle(images).feature_maps
        for feature, theirs in zip(features.values(), expected, strict=True):
            assert theirs.std() > 0.1
            torch.testing.assert_close(feature, theirs, rtol=1e-4, atol=1e-4)

    def test_names_of_published_files_find_their_place(self, oracle, tmp_path):
        """Saved files keep the names of earlier versions, which differ from those of the modules."""
        oracle.save_pretrained(tmp_path)
        ours, report = loaded(tmp_path / "model.safetensors")
        assert report.missing == ()
        assert ours.stage1.blocks[0].attn.qkv.weight.shape == (3 * CHANNELS, CHANNELS)
        images = torch.randn(1, 3, 50, 70)
        with torch.no_grad():
            torch.testing.assert_close(ours(images)[32], oracle(images).feature_maps[-1], rtol=1e-4, atol=1e-4)

    def test_a_classifier_lacks_the_norms_of_the_outputs_only(self, package, config, tmp_path):
        classifier = vivid(package.SwinForImageClassification(config)).eval()
        nn.init.ones_(classifier.swin.layernorm.weight)
        nn.init.zeros_(classifier.swin.layernorm.bias)
        classifier.save_pretrained(tmp_path)
        ours, report = loaded(tmp_path / "model.safetensors")
        assert set(report.missing) == norms_of_outputs()
        assert set(report.unexpected) == {
            f"{layer}.{part}" for layer in ("swin.layernorm", "classifier") for part in ("weight", "bias")
        }
        images = torch.randn(1, 3, 64, 96)
        with torch.no_grad():  # fresh, our last norm is what theirs was set to
            theirs = classifier.swin(images, always_partition=True).last_hidden_state.mT.unflatten(2, (2, 3))
            torch.testing.assert_close(ours(images)[32], theirs, rtol=1e-4, atol=1e-4)


def official_names(swin: Swin, *, merging_of_next: bool = False) -> dict[str, torch.Tensor]:
    """The state as the original names it, or as timm does (`merging_of_next`), without the norms of the outputs."""
    names = {}
    for key, value in swin.state_dict().items():
        part, kind, *rest = key.split(".")
        if part == "stem":
            names[f"patch_embed.{kind}.{rest[0]}"] = value
        elif kind == "blocks":
            names[f"layers.{int(part[-1]) - 1}.blocks.{'.'.join(rest)}"] = value
        elif kind == "merge":
            names[f"layers.{int(part[-1]) - (1 if merging_of_next else 2)}.downsample.{'.'.join(rest)}"] = value
    return names


CLUTTER = {
    "norm.weight": torch.ones(64),
    "head.weight": torch.ones(10, 64),
    "layers.0.blocks.0.attn.relative_position_index": torch.zeros(9, 9, dtype=torch.int64),
    "layers.0.blocks.1.attn_mask": torch.zeros(4, 9, 9),
}


class TestNames:
    @pytest.fixture
    def original(self):
        return vivid(small())

    def check(self, original, report, ours):
        state = original.state_dict()
        assert set(report.missing) == norms_of_outputs()
        assert set(report.loaded) == set(state) - norms_of_outputs()
        assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items() if key in report.loaded)
        assert set(report.unexpected) == {"norm.weight", "head.weight"}

    def test_the_originals(self, original, tmp_path):
        torch.save({"model": official_names(original) | CLUTTER}, tmp_path / "swin.pth")
        ours, report = loaded(tmp_path / "swin.pth")
        self.check(original, report, ours)

    def test_timms(self, original, tmp_path):
        save_file(official_names(original, merging_of_next=True) | CLUTTER, tmp_path / "timm.safetensors")
        ours, report = loaded(tmp_path / "timm.safetensors")
        self.check(original, report, ours)

    @pytest.mark.parametrize("prefix", ["", "backbone.", "module.backbone."])
    def test_a_detectors_with_the_norms_of_the_outputs(self, original, tmp_path, prefix):
        norms = {
            f"norm{stage - 1}.{part}": original.state_dict()[f"stage{stage}.norm.{part}"]
            for stage in (1, 2, 3, 4)
            for part in ("weight", "bias")
        }
        tensors = {f"{prefix}{key}": value for key, value in (official_names(original) | norms).items()}
        torch.save({"model": tensors | {"sem_seg_head.weight": torch.ones(1)}}, tmp_path / "model.pth")
        ours, report = loaded(tmp_path / "model.pth")
        assert (report.missing, report.unexpected) == ((), ("sem_seg_head.weight",))
        assert all(torch.equal(value, original.state_dict()[key]) for key, value in ours.state_dict().items())

    def test_our_own(self, original, tmp_path):
        save_file(original.state_dict(), tmp_path / "ours.safetensors")
        assert loaded(tmp_path / "ours.safetensors")[1].missing == ()

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ("patch_embed.proj.weight", "stem.proj.weight"),
            ("patch_embed.norm.bias", "stem.norm.bias"),
            ("layers.1.downsample.norm.weight", "stage2.merge.norm.weight"),
            ("layers.3.downsample.reduction.weight", "stage4.merge.reduction.weight"),
            ("layers.0.blocks.0.norm1.weight", "stage1.blocks.0.norm1.weight"),
            (
                "layers.2.blocks.17.attn.relative_position_bias_table",
                "stage3.blocks.17.attn.relative_position_bias_table",
            ),
            ("layers.3.blocks.1.attn.proj.bias", "stage4.blocks.1.attn.proj.bias"),
            ("layers.3.blocks.1.mlp.fc2.weight", "stage4.blocks.1.mlp.fc2.weight"),
            ("norm.weight", None),
            ("head.fc.weight", None),
        ],
    )
    def test_timms_one_by_one(self, theirs, ours):
        """By the names of timm's `swin_small_patch4_window7_224`, in a file that shows to be timm's."""
        file = dict.fromkeys((theirs, "layers.3.downsample.norm.bias"), torch.ones(1))
        assert [swin_key(key) for key in swin_tensors(file)] == [ours, "stage4.merge.norm.bias"]

    def test_a_query_without_its_key_and_value_is_missing(self, original, tmp_path):
        tensors = official_names(original)
        whole = tensors.pop("layers.0.blocks.0.attn.qkv.weight")
        tensors["encoder.layers.0.blocks.0.attention.self.query.weight"] = whole[:CHANNELS]
        save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / "w.safetensors")
        with pytest.raises(
            CheckpointError, match=r"lacks 1 of the \d+ tensors.*'stage1\.blocks\.0\.attn\.qkv\.weight'"
        ):
            loaded(tmp_path / "w.safetensors")

    def test_weights_of_another_window_are_refused(self, original, tmp_path):
        save_file(original.state_dict(), tmp_path / "w.safetensors")
        with pytest.raises(
            CheckpointError, match=r"another shape, for example 'stage1\.blocks\.0\.attn\.relative_position_bias_table"
        ):
            load_weights(small(window=4), tmp_path / "w.safetensors", swin_key)


def naive_attention(attention: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """By the definition, cell by cell: each of (h, w, C) among those of its window of the shifted grid, with zeros."""
    window, shift, heads = attention.window, attention.shift, attention.heads
    height, width = (math.ceil(side / window) * window for side in x.shape[:2])
    full = x.new_zeros(height, width, x.shape[2])
    full[: x.shape[0], : x.shape[1]] = x
    q, k, v = (part.unflatten(2, (heads, -1)) for part in attention.qkv(full).chunk(3, dim=2))
    table = attention.relative_position_bias_table.view(2 * window - 1, 2 * window - 1, heads)
    out = torch.zeros_like(v)
    cells = [(row, column) for row in range(height) for column in range(width)]
    for cell in cells:
        window_of_cell = [(side - shift) // window for side in cell]
        mine = [other for other in cells if [(side - shift) // window for side in other] == window_of_cell]
        biases = [table[cell[0] - row + window - 1, cell[1] - column + window - 1] for row, column in mine]
        keys = torch.stack([k[other] for other in mine])  # (cells, heads, d)
        logits = (q[cell] * keys).sum(2) / q.shape[3] ** 0.5 + torch.stack(biases)
        out[cell] = (logits.softmax(0)[..., None] * torch.stack([v[other] for other in mine])).sum(0)
    return attention.proj(out.flatten(2))[: x.shape[0], : x.shape[1]]


class TestWindowAttention:
    @pytest.mark.parametrize("shift", [0, 1])
    @pytest.mark.parametrize("size", [(6, 9), (7, 4), (2, 3)])
    def test_equals_the_definition(self, shift, size):
        attention = vivid(WindowAttention(4, heads=2, window=3, shift=shift)).double()
        x = torch.randn(2, *size, 4, dtype=torch.float64)
        expected = torch.stack([naive_attention(attention, image) for image in x])
        torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("shift", [0, 1])
    def test_gradcheck(self, shift):
        attention = vivid(WindowAttention(2, heads=1, window=2, shift=shift)).double()
        x = torch.randn(1, 3, 4, 2, dtype=torch.float64, requires_grad=True)
        parameters = (attention.relative_position_bias_table, attention.qkv.weight)
        assert torch.autograd.gradcheck(lambda x, *_: attention(x), (x, *parameters))

    def test_the_zeros_around_a_map_take_part(self):
        attention = vivid(WindowAttention(4, heads=1, window=4, shift=0))
        x = torch.randn(1, 3, 4, 4)
        alone = attention._attend(x.view(1, 1, 12, 4), attention._bias(4, 4)[..., :12, :12]).view(x.shape)
        assert (attention(x) - alone).abs().max() > 1e-2

    def test_no_denormal_numbers_slow_the_projection_down(self):
        attention = WindowAttention(8, heads=2, window=7, shift=3)  # of fresh weights, whose biases are zero
        seen = []
        attention.proj.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
        attention(torch.randn(1, 8, 8, 8))
        size = seen[0].abs()
        assert not ((size > 0) & (size < torch.finfo(torch.float32).tiny)).any()

    def test_windows_come_back_together(self):
        x = torch.randn(2, 6, 9, 5)
        assert torch.equal(from_windows(to_windows(x, 3), 3, 6), x)

    def test_cells_at_the_same_offset_share_a_bias(self):
        index = relative_positions(3)
        assert len(index.unique()) == 25
        assert index[0, 1] == index[4, 5] == index[7, 8]
        assert index[0, 1] != index[1, 0]


class TestDropPath:
    def test_images_are_dropped_whole_and_the_mean_stays(self):
        torch.manual_seed(0)
        out = DropPath(0.25).train()(torch.ones(4000, 2, 3))
        per_image = out.flatten(1)
        assert (per_image == per_image[:, :1]).all()
        assert sorted(out.unique().tolist()) == pytest.approx([0, 4 / 3])
        assert out.mean().item() == pytest.approx(1, abs=0.03)

    def test_evaluation_drops_nothing(self):
        x = torch.randn(50, 3)
        assert torch.equal(DropPath(0.9).eval()(x), x)

    def test_rates_grow_from_block_to_block(self):
        rates = [part.rate for part in small(drop_path=0.9).modules() if isinstance(part, DropPath)]
        assert rates == pytest.approx([0.1 * i for i in range(10)])

    def test_training_is_random_and_frozen_stages_are_not(self):
        swin, images = vivid(small(drop_path=0.9)).train(), torch.randn(4, 3, 32, 32)
        swin.freeze(3)
        first, second = swin(images), swin(images)
        assert torch.equal(first[8], second[8])
        assert not torch.equal(first[32], second[32])


class TestConfiguration:
    @pytest.mark.parametrize(
        ("name", "published", "classifier_channels"),
        [("swin_tiny", 28_288_354, 768), ("swin_small", 49_606_258, 768), ("swin_base", 87_768_224, 1024)],
    )
    def test_parameters_are_as_many_as_published(self, name, published, classifier_channels):
        """Of the ImageNet classifiers, without the last layer and with our four norms instead of their last."""
        with torch.device("meta"):
            swin = BACKBONES[name].build("frozen", False)
        count = sum(value.numel() for value in swin.parameters())
        norms = sum(2 * channels for channels in swin.channels.values())
        assert count - norms == published - 1000 * (classifier_channels + 1) - 2 * classifier_channels

    @pytest.mark.parametrize(("name", "window"), [("swin_large", 7), ("swin_base_384", 12), ("swin_large_384", 12)])
    def test_the_largest(self, name, window):
        with torch.device("meta"):
            swin = BACKBONES[name].build("frozen", False)
        assert swin.channels[4] == (192 if "large" in name else 128)
        assert {block.attn.window for stage in swin.stages()[1:] for block in stage.blocks} == {window}
        assert [len(stage.blocks) for stage in swin.stages()[1:]] == [2, 2, 18, 2]

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"name": "swin_tiny", "norm": "batch"}, "'swin_tiny' has layer normalization; remove 'norm'"),
            ({"name": "swin_base_384", "caffe": True}, "'caffe' is a setting of ResNets"),
            ({"name": "swin_huge"}, "swin_tiny"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, fields, words):
        with pytest.raises(ValidationError, match=words):
            BackboneConfig(**fields)

    @pytest.mark.parametrize("name", sorted(SWIN_FILES))
    def test_absent_imagenet_weights_say_where_to_get_them(self, name, monkeypatch, tmp_path):
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        with pytest.raises(
            CheckpointError, match=rf"download https://github.com/SwinTransformer/.*/{SWIN_FILES[name]}"
        ):
            imagenet_file(name)

    def test_every_swin_of_the_table_has_a_file(self):
        assert set(SWIN_FILES) == {name for name in BACKBONES if name.startswith("swin")}

    def test_published_weights_learn_everywhere(self, tmp_path):
        original = BACKBONES["swin_tiny"].build("frozen", False)
        torch.save({"model": official_names(original)}, tmp_path / "swin.pth")
        ours = build_backbone(BackboneConfig(name="swin_tiny", weights=str(tmp_path / "swin.pth")))
        assert torch.equal(ours.stage4.blocks[1].mlp.fc2.weight, original.stage4.blocks[1].mlp.fc2.weight)
        assert all(parameter.requires_grad for parameter in ours.parameters())

    def test_position_biases_can_go_without_weight_decay(self):
        swin = small()
        config = OptimConfig(weight_decay=0.1, layers={"relative_position_bias_table": {"weight_decay": 0}})
        groups = {group["weight_decay"]: group["params"] for group in build_optimizer(swin, config, 1).param_groups}
        tables = [value for key, value in swin.named_parameters() if key.endswith("relative_position_bias_table")]
        assert {id(value) for value in groups[0]} == {id(value) for value in tables}
        assert len(tables) == sum(DEPTHS)


def test_bfloat16_autocast_stays_close():
    swin, images = vivid(small()).eval(), torch.randn(1, 3, 50, 64)
    exact = swin(images)
    with torch.autocast("cpu", torch.bfloat16):
        rough = swin(images)
    for stride, feature in exact.items():
        assert (rough[stride].float() - feature).abs().mean() < 0.05 * feature.abs().mean()


def test_double_precision_goes_through():
    swin, images = small().double().eval(), torch.randn(1, 3, 33, 40, dtype=torch.float64)
    assert all(feature.dtype == torch.float64 for feature in swin(images).values())
