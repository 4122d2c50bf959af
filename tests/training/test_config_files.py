"""Configuration files: shipped names, `base:` inheritance and overrides."""

import re
from pathlib import Path

import pytest
import yaml

from helpers.coco_files import assert_one_sentence
from uniquery.cli import main
from uniquery.errors import ConfigError
from uniquery.querying import PRESETS, EquivarianceSettings, InterSceneSettings, PairLoss, QueryingSettings
from uniquery.segmenters import DEFAULT_SEGMENTER
from uniquery.training.config import Config, load_config, parse_config, to_yaml
from uniquery.training.config_files import PAPER, merge, read_with_bases, shipped_configs

# The shipped configurations that have a base, written out in full.
IN_FULL = {
    "solov2_r50": """
name: solov2_r50
model: solov2
backbone: {name: resnet50, weights: imagenet, norm: frozen, frozen_stages: 2}
data:
  ignore_crowd: false
  augment:
    - {op: short_side, range: [400, 1200], longest: 1333}
    - {op: flip, p: 0.5}
  test_size: {short: 800, longest: 1333}
  workers: 4
optim: {name: sgd, lr: 0.01, lr_batch: 16, momentum: 0.9, weight_decay: 1.0e-4}
schedule: {name: polynomial, power: 0.9, warmup_steps: 1000, warmup_factor: 0.001}
train: {epochs: 12, batch_size: 16, eval_every: 10000, save_every: 2000, log_every: 20}
""",
    "demo": """
name: demo
model:
  name: solov2
  channels: 64
  head_channels: 96
  head_convs: 2
  mask_channels: 64
  kernel_channels: 64
  grids: [24, 16, 12, 8]
  size_ranges: [[1, 36], [24, 64], [48, 112], [80, 2048]]
  max_queries: 400
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
  test_size: {short: 192, longest: 192}
  workers: 1
optim: {name: adamw, lr: 2.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 50}
train: {steps: 440, batch_size: 4, ema: 0.98, eval_every: 220, save_every: 220, log_every: 20}
""",
    "scenes/solov2_lite0": """
name: scenes_solov2
model:
  name: solov2
  channels: 64
  head_channels: 96
  head_convs: 2
  mask_channels: 64
  kernel_channels: 64
  grids: [24, 16, 12, 8]
  size_ranges: [[1, 36], [24, 64], [48, 112], [80, 2048]]
  max_queries: 400
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: scale_jitter, range: [0.9, 1.5], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 1
optim: {name: adamw, lr: 2.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 50}
train: {steps: 1500, batch_size: 8, ema: 0.99, eval_every: 500, save_every: 500, log_every: 20}
""",
    "scenes/lvis_solov2_lite0": """
name: scenes_lvis_solov2
model:
  name: solov2
  channels: 64
  head_channels: 96
  head_convs: 2
  mask_channels: 64
  kernel_channels: 64
  grids: [24, 16, 12, 8]
  size_ranges: [[1, 36], [24, 64], [48, 112], [80, 2048]]
  max_queries: 400
  score_threshold: 1.0e-4
  final_threshold: 1.0e-4
  max_detections: 300
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  sampling: {name: repeat_factor, threshold: 0.25}
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: scale_jitter, range: [0.9, 1.5], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 1
optim: {name: adamw, lr: 2.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 50}
train: {steps: 1500, batch_size: 8, ema: 0.99, eval_every: 500, save_every: 500, log_every: 20}
""",
    "voc/condinst_lite0": """
name: voc_condinst
model:
  name: condinst
  channels: 64
  head_convs: 2
  mask_channels: 32
  mask_convs: 2
  mask_norm: group
  levels: 4
  max_queries: 200
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: scale_jitter, range: [0.8, 1.25], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 0
optim: {name: adamw, lr: 1.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 50}
train: {steps: 3200, batch_size: 8, ema: 0.99, eval_every: 800, save_every: 400, log_every: 100}
""",
    "voc/mask2former_lite0": """
name: voc_mask2former
model:
  name: mask2former
  queries: 40
  channels: 96
  heads: 4
  encoder_layers: 2
  encoder_width: 256
  decoder_layers: 6
  decoder_width: 256
  points: 1024
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: scale_jitter, range: [0.8, 1.25], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 0
optim: {name: adamw, lr: 5.0e-4, weight_decay: 0.05, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 5.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 3200, batch_size: 8, ema: 0.99, eval_every: 800, save_every: 400, log_every: 100}
""",
    "voc/solov2_lite0": """
name: voc_solov2
model:
  name: solov2
  channels: 64
  head_channels: 96
  head_convs: 2
  mask_channels: 64
  kernel_channels: 64
  grids: [24, 16, 12, 8]
  size_ranges: [[1, 48], [32, 80], [64, 144], [112, 2048]]
  max_queries: 400
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: scale_jitter, range: [0.8, 1.25], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 0
optim: {name: adamw, lr: 1.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 50}
train: {steps: 3200, batch_size: 8, ema: 0.99, eval_every: 800, save_every: 400, log_every: 100}
""",
    "sotr_r101": """
name: sotr_r101
model: sotr
backbone: {name: resnet101, weights: imagenet, norm: frozen, frozen_stages: 2}
data:
  ignore_crowd: false
  augment:
    - {op: short_side, range: [640, 800], longest: 1333}
    - {op: flip, p: 0.5}
  test_size: {short: 800, longest: 1333}
  workers: 4
optim: {name: sgd, lr: 0.01, lr_batch: 8, momentum: 0.9, weight_decay: 1.0e-4}
schedule: {name: multistep, milestones: [0.7, 0.8333], warmup_steps: 1000, warmup_factor: 0.01}
train: {epochs: 20.3, batch_size: 8, eval_every: 20000, save_every: 2000, log_every: 20}
""",
    "scenes/sotr_lite0": """
name: scenes_sotr
model:
  name: sotr
  channels: 64
  layers: 2
  heads: 4
  mask_channels: 64
  kernel_channels: 64
  grids: [24, 16, 12, 8]
  size_ranges: [[1, 36], [24, 64], [48, 112], [80, 2048]]
  max_queries: 400
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: scale_jitter, range: [0.9, 1.5], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 1
optim: {name: adamw, lr: 2.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 50}
train: {steps: 1500, batch_size: 8, ema: 0.99, eval_every: 500, save_every: 500, log_every: 20}
""",
    "voc/sotr_lite0": """
name: voc_sotr
model:
  name: sotr
  channels: 64
  layers: 2
  heads: 4
  mask_channels: 64
  kernel_channels: 64
  grids: [24, 16, 12, 8]
  size_ranges: [[1, 48], [32, 80], [64, 144], [112, 2048]]
  max_queries: 400
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: scale_jitter, range: [0.8, 1.25], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 0
optim: {name: adamw, lr: 1.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 50}
train: {steps: 3200, batch_size: 8, ema: 0.99, eval_every: 800, save_every: 400, log_every: 100}
""",
    "scenes/mask2former_lite0": """
name: scenes_mask2former
model:
  name: mask2former
  queries: 40
  channels: 96
  heads: 4
  encoder_layers: 2
  encoder_width: 256
  decoder_layers: 6
  decoder_width: 256
  points: 1024
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: scale_jitter, range: [0.9, 1.5], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 1
optim: {name: adamw, lr: 5.0e-4, weight_decay: 0.05, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 5.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 1500, batch_size: 8, ema: 0.99, eval_every: 500, save_every: 500, log_every: 20}
""",
    "sparseinst_r50_dcn": """
name: sparseinst_r50_dcn
model: sparseinst
backbone: {name: resnet50, weights: imagenet, norm: frozen, frozen_stages: 0, deformable_stages: [res4, res5]}
data:
  ignore_crowd: false
  augment:
    - {op: crop, p: 0.5, range: [0.6, 1.0]}
    - {op: short_side, range: [416, 640], longest: 853}
    - {op: flip, p: 0.5}
  test_size: {short: 640, longest: 853}
  workers: 4
optim: {name: adamw, lr: 5.0e-5, lr_batch: 64, weight_decay: 0.05, norm_weight_decay: 0.0}
schedule: {name: multistep, milestones: [0.7778, 0.9259], warmup_steps: 1000, warmup_factor: 0.001}
train: {steps: 270000, batch_size: 64, eval_every: 10000, save_every: 2000, log_every: 20}
""",
    "scenes/sparseinst_lite0": """
name: scenes_sparseinst
model:
  name: sparseinst
  queries: 40
  channels: 64
  head_channels: 64
  head_convs: 4
  kernel_channels: 64
  norm: group
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: scale_jitter, range: [0.9, 1.5], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 1
optim: {name: adamw, lr: 1.0e-3, weight_decay: 0.05, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 5.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 1500, batch_size: 8, ema: 0.99, eval_every: 500, save_every: 500, log_every: 20}
""",
    "voc/sparseinst_lite0": """
name: voc_sparseinst
model:
  name: sparseinst
  queries: 40
  channels: 64
  head_channels: 64
  head_convs: 4
  kernel_channels: 64
  norm: group
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: scale_jitter, range: [0.8, 1.25], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 0
optim: {name: adamw, lr: 1.0e-3, weight_decay: 0.05, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 5.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 3200, batch_size: 8, ema: 0.99, eval_every: 800, save_every: 400, log_every: 100}
""",
    "scenes/panoptic_mask2former_lite0": """
name: scenes_panoptic_mask2former
model:
  name: mask2former
  queries: 40
  channels: 96
  heads: 4
  encoder_layers: 2
  encoder_width: 256
  decoder_layers: 6
  decoder_width: 256
  points: 1024
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: scale_jitter, range: [0.9, 1.5], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 1
optim: {name: adamw, lr: 5.0e-4, weight_decay: 0.05, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 5.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 1500, batch_size: 8, ema: 0.99, eval_every: 500, save_every: 500, log_every: 20}
""",
    "nuclei/condinst_small": """
name: nuclei-small
model:
  name: condinst
  finest_stride: 4
  levels: 4
  channels: 32
  head_convs: 2
  mask_channels: 32
  mask_convs: 2
  mask_norm: group
  max_queries: 300
  max_detections: 200
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 2}
data:
  train: {annotations: data/nuclei/annotations/train.json, images: data/nuclei/images}
  val: {annotations: data/nuclei/annotations/val.json, images: data/nuclei/images}
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: transpose, p: 0.5}
    - {op: scale_jitter, range: [2.0, 4.0], size: 128}
    - {op: color, brightness: 0.2, contrast: 0.2, saturation: 0.2}
  test_size: {short: 384, longest: 640}
  workers: 1
optim: {name: adamw, lr: 2.0e-3, weight_decay: 0.01, norm_weight_decay: 0.0, backbone_lr_factor: 0.3, clip_norm: 10.0}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 1000, batch_size: 4, ema: 0.99, eval_every: 500, save_every: 500, log_every: 50}
eval: {max_detections: 200}
""",
    "solq_swin_large": """
name: solq_swin_large
model: solq
backbone: {name: swin_large, weights: imagenet}
data:
  ignore_crowd: false
  augment:
    - {op: flip, p: 0.5}
    - {op: crop, p: 0.5, range: [0.6, 1.0]}
    - {op: short_side, range: [416, 1088], longest: 1333}
  test_size: {short: 800, longest: 1333}
  workers: 4
optim:
  name: adamw
  lr: 2.0e-4
  lr_batch: 32
  weight_decay: 1.0e-4
  backbone_lr_factor: 0.1
  clip_norm: 0.1
  layers: {offsets: {lr_factor: 0.1}, reference_points: {lr_factor: 0.1}}
schedule: {name: multistep, milestones: [0.8], warmup_steps: 0}
train: {epochs: 50, batch_size: 32, eval_every: 10000, save_every: 2000, log_every: 20}
""",
    "scenes/solq_lite0": """
name: scenes_solq
model:
  name: solq
  queries: 40
  channels: 96
  heads: 4
  encoder_layers: 2
  decoder_layers: 4
  width: 256
  dropout: 0.0
  mask_size: 32
  vector_length: 64
  vector_width: 256
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: flip, p: 0.5, axis: vertical}
    - {op: scale_jitter, range: [0.9, 1.5], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 1
optim:
  name: adamw
  lr: 1.0e-3
  weight_decay: 0.05
  norm_weight_decay: 0.0
  backbone_lr_factor: 0.3
  clip_norm: 5.0
  layers: {offsets: {lr_factor: 0.1}}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 2000, batch_size: 8, ema: 0.99, eval_every: 500, save_every: 500, log_every: 20}
""",
    "voc/solq_lite0": """
name: voc_solq
model:
  name: solq
  queries: 40
  channels: 96
  heads: 4
  encoder_layers: 2
  decoder_layers: 4
  width: 256
  dropout: 0.0
  mask_size: 32
  vector_length: 64
  vector_width: 256
backbone: {name: efficientnet_lite0, weights: imagenet, norm: frozen, frozen_stages: 1}
data:
  augment:
    - {op: flip, p: 0.5}
    - {op: scale_jitter, range: [0.8, 1.25], size: 192}
  test_size: {short: 192, longest: 192}
  workers: 0
optim:
  name: adamw
  lr: 1.0e-3
  weight_decay: 0.05
  norm_weight_decay: 0.0
  backbone_lr_factor: 0.3
  clip_norm: 5.0
  layers: {offsets: {lr_factor: 0.1}}
schedule: {name: polynomial, power: 0.9, warmup_steps: 100}
train: {steps: 3200, batch_size: 8, ema: 0.99, eval_every: 800, save_every: 400, log_every: 100}
""",
}


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


