"""Names of other projects: every tensor of theirs and of ours is accounted for, in both directions."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers import mmdet_modules
from helpers.reference import reference
from uniquery.backbones import BACKBONES
from uniquery.backbones.key_maps import (
    HF_RESNET,
    HF_SWIN,
    SWIN,
    TORCHVISION_RESNET,
    rename_prefix,
    resnet_key,
    split_qkv,
    swin_key,
    swin_tensors,
)
from uniquery.backbones.swin import PatchMerging
from uniquery.errors import CheckpointError
from uniquery.segmenters import SEGMENTERS
from uniquery.weights.foreign import FORMATS, find_format, to_uniquery_names

ORIGINALS = {f.segmenter: f for f in FORMATS if f.project == "original"}
BUFFERS = {  # of the originals, which follow from their settings
    "condinst": {"mask_head.sizes_of_interest", "mask_head._iter"},
    "solov2": set(),
    "mask2former": {"criterion.empty_weight"},
}


def shapes(state) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def full(segmenter: str, backbone: str = "resnet50", classes: int = 80) -> dict[str, torch.Tensor]:
    """The state of a full-size model, without memory."""
    with torch.device("meta"):
        return SEGMENTERS[segmenter](BACKBONES[backbone].build("frozen", False), classes).state_dict()


@pytest.mark.realdata
@pytest.mark.parametrize("name", sorted(BUFFERS))
class TestOriginals:
    def theirs(self, name):
        listed = json.loads(reference("parity", name, "full_state_dict_shapes.json").read_text())
        return {key: torch.empty(shape, device="meta") for key, shape in listed.items()}

    def test_there_and_back(self, name):
        theirs, names = self.theirs(name), ORIGINALS[name]
        back = names.to_theirs(names.to_ours(theirs))
        assert shapes(back) == {key: shape for key, shape in shapes(theirs).items() if key not in BUFFERS[name]}
        assert find_format(back) is names

    def test_ours_are_all_theirs(self, name):
        ours, names = full(name), ORIGINALS[name]
        written = names.to_theirs(ours)
        assert shapes(written) == shapes({k: v for k, v in self.theirs(name).items() if k not in BUFFERS[name]})
        assert shapes(names.to_ours(written)) == shapes(ours)

    def test_values_stay(self, name):
        theirs, names = load_file(reference("parity", name, "state_dict.safetensors")), ORIGINALS[name]
        back = names.to_theirs(names.to_ours(theirs))
        assert set(theirs) - set(back) == BUFFERS[name] & set(theirs)
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in back.items())


def test_the_originals_swin():
    ours, names = full("mask2former", "swin_small"), ORIGINALS["mask2former"]
    written = names.to_theirs(ours)
    backbone = {key.removeprefix("backbone.") for key in written if key.startswith("backbone.")}
    assert {key.split(".")[0] for key in backbone} == {"patch_embed", "layers", "norm0", "norm1", "norm2", "norm3"}
    assert "layers.2.downsample.reduction.weight" in backbone
    assert "layers.3.blocks.1.attn.relative_position_bias_table" in backbone
    assert shapes(names.to_ours(written)) == shapes(ours)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("pairs", [TORCHVISION_RESNET, HF_RESNET], ids=["torchvision", "huggingface"])
def test_resnets_there_and_back(name, pairs):
    with torch.device("meta"):
        ours = BACKBONES[name].build("batch", False).state_dict()
    theirs = [rename_prefix(key, pairs, to_ours=False) for key in ours]
    assert len(set(theirs)) == len(ours)
    assert not set(theirs) & set(ours)
    assert [resnet_key(key) for key in theirs] == list(ours)


def test_swins_there_and_back():
    ours = BACKBONES["swin_tiny"].build("frozen", False).state_dict()
    original = {rename_prefix(key, SWIN, to_ours=False): value for key, value in ours.items()}
    assert {swin_key(key) for key in swin_tensors(original)} == set(ours)
    parts = {name: part for key, value in ours.items() for name, part in split_qkv(key, value).items()}
    hugging_face = {rename_prefix(key, HF_SWIN, to_ours=False): value for key, value in parts.items()}
    assert len(hugging_face) == len(ours) + 4 * 12  # 12 blocks: of weight and bias, three instead of one
    back = {swin_key(key): value for key, value in swin_tensors(hugging_face).items()}
    assert set(back) == set(ours)
    assert all(torch.equal(value, ours[key]) for key, value in back.items())


def mmdet(name: str) -> dict[str, torch.Tensor]:
    """mmdetection's full names of a model with ResNet-50, or of Mask2Former with Swin-T, without memory."""
    with torch.device("meta"):
        if name == "condinst":
            return mmdet_modules.condinst().state_dict()
        if name == "solov2":
            return mmdet_modules.solov2().state_dict()
        if name == "mask2former":
            return mmdet_modules.mask2former(mmdet_modules.resnet50(), (256, 512, 1024, 2048)).state_dict()
        return mmdet_modules.mask2former(mmdet_modules.swin(96, (2, 2, 6, 2)), (96, 192, 384, 768)).state_dict()


