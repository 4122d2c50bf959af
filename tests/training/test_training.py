"""The trainer: averaged weights, schedules, parameter groups, phases, the algorithm's settings."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import uniquery
from helpers.killed_runs import ALGORITHM
from helpers.small_runs import small_config
from uniquery.backbones import BackboneConfig
from uniquery.errors import CheckpointError, ConfigError
from uniquery.querying import PixelSampling
from uniquery.segmenters import build_segmenter
from uniquery.segmenters.condinst import CondInstConfig
from uniquery.training import loop
from uniquery.training.batches import load_splits
from uniquery.training.checkpoint import load_trainer_state
from uniquery.training.config import LayerConfig, OptimConfig, ScheduleConfig, load_config
from uniquery.training.optim import EMA, build_optimizer, lr_factor
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.run import build_run
from uniquery.training.summary import length_warnings
from uniquery.weights.model_file import load_matching_weights, load_model, read_model_file


def test_accumulation_sees_the_images_of_a_larger_batch(scenes, tmp_path):
    shapes = {"a": (1, 4), "b": (4, 1)}
    for name, (batch, accumulate) in shapes.items():
        changes = [f"name={name}", "train.steps=1", f"train.batch_size={batch}", f"train.accumulate={accumulate}"]
        config = load_config(small_config(tmp_path, scenes), changes)
        loop.train(config)
        line = json.loads((config.folder / "metrics.jsonl").read_text().splitlines()[0])
        assert line["images"] == 4


def test_training_from_python_returns_the_folder_of_the_run(scenes, tmp_path):
    folder = uniquery.train(uniquery.load_config(small_config(tmp_path, scenes), ["train.steps=1"]))
    assert folder == tmp_path / "runs" / "small"
    model = uniquery.load(folder)
    assert not model.segmenter.training
    assert len(model.classes) == 3


def test_bfloat16_trains(scenes, tmp_path):
    config = load_config(
        small_config(tmp_path, scenes), ["train.precision=bfloat16", "train.steps=2", "model.levels=4"]
    )
    loop.train(config)
    line = json.loads((config.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert all(math.isfinite(v) for v in line["losses"].values())


def test_averaged_weights_are_evaluated_and_saved(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), [])
    loop.train(config)
    saved = load_file(config.folder / "last" / "model.safetensors")
    state = load_trainer_state(config.folder / "last")
    assert all(torch.equal(saved[k], state.tensors[f"ema/{k}"]) for k in saved)
    assert any(not torch.equal(saved[k], state.tensors[f"model/{k}"]) for k in saved)


def test_averaged_weights_follow_the_formula():
    model = nn.Linear(2, 1)
    average = EMA(model, decay=0.5)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    average.update(model)
    decay = min(0.5, 2 / 11)
    torch.testing.assert_close(average.state["weight"], before * decay + (before + 1) * (1 - decay))


def test_polynomial_schedule_with_warm_up():
    config = ScheduleConfig(power=0.9, warmup_steps=10, warmup_factor=0.1)
    assert lr_factor(config, 0, 100) == pytest.approx(0.1)
    assert lr_factor(config, 5, 100) == pytest.approx((0.1 * 0.5 + 0.5) * 0.95**0.9)
    assert lr_factor(config, 50, 100) == pytest.approx(0.5**0.9)
    assert lr_factor(config, 100, 100) == 0


def test_a_warm_up_longer_than_a_quarter_of_the_run_is_shortened():
    long, fitting = (ScheduleConfig(warmup_steps=steps, warmup_factor=0.1) for steps in (1000, 10))
    factors = [lr_factor(long, step, 40) for step in range(40)]
    assert factors == [lr_factor(fitting, step, 40) for step in range(40)]
    assert max(factors) == factors[10] == pytest.approx(0.75**0.9)
    assert lr_factor(long, 0, 3) == 1  # no step for a warm-up


def test_a_warm_up_that_fits_stays_equal_to_the_bit():
    config = ScheduleConfig(warmup_steps=5, warmup_factor=0.001)
    for step in range(5):
        decay, share = math.pow(1 - step / 20, 0.9), step / 5
        assert lr_factor(config, step, 20) == decay * (0.001 * (1 - share) + share)


def test_a_run_that_is_too_short_is_warned(scenes, tmp_path, capsys):
    def printed(*changes) -> str:
        capsys.readouterr()
        loop.train(load_config(small_config(tmp_path, scenes), ["train.steps=1", "train.ema=null", *changes]))
        return " ".join(capsys.readouterr().out.split())

    text = printed("schedule.warmup_steps=100", "name=a")
    assert "warning: schedule.warmup_steps = 100 is more than a quarter of the 1 steps: the warm-up takes 0." in text
    assert "warning: 1 steps (0.3 epochs) are few" in text
    assert "warmup" not in printed("schedule.warmup_steps=0", "name=b")


def test_length_warnings_end_where_a_run_is_long_enough(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=200", "schedule.warmup_steps=50"])
    data, _ = load_splits(config)
    assert not length_warnings(build_run(config, data), data)  # 200 steps, 67 epochs
    few = load_config(small_config(tmp_path, scenes), ["train.steps=199", "schedule.warmup_steps=50"])
    assert len(length_warnings(build_run(few, data), data)) == 2


def test_parameter_groups():
    model = build_segmenter(
        CondInstConfig(channels=32, mask_channels=32), BackboneConfig(name="tiny", weights="random"), 2
    )
    config = OptimConfig(
        lr=0.1,
        lr_batch=16,
        weight_decay=0.5,
        norm_weight_decay=0.0,
        backbone_lr_factor=0.1,
        layers={"head.controller": LayerConfig(lr_factor=2.0, weight_decay=0.25)},
    )
    optimizer = build_optimizer(model, config, effective_batch=8)
    names = {id(p): n for n, p in model.named_parameters()}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert set(found) == set(names.values())
    assert found["head.controller.weight"] == (pytest.approx(0.1), 0.25)
    assert found["head.class_tower.1.weight"] == (pytest.approx(0.05), 0.0)
    assert found["fpn.laterals.8.weight"] == (pytest.approx(0.05), 0.5)
    assert all(lr == pytest.approx(0.005) for n, (lr, _) in found.items() if n.startswith("backbone."))


def test_init_from_reports_what_fits(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=1"])
    loop.train(config)
    info, _ = read_model_file(config.folder)
    other = build_segmenter(info.model, info.backbone, 7)
    report = load_matching_weights(other, config.folder)
    assert set(report.missing) == {"head.classes.weight", "head.classes.bias"}
    assert set(report.unexpected) == {"head.classes.weight", "head.classes.bias"}
    assert "2 re-initialized: head.classes.weight" in str(report)


def test_init_from_a_foreign_checkpoint(tmp_path):
    model = build_segmenter(CondInstConfig(), BackboneConfig(name="tiny", weights="random"), 2)
    theirs = {
        "controller.weight": torch.full((169, 256, 3, 3), 0.5),
        "proposal_generator.fcos_head.cls_logits.weight": torch.zeros(80, 256, 3, 3),
        "pixel_mean": torch.zeros(3),
    }
    torch.save({"model": theirs}, tmp_path / "condinst.pth")
    report = load_matching_weights(model, tmp_path / "condinst.pth")
    assert report.loaded == ("head.controller.weight",)
    assert report.unexpected == ("head.classes.weight",)
    assert (model.head.controller.weight == 0.5).all()
    torch.save(theirs, tmp_path / "pytorch_model.bin")
    assert load_matching_weights(model, tmp_path / "pytorch_model.bin") == report
    (tmp_path / "detectron.pkl").write_bytes(b"any pickle")
    with pytest.raises(CheckpointError, match="can run any code"):
        load_matching_weights(model, tmp_path / "detectron.pkl")
    torch.save({"model": {"x": torch.zeros(1)}}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="Nothing in"):
        load_matching_weights(model, tmp_path / "other.pth")


def test_a_loaded_model_predicts_the_same(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ["train.steps=2"])
    loop.train(config)
    first, info = load_model(str(config.folder))
    second, _ = load_model(config.folder / "best" / "model.safetensors")
    assert [c.name for c in info.categories] == ["disc", "box", "triangle"] or len(info.categories) == 3
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_phase_clock_averages_over_steps():
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(2):
        with clock("forward"):
            pass
        clock.steps += 1
    means = clock.pop_means()
    assert means["forward"] > 0
    assert means["backward"] == 0
    assert clock.pop_means()["forward"] == 0


def test_tensorboard(scenes, tmp_path):
    pytest.importorskip("tensorboard")
    config = load_config(small_config(tmp_path, scenes), ["train.tensorboard=true", "train.steps=1"])
    loop.train(config)
    assert list((config.folder / "tensorboard").iterdir())


def test_the_algorithm_trains_and_leaves_a_plain_model(scenes, tmp_path):
    config = load_config(small_config(tmp_path, scenes), ALGORITHM)
    loop.train(config)
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert {"loss_inter", "loss_equi"} <= set(lines[0]["losses"])
    watched = [line["querying"] for line in lines if line["kind"] == "train"]
    assert watched[-1]["memory_fill"] == 40
    assert all(0 <= w["hard_negatives"] <= 1 and 0 <= w["cross_scene_response"] <= 1 for w in watched)
    model, _ = load_model(config.folder)
    plain = build_segmenter(config.model, config.backbone, 3)
    assert set(model.state_dict()) == set(plain.state_dict())
    tensors = load_trainer_state(config.folder / "last").tensors
    assert len(tensors["algorithm/memory/embeddings"]) == 40


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("querying.inter.capacity=-1", "querying.inter.capacity"),
        ("querying.inter.sampling.count=0", "querying.inter.sampling.count"),
        ("querying.equivariance.crop=[0.5, 1.2]", "querying.equivariance.crop"),
        ("querying.equivariance.weight=-3", "querying.equivariance.weight"),
        ("querying.equivariance.rotate=[9, 1]", "smaller value first"),
        ("querying.equivariance={views: extra, weight: 0}", "use paired views"),
        ("querying.intre={}", "Did you mean 'inter'"),
    ],
)
def test_settings_of_the_algorithm_that_cannot_be(scenes, tmp_path, override, word):
    with pytest.raises(ConfigError, match=re.escape(word)):
        load_config(small_config(tmp_path, scenes), [override])


def test_a_crowd_that_cannot_all_be_found_is_warned(scenes, tmp_path, capsys):
    model = {"name": "mask2former", "queries": 1, "channels": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    changes = [("model", model), "model.max_detections=2", "train.steps=1"]
    loop.train(load_config(small_config(tmp_path, scenes), changes))
    message = " ".join(capsys.readouterr().out.split())
    for limit in ("model.queries = 1", "model.max_detections = 2"):
        assert re.search(rf"warning: an image has \d+ instances, more than {limit}", message)
    assert "eval.max_detections" not in message


def test_data_without_instances_is_warned(scenes, tmp_path, capsys):
    raw = json.loads(scenes.annotations("train").read_text())
    (tmp_path / "none.json").write_text(json.dumps({**raw, "annotations": []}))
    for changes, is_warned in (([], False), ([("data.train.annotations", str(tmp_path / "none.json"))], True)):
        loop.train(load_config(small_config(tmp_path, scenes), [*changes, f"name=warned-{is_warned}", "train.steps=1"]))
        message = " ".join(capsys.readouterr().out.split())
        assert ("warning: the training data has no instances" in message) == is_warned


def test_sixteen_bit_images_that_are_nearly_black_are_warned(scenes, tmp_path, capsys):
    images = shutil.copytree(scenes.images("train"), tmp_path / "images")
    for file in images.iterdir():
        gray = np.asarray(Image.open(file).convert("L"))
        Image.fromarray(gray.astype(np.uint16) * 16).save(file)  # 12 bits
    loop.train(load_config(small_config(tmp_path, scenes), [("data.train.images", str(images)), "train.steps=1"]))
    assert re.search(
        r"warning: the values of 16-bit images reach only [34]\d\d\d of", " ".join(capsys.readouterr().out.split())
    )


def test_an_odd_batch_cannot_be_paired(scenes, tmp_path):
    with pytest.raises(ConfigError, match="must be even with paired views"):
        load_config(small_config(tmp_path, scenes), ["train.batch_size=3", "querying.equivariance={}"])
    load_config(small_config(tmp_path, scenes), ["train.batch_size=3", "querying.equivariance={views: extra}"])


def test_a_class_subset_is_scored_on_its_own(scenes, tmp_path):
    name = json.loads(scenes.annotations("val").read_text())["categories"][0]["name"]
    config = load_config(small_config(tmp_path, scenes), ["train.steps=2", ("data.classes", [name])])
    loop.train(config)
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [set(line["per_class"]) for line in lines if line["kind"] == "eval"] == [{name}]


def test_setting_steps_unsets_epochs():
    config = load_config("condinst_lite0", ["train.steps=10"])
    assert (config.train.steps, config.train.epochs) == (10, None)


@pytest.mark.parametrize(
    ("name", "count", "wanted"), [("instance_balanced", None, 50), ("sparse", None, 500), ("sparse", 7, 7)]
)
def test_sampling_defaults_are_the_papers(name, count, wanted):
    owned = torch.ones(1, 2000, dtype=torch.bool)
    instance, _ = PixelSampling(name=name, count=count)(owned)
    assert len(instance) == wanted