def refused(file: Path, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


class TestShipped:
    def test_those_with_a_base_are_what_they_are_in_full(self):
        with_base = [name for name, file in shipped_configs().items() if "base" in yaml.safe_load(file.read_text())]
        assert {name for name in with_base if not name.startswith(f"{PAPER}/")} == set(IN_FULL)
        for name, text in IN_FULL.items():
            assert load_config(name) == parse_config(yaml.safe_load(text), where=name), name

    @pytest.mark.parametrize("name", shipped_configs())
    def test_every_one_is_valid_and_shown_without_its_base(self, name, capsys):
        assert main(["config", "show", name]) == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        assert "base" not in shown
        assert parse_config(shown, where="shown") == load_config(name)


class TestBase:
    def test_a_shipped_name(self, write):
        config = load_config(write("mine.yaml", "base: condinst_r50\nname: mine\noptim: {lr: 0.5}\n"))
        shipped = load_config("condinst_r50")
        assert config == shipped.model_copy(
            update={"name": "mine", "optim": shipped.optim.model_copy(update={"lr": 0.5})}
        )

    def test_a_path_is_relative_to_the_file_that_names_it(self, write, monkeypatch, tmp_path):
        write("shared/first.yaml", "seed: 1\ntrain: {steps: 3}\n")
        write("shared/second.yaml", "base: first.yaml\nname: second\n")
        file = write("mine/third.yaml", "base: ../shared/second.yaml\noutput: out\n")
        monkeypatch.chdir(tmp_path / "mine")
        for source in (file, "third.yaml"):
            config = load_config(source)
            assert (config.seed, config.name, config.train.steps, str(config.output)) == (1, "second", 3, "out")

    def test_an_absolute_path(self, write):
        first = write("a/first.yaml", "seed: 7\n")
        assert load_config(write("b/second.yaml", f"base: {first}\n")).seed == 7

    def test_a_file_comes_before_a_shipped_name(self, write):
        write("demo", "seed: 9\n")
        assert load_config(write("mine.yaml", "base: demo\n")).seed == 9

    def test_lists_and_values_are_replaced_and_tables_merged(self, write):
        write("first.yaml", "data: {augment: [{op: flip}], workers: 3}\nquerying: {inter: {capacity: 5}}\n")
        config = load_config(
            write("mine.yaml", "base: first.yaml\ndata: {augment: []}\nquerying: {inter: {weight: 2}}\n")
        )
        assert config.data.augment == ()
        assert config.data.workers == 3
        assert config.querying.inter is not None
        assert (config.querying.inter.capacity, config.querying.inter.weight) == (5, 2)
        off = load_config(write("off.yaml", "base: first.yaml\nquerying: {inter: null}\n"))
        assert off.querying.inter is None

    def test_overrides_come_last(self, write):
        file = write("mine.yaml", "base: demo\ntrain: {steps: 5}\n")
        assert load_config(file, ["train.steps=6", "model.channels=32"]).train.steps == 6
        assert load_config(file, ["model.channels=32"]).model.channels == 32
        assert "write 'base' into a yaml file" in refused(file, ["base=condinst_r50"])

    def test_a_run_keeps_the_resolved_configuration(self, write):
        text = to_yaml(load_config(write("mine.yaml", "base: demo\n")))
        assert "base" not in yaml.safe_load(text)


class TestNamedTables:
    def merged(self, base, changes):
        return merge({"model": base}, {"model": changes})["model"]

    def test_another_name_replaces_the_table(self):
        assert self.merged({"name": "a", "x": 1}, {"name": "b", "y": 2}) == {"name": "b", "y": 2}
        assert self.merged("a", {"name": "b"}) == {"name": "b"}

    def test_a_plain_name_replaces_the_table(self):
        for name in ("a", "b"):
            assert self.merged({"name": "a", "x": 1}, name) == name

    def test_the_same_name_or_none_merges(self):
        for changes in ({"y": 2}, {"name": "a", "y": 2}):
            assert self.merged({"name": "a", "x": 1}, changes) == {"name": "a", "x": 1, "y": 2}
            assert self.merged("a", changes) == {"name": "a", "y": 2}

    def test_a_base_without_a_name_is_the_default_segmenter(self):
        name = DEFAULT_SEGMENTER.name
        assert self.merged({"x": 1}, {"name": name, "y": 2}) == {"x": 1, "name": name, "y": 2}
        assert self.merged({"x": 1}, {"name": "b", "y": 2}) == {"name": "b", "y": 2}

    def test_no_key_of_one_segmenter_reaches_another(self, write):
        config = load_config(write("mine.yaml", "base: demo\nmodel: solov2\n"))
        assert config.model == load_config("solov2_r50").model
        write("bare.yaml", "model: {mask_norm: group}\n")
        assert load_config(write("other.yaml", "base: bare.yaml\nmodel: {name: solov2}\n")).model.name == "solov2"

    def test_a_backbone_is_such_a_table_and_an_optimizer_is_not(self, write):
        text = "base: demo\nbackbone: {name: resnet50, weights: imagenet}\noptim: {name: sgd}\n"
        config = load_config(write("mine.yaml", text))
        assert config.backbone.frozen_stages is None
        assert (config.optim.name, config.optim.lr) == ("sgd", 2e-3)

    def test_a_backbone_without_a_name_is_merged(self):
        base = {"backbone": {"norm": "frozen"}}
        assert merge(base, {"backbone": {"name": "resnet50"}}) == {"backbone": {"norm": "frozen", "name": "resnet50"}}

    def test_only_the_top_level_counts(self):
        base = {"data": {"model": {"name": "a", "x": 1}}}
        assert merge(base, {"data": {"model": {"name": "b"}}}) == {"data": {"model": {"name": "b", "x": 1}}}


class TestStepsOrEpochs:
    def test_the_file_s_own_length_replaces_the_base_s(self, write):
        write("steps.yaml", "train: {steps: 5, batch_size: 3}\n")
        write("epochs.yaml", "train: {epochs: 2}\n")
        config = load_config(write("a.yaml", "base: steps.yaml\ntrain: {epochs: 4}\n"))
        assert (config.train.steps, config.train.epochs, config.train.batch_size) == (None, 4, 3)
        config = load_config(write("b.yaml", "base: epochs.yaml\ntrain: {steps: 4}\n"))
        assert (config.train.steps, config.train.epochs) == (4, None)
        config = load_config(write("c.yaml", "base: b.yaml\ntrain: {epochs: 1.5}\n"))
        assert (config.train.steps, config.train.epochs) == (None, 1.5)

    def test_both_in_one_file_are_refused(self, write):
        assert "either epochs or steps" in refused(write("a.yaml", "base: demo\ntrain: {epochs: 4, steps: 3}\n"))

    def test_null_removes_nothing_else(self, write):
        config = load_config(write("a.yaml", "base: demo\ntrain: {epochs: null}\n"))
        assert config.train.steps == load_config("demo").train.steps


class TestMistakes:
    @pytest.mark.parametrize(
        ("base", "words"),
        [
            ("demoo", "base 'demoo' is neither a file in .* nor a shipped name. Did you mean 'demo'?"),
            ("xyzzy", "'uniquery config list' shows the shipped names."),
            ("scenes", "is neither a file"),
            ("[demo]", "'base' must be a shipped name or a path (given: ['demo'])."),
            ("null", "(given: None)."),
            ("3", "(given: 3)."),
        ],
    )
    def test_a_base_that_is_not_there(self, write, base, words):
        file = write("mine.yaml", f"base: {base}\n")
        error = refused(file)
        assert error.startswith(f"{file}: ")
        assert re.search(re.escape(words).replace(r"\.\*", ".*"), error)
        assert_one_sentence(error)

    def test_the_file_with_the_mistake_is_named(self, write):
        middle = write("middle.yaml", "base: nowhere.yaml\n")
        assert refused(write("mine.yaml", "base: middle.yaml\n")).startswith(f"{middle}: ")
        broken = write("broken.yaml", "a: [1\n")
        assert refused(write("mine.yaml", "base: broken.yaml\n")).startswith(f"{broken} is not valid yaml")
        text = write("text.yaml", "only text\n")
        assert refused(write("mine.yaml", "base: text.yaml\n")) == f"{text} must hold keys and values."

    def test_circles(self, write):
        own = write("own.yaml", "base: own.yaml\n")
        assert refused(own) == f"{own}: base 'own.yaml' leads back to itself: {own} → {own}."
        first, second = write("a.yaml", "base: sub/b.yaml\n"), write("sub/b.yaml", "base: ../a.yaml\n")
        error = refused(first)
        assert error.startswith(f"{second}: base '../a.yaml' leads back to itself: {first} → {second} → ")
        assert_one_sentence(error)

    def test_a_wrong_key_of_the_base_is_reported(self, write):
        write("first.yaml", "optim: {lrr: 1}\n")
        assert "optim.lrr: no such key. Did you mean 'lr'?" in refused(write("mine.yaml", "base: first.yaml\n"))

    def test_base_is_no_key_of_a_configuration(self):
        with pytest.raises(ConfigError, match="base: no such key"):
            parse_config({"base": "demo"}, where="tables")
        assert "base" not in Config.model_fields


def test_reading_does_not_change_what_the_next_reading_gives(write):
    file = write("mine.yaml", "base: demo\n")
    content = read_with_bases(file)
    content["train"]["steps"] = 1
    assert read_with_bases(file)["train"]["steps"] != 1


class TestPresets:
    def querying(self, write, text, *overrides):
        return load_config(write("mine.yaml", text), overrides).querying

    def test_a_name_or_a_table_with_changes(self, write):
        paper = self.querying(write, "querying: paper\n")
        assert paper == QueryingSettings(inter=InterSceneSettings(), equivariance=EquivarianceSettings())
        changed = self.querying(write, "querying: {preset: paper, inter: {loss: {gamma: 1}}, equivariance: null}\n")
        assert changed == QueryingSettings(inter=InterSceneSettings(loss=PairLoss(gamma=1)))

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_is_valid_and_resolved_in_the_run_s_configuration(self, name, write):
        config = load_config(write("mine.yaml", f"querying: {name}\n"))
        assert "preset" not in to_yaml(config)
        assert parse_config(yaml.safe_load(to_yaml(config)), where="resolved") == config

    def test_overrides_change_a_preset(self, write):
        text = "querying: paper\n"
        changed = self.querying(write, text, "querying.inter.weight=0.1")
        assert (changed.inter.weight, changed.equivariance.weight) == (0.1, 3.0)
        assert self.querying(write, text, "querying={}") == QueryingSettings()
        assert self.querying(write, "seed: 1\n", "querying=paper").inter.weight == 1.0

    def test_a_file_changes_the_preset_of_its_base(self, write):
        write("base.yaml", "querying: paper\n")
        assert self.querying(write, "base: base.yaml\nquerying: {inter: {weight: 0.1}}\n").equivariance.weight == 3.0
        assert self.querying(write, "base: base.yaml\nquerying: recommended\n") == QueryingSettings.model_validate(
            PRESETS["recommended"]
        )

    def test_a_preset_replaces_what_the_base_wrote_out(self, write):
        write("base.yaml", "querying: {inter: {weight: 0.1}}\n")
        assert self.querying(write, "base: base.yaml\nquerying: {preset: paper}\n").inter.weight == 1.0

    @pytest.mark.parametrize("text", ["querying: papre\n", "querying: {preset: papre}\n"])
    def test_no_such_preset(self, write, text):
        assert "no preset 'papre'; write paper or recommended. Did you mean 'paper'?" in refused(write("a.yaml", text))
