"""The shipped configurations for own data: one small model of every segmenter, which trains on the first command."""

import pytest

from helpers.small_runs import CONFIG
from uniquery.cli import main
from uniquery.segmenters import SEGMENTERS
from uniquery.training.config import load_config

NAMES = sorted(SEGMENTERS)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_knows_no_data(name):
    config = load_config(f"{name}_lite0")
    assert config.model.name == name
    assert (config.backbone.name, config.backbone.weights) == ("efficientnet_lite0", "imagenet")
    assert config.data.train is config.data.val is None
    assert config.optim.lr_batch == config.train.batch_size * config.train.accumulate
    assert config.data.test_size == load_config("condinst_lite0").data.test_size
    assert config.data.augment == load_config("condinst_lite0").data.augment


@pytest.mark.parametrize("name", NAMES)
def test_it_trains(name, scenes, tmp_path, capsys):
    """Two steps on smaller images, without the weights of the backbone."""
    size = CONFIG["data"]["augment"][1]
    arguments = ["train", f"{name}_lite0", "--dataset", str(scenes.root), "--output", str(tmp_path)]
    changes = ["backbone.weights=random", "train.steps=2", "train.batch_size=2", "train.accumulate=1"]
    changes += ["train.eval_every=null", "data.workers=0", f"data.augment=[{{op: scale_jitter, size: {size['size']}}}]"]
    changes += ["data.test_size={short: 64, longest: 96}", "train.log_every=1"]
    assert main([*arguments, *(word for change in changes for word in ("--set", change))]) == 0
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert (tmp_path / f"{name}_lite0" / "best" / "model.safetensors").is_file()
