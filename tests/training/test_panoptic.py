"""Mask2Former on panoptic scenes: trained, resumed, scored and used by the commands."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import uniquery
from helpers.coco_files import assert_one_sentence
from helpers.killed_runs import ALGORITHM, arguments, run_content, train_to_the_end, train_with_kills
from helpers.naive_panoptic import assert_files_equal_the_naive_way
from helpers.small_runs import small_config
from helpers.small_segmenters import SMALL
from uniquery.backbones import BackboneConfig
from uniquery.cli import main
from uniquery.data.batch import LoadedSample, collate
from uniquery.data.open import open_data
from uniquery.data.scenes import ScenesConfig, make_scenes
from uniquery.errors import ConfigError, DataError
from uniquery.evaluation.panoptic import predict_panoptic_dataset
from uniquery.querying import EquivarianceSettings, InterSceneSettings, UniqueQuerying
from uniquery.segmenters import build_segmenter
from uniquery.training.config import load_config
from uniquery.training.loop import train
from uniquery.training.model_and_data import open_model_and_data
from uniquery.training.run_folder import RunFolder

SETTINGS = ScenesConfig(train_images=8, val_images=4, size=64, classes=2, crowding=3, panoptic=True)
MODEL = {**SMALL["mask2former"].model_dump(mode="json"), "object_threshold": 0.3, "overlap_threshold": 0.3}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("panoptic") / "scenes", SETTINGS)


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """A run that has learned a little."""
    folder = tmp_path_factory.mktemp("run")
    config = small_config(folder, files, model=MODEL)
    settings = [*ALGORITHM, "train.steps=80", "train.batch_size=4", "train.eval_every=80", "train.log_every=10"]
    assert main(arguments(config, *settings, "train.save_every=80")) == 0
    return folder / "runs" / "small"


def lines(run, kind):
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


class TestRun:
    def test_the_headline_is_panoptic_quality(self, run):
        (line,) = lines(run, "eval")
        assert line["headline"] == "PQ"
        assert list(line["metrics"])[:3] == ["PQ", "PQ_th", "PQ_st"]
        assert line["metrics"]["PQ"] > 5
        assert line["metrics"]["PQ_st"] > 5
        assert set(line["per_class"]) == {"disc", "box", "grass", "sand", "water", "rock"}
        first, last = lines(run, "train")[0]["losses"], lines(run, "train")[-1]["losses"]
        assert {"loss_inter", "loss_equi"} < set(last)
        assert last["loss_auxiliary"] < 0.8 * first["loss_auxiliary"]

    def test_a_second_implementation_agrees(self, run, files):
        results = RunFolder(run).predictions_file
        assert len(json.loads(results.read_text())) > 8
        found = assert_files_equal_the_naive_way(files.annotations("val"), results)
        assert found.values["PQ"] > 5
        assert found.values == pytest.approx(lines(run, "eval")[0]["metrics"])

    def test_the_command_gives_the_same_figures_and_files(self, run, files, tmp_path):
        saved, figures, again = (tmp_path / name for name in ("found.json", "figures.json", "again.json"))
        assert main(["eval", str(run), "--save", str(saved), "--json", str(figures), "--workers", "0"]) == 0
        content = json.loads(figures.read_text())["panoptic"]
        (line,) = lines(run, "eval")
        assert content["metrics"] == pytest.approx(line["metrics"])
        assert content["per_class"]["PQ"] == pytest.approx(line["per_class"])
        command = ["eval", "--results", str(saved), "--annotations", str(files.annotations("val"))]
        assert main([*command, "--json", str(again)]) == 0
        assert json.loads(again.read_text())["panoptic"]["metrics"] == pytest.approx(line["metrics"])

    def test_the_folder_of_the_png_files_is_an_option(self, run, files, tmp_path):
        moved = tmp_path / "truth.json"
        moved.write_bytes(files.annotations("val").read_bytes())
        command = ["eval", str(run), "--data", str(moved), str(files.images("val")), "--workers", "0"]
        assert main(command) == 2
        assert main([*command, "--pngs", str(files.pngs("val"))]) == 0
        assert main(["eval", str(run), "--pngs", str(files.pngs("val"))]) == 2

    def test_thresholds_of_masks_are_refused(self, run, capsys):
        assert main(["eval", str(run), "--sweep-threshold"]) == 2
        assert "--sweep-threshold is for instances" in capsys.readouterr().err
        assert main(["eval", str(run), "--protocol", "coco"]) == 2
        assert "--protocol is for instances" in capsys.readouterr().err

    def test_report_and_diagnosis(self, run):
        assert main(["report", str(run)]) == 0
        assert "PQ_th" in (run / "report.html").read_text()
        assert main(["report", str(run), str(run), "-o", str(run / "two.html")]) == 0
        assert main(["diagnose", str(run), "--images", "2"]) == 0
        assert not json.loads((run / "diagnose.json").read_text()).get("sweep")


class TestPredict:
    def test_files_in_cocos_format(self, run, files, tmp_path):
        out = tmp_path / "out"
        assert main(["predict", str(run), str(files.images("val")), "--panoptic", "-o", str(out)]) == 0
        content = json.loads((out / "panoptic.json").read_text())
        assert [row["isthing"] for row in content["categories"]] == [1, 1, 0, 0, 0, 0]
        assert len(content["images"]) == len(content["annotations"]) == 4
        for entry in content["annotations"]:
            colors = np.asarray(Image.open(out / "panoptic" / entry["file_name"])).astype(int)
            ids = colors @ [1, 256, 65536]
            assert set(np.unique(ids)) - {0} == {segment["id"] for segment in entry["segments_info"]}
            for segment in entry["segments_info"]:
                rows, columns = np.nonzero(ids == segment["id"])
                assert segment["area"] == len(rows)
                x, y, width, height = segment["bbox"]
                assert (x, y, x + width, y + height) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        overlay = np.asarray(Image.open(out / "000001.overlay.png"))
        assert overlay.shape == (64, 64, 3)

    def test_predictions_are_valid_panoptic_data(self, run, files, tmp_path):
        out = tmp_path / "out"
        assert main(["predict", str(run), str(files.images("val")), "--panoptic", "-o", str(out)]) == 0
        content = json.loads((out / "panoptic.json").read_text())
        for row in content["images"]:
            row["file_name"] = row["file_name"].removeprefix(str(files.images("val")) + "/")
        (out / "panoptic.json").write_text(json.dumps(content))
        assert main(["data", "check", str(out / "panoptic.json"), str(files.images("val"))]) == 0

    def test_thresholds(self, run, files):
        model = uniquery.load(run)
        image = files.images("val") / "000001.png"
        default = model.predict_panoptic(image)
        assert default.ids.shape == (64, 64)
        middle = sorted(segment.score for segment in default.segments)[len(default.segments) // 2]
        strict = model.predict_panoptic(image, object_threshold=middle)
        assert 0 < len(strict.segments) < len(default.segments)
        assert all(segment.score > middle for segment in strict.segments)
        own = model.predict_panoptic(image, object_threshold=0.3, overlap_threshold=0.3)
        assert torch.equal(own.ids, default.ids)
        whole, any_part = (model.predict_panoptic(image, overlap_threshold=share) for share in (1.0, 0.0))
        assert len(whole.segments) < len(any_part.segments)
        with pytest.raises(ConfigError, match="overlap_threshold is a share"):
            model.predict_panoptic(image, overlap_threshold=2)

    def test_instances_are_things(self, run, files):
        model = uniquery.load(run)
        assert [c.is_thing for c in model.categories] == [True, True, False, False, False, False]
        instances = model.predict(files.images("val") / "000001.png", score_threshold=0)
        assert len(instances)
        assert set(instances.names) <= {"disc", "box"}

    def test_files_that_cannot_be_read_are_left_out(self, run, files, tmp_path, capsys):
        (tmp_path / "broken.png").write_bytes(b"no image")
        good, out = files.images("val") / "000001.png", tmp_path / "out"
        assert main(["predict", str(run), str(tmp_path / "broken.png"), str(good), "--panoptic", "-o", str(out)]) == 1
        content = json.loads((out / "panoptic.json").read_text())
        assert (
            [row["id"] for row in content["images"]] == [entry["image_id"] for entry in content["annotations"]] == [2]
        )
        captured = capsys.readouterr()
        assert "in 1 images" in captured.out
        assert "broken.png" in captured.err
        none = ["predict", str(run), str(tmp_path / "broken.png"), "--panoptic", "-o", str(tmp_path / "none")]
        assert main(none) == 2
        assert "broken.png" in capsys.readouterr().err

    def test_options_that_do_not_fit(self, run, files, tmp_path, capsys):
        command = ["predict", str(run), str(files.images("val")), "-o", str(tmp_path)]
        assert main([*command, "--panoptic", "--score", "0.2"]) == 2
        assert "--score is for instances" in capsys.readouterr().err
        assert main([*command, "--object-threshold", "0.2"]) == 2
        assert "--object-threshold needs --panoptic" in capsys.readouterr().err


class TestOtherData:
    @pytest.mark.parametrize("name", sorted(set(SMALL) - {"mask2former"}))
    def test_other_segmenters_refuse_it(self, name, files, tmp_path):
        config = load_config(small_config(tmp_path, files, model=SMALL[name].model_dump(mode="json")))
        with pytest.raises(ConfigError, match=rf"{name} segments instances only.*model\.name=mask2former") as error:
            train(config)
        assert_one_sentence(error.value)

    def test_both_splits_are_of_one_kind(self, files, scenes, tmp_path):
        config = load_config(
            small_config(tmp_path, files, model=MODEL),
            [f"data.val.annotations={scenes.annotations('val')}", "data.classes=[disc, box]"],
        )
        with pytest.raises(ConfigError, match="is panoptic and the other is not") as error:
            train(config)
        assert_one_sentence(error.value)

    def test_the_protocols_of_instances_are_refused(self, files, tmp_path):
        config = load_config(small_config(tmp_path, files, model=MODEL), ["eval.protocol=coco"])
        with pytest.raises(ConfigError, match="scored by panoptic quality") as error:
            train(config)
        assert_one_sentence(error.value)

    def test_images_that_cannot_be_read_have_no_segments(self, run, files, tmp_path):
        images = tmp_path / "images"
        shutil.copytree(files.images("val"), images)
        (images / "000002.png").write_bytes(b"no image")
        trained = open_model_and_data(run, (files.annotations("val"), images), pngs=files.pngs("val"))
        arguments, unreadable = (trained.model, trained.data, trained.info.categories, trained.info.test_size), []
        rows = predict_panoptic_dataset(*arguments, batch_size=2, on_unreadable=unreadable.append)
        assert len(unreadable) == 1
        assert "000002.png" in unreadable[0]
        expected = [row for row in RunFolder(run).read_predictions() if row["image_id"] != 2]
        assert [(row["image_id"], row["category_id"]) for row in rows] == [
            (row["image_id"], row["category_id"]) for row in expected
        ]
        with pytest.raises(DataError, match=r"000002\.png"):
            predict_panoptic_dataset(*arguments)

    def test_png_files_that_cannot_be_read_are_not_scored(self, run, files, tmp_path, capsys):
        pngs = shutil.copytree(files.pngs("val"), tmp_path / "pngs")
        saved, figures = tmp_path / "found.json", tmp_path / "figures.json"
        data = ["--data", str(files.annotations("val")), str(files.images("val")), "--pngs", str(pngs)]
        command = ["eval", str(run), *data, "--save", str(saved), "--json", str(figures), "--workers", "0"]
        (pngs / "000002.png").write_bytes(b"no image")
        assert main(command) == 1
        warning = " ".join(capsys.readouterr().err.split())
        assert f"{pngs / '000002.png'} is not a readable image" in warning
        assert warning.endswith("Its image is not scored.")
        content = json.loads(files.annotations("val").read_text())
        for key, number in (("images", "id"), ("annotations", "image_id")):
            content[key] = [row for row in content[key] if row[number] != 2]
        (tmp_path / "rest.json").write_text(json.dumps(content))
        shutil.copytree(files.pngs("val"), tmp_path / "rest")
        rest = ["--data", str(tmp_path / "rest.json"), str(files.images("val"))]
        assert main(["eval", str(run), *rest, "--json", str(tmp_path / "rest_figures.json"), "--workers", "0"]) == 0
        expected = json.loads((tmp_path / "rest_figures.json").read_text())
        assert json.loads(figures.read_text()) == expected
        assert len(json.loads(saved.read_text())["annotations"]) == 4
        for file in pngs.iterdir():
            file.write_bytes(b"no image")
        assert main(command) == 2

    @pytest.mark.parametrize("on_unreadable", ["stop", "skip"])
    def test_a_training_with_png_files_that_cannot_be_read(self, files, tmp_path, capsys, on_unreadable):
        settings = ["train.steps=2", "train.batch_size=4", "train.eval_every=1", f"data.on_unreadable={on_unreadable}"]
        for split in ("train", "val"):
            pngs = shutil.copytree(files.pngs(split), tmp_path / split)
            settings.append(f"data.{split}.panoptic_pngs={pngs}")
        (tmp_path / "val" / "000002.png").write_bytes(b"no image")
        if on_unreadable == "skip":
            (tmp_path / "train" / "000003.png").write_bytes(b"no image")
        done = main(arguments(small_config(tmp_path, files, model=MODEL), *settings))
        printed = capsys.readouterr()
        if on_unreadable == "stop":
            assert done == 2
            sentence = " ".join(printed.err.split())
            assert "000002.png is not a readable image" in sentence
            assert "Training stopped at step 1, which is saved in" in sentence
            return
        assert done == 0
        assert len(lines(tmp_path / "runs" / "small", "eval")) == 2
        text = " ".join(printed.out.split())
        assert text.count("val/000002.png is not a readable image") == 2
        assert text.count("Its image is not scored.") == 2
        assert text.count("train/000003.png is not a readable image") == 1
        assert (tmp_path / "runs" / "small" / "report.html").is_file()

    def test_flip_pairs_are_both_things_or_both_stuff(self, files, tmp_path, capsys):
        config = small_config(tmp_path, files, model=MODEL)
        assert main(arguments(config, "data.flip_pairs=[[grass, disc]]")) == 2
        assert "'disc' is a thing and 'grass' is stuff" in " ".join(capsys.readouterr().err.split())
        assert main(arguments(config, "data.flip_pairs=[[disc, box], [grass, sand]]", "train.steps=1")) == 0

    def test_a_class_that_the_model_does_not_have(self, run, files, tmp_path, capsys):
        content = json.loads(files.annotations("val").read_text())
        content["categories"][-1]["name"] = "lava"
        path = tmp_path / "other.json"
        path.write_text(json.dumps(content))
        command = ["eval", str(run), "--data", str(path), str(files.images("val")), "--pngs", str(files.pngs("val"))]
        assert main([*command, "--workers", "0"]) == 2
        assert "annotations of the class 'lava'" in " ".join(capsys.readouterr().err.split())

    def test_a_model_of_instances_predicts_no_stuff(self, scenes, files, tmp_path, capsys):
        config = small_config(tmp_path, scenes, model=SMALL["mask2former"].model_dump(mode="json"))
        assert main(arguments(config, "train.steps=1", "data.classes=[disc, box]")) == 0
        run = tmp_path / "runs" / "small"
        assert main(["predict", str(run), str(files.images("val")), "--panoptic", "-o", str(tmp_path / "out")]) == 2
        assert "trained on instances and knows no stuff" in capsys.readouterr().err

    def test_a_panoptic_model_is_scored_on_instances(self, run, scenes, tmp_path):
        content = json.loads(scenes.annotations("val").read_text())
        content["categories"] = content["categories"][:2]
        content["annotations"] = [a for a in content["annotations"] if a["category_id"] <= 2]
        path = tmp_path / "things.json"
        path.write_text(json.dumps(content))
        assert main(["eval", str(run), "--data", str(path), str(scenes.images("val")), "--workers", "0"]) == 0


class TestSameBits:
    def test_a_killed_run(self, files, tmp_path):
        config = small_config(tmp_path, files, model=MODEL)
        settings = [*ALGORITHM, "train.steps=6", "train.batch_size=4", "train.eval_every=3", "train.save_every=1"]
        train_to_the_end(config, *settings, "name=whole")
        train_with_kills(config, tmp_path / "runs" / "killed", 2, *settings, "name=killed")
        assert run_content(tmp_path / "runs" / "killed") == run_content(tmp_path / "runs" / "whole")

    def test_the_png_files_may_move(self, files, tmp_path):
        config = small_config(tmp_path, files, model=MODEL)
        settings = ["train.batch_size=4", "train.steps=2"]
        assert main(arguments(config, *settings)) == 0
        moved = ["data.train.panoptic_pngs", "data.val.panoptic_pngs"]
        places = [f"{key}={files.pngs(split)}" for key, split in zip(moved, ("train", "val"), strict=True)]
        assert main([*arguments(config, *settings, *places), "--resume"]) == 0

    def test_relative_paths_are_stored_absolute(self, files, tmp_path, monkeypatch):
        monkeypatch.chdir(files.root)
        config = load_config(
            small_config(tmp_path, files, model=MODEL),
            ["train.steps=1", "train.batch_size=4", "data.val.panoptic_pngs=annotations/val"],
        )
        train(config)
        stored = RunFolder(tmp_path / "runs" / "small").read_config().data
        assert stored.val.panoptic_pngs == files.pngs("val")
        assert stored.train.panoptic_pngs is None


def test_stuff_of_other_images_is_a_positive_of_stuff_queries(files):
    """L_inter depends on what is stuff; the losses of the segmenter do not."""
    data = open_data(files.annotations("train"), files.images("train"))
    batch = collate([LoadedSample(data.load(i), i, (64, 64)) for i in range(4)])
    assert all((~target.things).any() for target in batch.targets)
    all_things = [replace(target, things=None) for target in batch.targets]
    panoptic, instances = (losses_of(batch.images, targets) for targets in (batch.targets, all_things))
    assert panoptic["loss_mask"] == instances["loss_mask"]
    assert panoptic["loss_class"] == instances["loss_class"]
    assert panoptic["loss_equi"] == instances["loss_equi"] > 0
    assert panoptic["loss_inter"] != instances["loss_inter"]


def losses_of(images, targets):
    torch.manual_seed(0)
    model = build_segmenter(SMALL["mask2former"], BackboneConfig(name="tiny", weights="random"), 6)
    return UniqueQuerying(model, InterSceneSettings(capacity=500), EquivarianceSettings())(images, targets)


@pytest.mark.distributed
def test_two_processes_learn_what_one_does(files, tmp_path):
    config = small_config(tmp_path, files, model=MODEL)
    settings = [
        "data.augment=[{op: flip, p: 0.5}, {op: scale_jitter, range: [1.0, 1.3], size: 64}]",
        "querying.inter={capacity: 5000, sampling: {count: 5}}",
        "querying.equivariance={}",
        "optim={name: sgd, lr: 0.001}",
        "train.ema=null",
    ]
    for name, processes in (("one", 1), ("two", 2)):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes > 1 else []
        command = arguments(config, *settings, f"name={name}", f"train.batch_size={8 // processes}")
        ended = subprocess.run(
            [sys.executable, *launcher, "-m", "uniquery", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    one, two = (lines(tmp_path / "runs" / name, "train") for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two] == [1, 2, 3, 4]
    assert two[0]["losses"]["loss_inter"] == pytest.approx(one[0]["losses"]["loss_inter"], rel=1e-4)
    assert two[0]["losses"] == pytest.approx(one[0]["losses"], rel=0.02)  # each process draws points of its own
    first, second = (lines(tmp_path / "runs" / name, "eval") for name in ("one", "two"))
    assert [line["headline"] for line in second] == ["PQ", "PQ"]
    assert second[0]["instances"] == first[0]["instances"]
