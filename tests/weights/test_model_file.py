"""Model files: the same model from a text or a path, and what a wrong place says."""

from pathlib import Path

import pytest
import torch

from uniquery.backbones import BackboneConfig
from uniquery.data.augment import TestSize
from uniquery.data.coco import Category
from uniquery.errors import CheckpointError
from uniquery.segmenters import build_segmenter
from uniquery.segmenters.condinst import CondInstConfig
from uniquery.training.checkpoint import save_checkpoint
from uniquery.weights.model_file import (
    ModelInfo,
    find_model_file,
    load_matching_weights,
    load_model,
    read_model_file,
    read_model_info,
)

INFO = ModelInfo(
    CondInstConfig(channels=32, head_convs=1, mask_channels=32, mask_convs=1),
    BackboneConfig(name="tiny", weights="random"),
    (Category(3, "cell"), Category(17, "debris")),
    TestSize(short=64, longest=96),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder with a best and a last model."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("best", "last"):
        save_checkpoint(folder / name, build_segmenter(INFO.model, INFO.backbone, 2).state_dict(), INFO)
    return folder


def test_a_run_a_checkpoint_and_a_file(run):
    best = run / "best" / "model.safetensors"
    for path in (run, run / "best", best):
        assert find_model_file(path) == find_model_file(str(path)) == best
    assert find_model_file(run / "last") == run / "last" / "model.safetensors"


def test_a_text_loads_the_same_model_as_a_path(run):
    (first, info), (second, _) = load_model(str(run)), load_model(run)
    assert info == INFO == read_model_info(str(run))
    assert not first.training
    states = (first.state_dict(), second.state_dict(), read_model_file(str(run))[1])
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])
        assert torch.equal(tensor, states[2][name])
    assert load_matching_weights(first, str(run / "last")).missing == ()


@pytest.mark.parametrize("kind", [str, Path])
def test_nothing_there(tmp_path, kind):
    with pytest.raises(CheckpointError, match="No checkpoint at"):
        load_model(kind(tmp_path / "nothing"))
