"""A data set and a configuration small enough to train in seconds."""

from pathlib import Path

import yaml

from uniquery.data.scenes import SceneFiles, ScenesConfig, make_scenes

CONFIG = {
    "name": "small",
    "model": {
        "name": "condinst",
        "channels": 32,
        "head_convs": 1,
        "mask_channels": 32,
        "mask_convs": 1,
        "mask_norm": "group",
    },
    "backbone": {"name": "tiny", "weights": "random"},
    "data": {
        "augment": [{"op": "flip", "p": 0.5}, {"op": "scale_jitter", "range": [0.8, 1.2], "size": 64}],
        "test_size": {"short": 64, "longest": 96},
        "workers": 0,
    },
    "optim": {"name": "adamw", "lr": 0.002},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 4, "batch_size": 2, "ema": 0.9, "eval_every": 2, "save_every": 2, "log_every": 1},
}


def small_scenes(folder: Path) -> SceneFiles:
    """Six training and four validation scenes of 64 pixels."""
    return make_scenes(folder / "scenes", ScenesConfig(train_images=6, val_images=4, size=64, classes=3, crowding=4))


def small_config(folder: Path, scenes: SceneFiles, **changes) -> Path:
    """A configuration file on those scenes; `changes` are top-level keys."""
    content = {**CONFIG, "output": str(folder / "runs"), **changes}
    content["data"] = {
        **content["data"],
        **{
            split: {"annotations": str(scenes.annotations(split)), "images": str(scenes.images(split))}
            for split in ("train", "val")
        },
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