class TestMmdetection:
    @pytest.mark.parametrize(
        ("name", "segmenter", "backbone"),
        [
            ("condinst", "condinst", "resnet50"),
            ("solov2", "solov2", "resnet50"),
            ("mask2former", "mask2former", "resnet50"),
            ("mask2former swin", "mask2former", "swin_tiny"),
        ],
    )
    def test_every_tensor_is_accounted_for(self, name, segmenter, backbone):
        theirs, ours = mmdet(name), full(segmenter, backbone)
        found = find_format(theirs)
        assert (found.segmenter, found.project) == (segmenter, "mmdetection")
        assert sum(f.matches(theirs) for f in FORMATS) == 1
        renamed = shapes(found.to_ours(theirs))
        assert renamed == shapes(ours)
        unused = [key for key in theirs if not key.endswith(("relative_position_index", "num_batches_tracked"))]
        counted = [key for key in theirs if key.endswith("num_batches_tracked") and not key.startswith("backbone.")]
        assert len(unused) + len(counted) == len(renamed)

    def test_patch_merging_is_the_same_function(self):
        theirs = mmdet_modules.PatchMerging(5).double()
        torch.nn.init.normal_(theirs.norm.weight)
        torch.nn.init.normal_(theirs.norm.bias)
        state = {f"backbone.stages.1.downsample.{key}": value for key, value in theirs.state_dict().items()}
        state |= {"panoptic_head.query_feat.weight": torch.zeros(1)}
        state |= {"panoptic_head.pixel_decoder.mask_feature.weight": torch.zeros(1)}
        ours, prefix = PatchMerging(5).double(), "backbone.stage3.merge."
        renamed = to_uniquery_names(state)
        ours.load_state_dict({k.removeprefix(prefix): v for k, v in renamed.items() if k.startswith(prefix)})
        x = torch.randn(2, 5, 4, 6, dtype=torch.float64)
        torch.testing.assert_close(ours(x.permute(0, 2, 3, 1)).flatten(1, 2), theirs(x))

    def test_norms_of_the_decoder_follow_the_order_of_its_layer(self):
        """Cross-attention, self-attention, feed-forward; detectron2's names show it, the numbers do not."""
        theirs = {key: torch.full((), float(i)) for i, key in enumerate(mmdet("mask2former"))}
        ours, prefix = to_uniquery_names(theirs), "panoptic_head.transformer_decoder.layers.4."
        for number, part in enumerate(("cross_attention", "self_attention", "feed_forward")):
            assert ours[f"decoder.{part}.4.norm.weight"] == theirs[f"{prefix}norms.{number}.weight"]
        assert ours["decoder.self_attention.4.in_bias"] == theirs[f"{prefix}self_attn.attn.in_proj_bias"]

    @pytest.mark.parametrize(
        ("name", "extra", "words"),
        [
            ("solov2", "mask_head.kernel_convs.3.conv.conv_offset.weight", "SOLOv2.* deformable convolutions"),
            ("condinst", "bbox_head.cls_convs.3.conv.conv_offset.weight", "CondInst.* deformable convolutions"),
            ("mask2former", "panoptic_head.decoder_input_projs.0.weight", "projects the levels"),
            ("mask2former", "panoptic_head.transformer_decoder.layers.0.attentions.0.x", "mmdetection 2"),
        ],
    )
    def test_another_architecture_is_refused(self, name, extra, words):
        with pytest.raises(CheckpointError, match=words):
            to_uniquery_names({**mmdet(name), extra: torch.zeros(1)})


def test_names_of_no_known_project_stay():
    state = {"fc.weight": torch.zeros(1)}
    assert find_format(state) is None
    assert to_uniquery_names(state) == state
