"""Thresholds against a search over all of them, on results that were matched by hand; and what cannot be chosen."""

import json
import shutil

import numpy as np
import pytest
import torch

import uniquery
from helpers.coco_sets import random_set
from helpers.small_runs import small_config
from uniquery.cli import main
from uniquery.errors import CheckpointError, UserError
from uniquery.evaluation.operating_points import (
    Rule,
    ScoredDetections,
    choose_threshold,
    parse_rule,
    read_scores,
)
from uniquery.masks import rle
from uniquery.weights.model_file import Thresholds, load_model, read_model_info, store_thresholds


def naive_detections(truth, results, category):
    """(score, whether it is correct) of each detection that counts, and the number of instances, image by image."""
    found, instances = [], 0
    for image in truth["images"]:
        objects = [
            (rle.decode(rle.from_segmentation(a["segmentation"], image["height"], image["width"])), a["iscrowd"])
            for a in truth["annotations"]
            if (a["image_id"], a["category_id"]) == (image["id"], category)
        ]
        real, crowds = [m for m, crowd in objects if not crowd], [m for m, crowd in objects if crowd]
        instances += len(real)
        rows = [r for r in results if (r["image_id"], r["category_id"]) == (image["id"], category)]
        free = set(range(len(real)))
        for row in sorted(rows, key=lambda r: -r["score"])[:100]:
            mask = rle.decode(row["segmentation"])
            overlaps = {g: (mask & real[g]).sum() / max((mask | real[g]).sum(), 1) for g in free}
            best = max(overlaps, key=overlaps.get, default=None)
            if best is not None and overlaps[best] >= 0.5:
                free.remove(best)
                found.append((row["score"], True))
            elif not any((mask & crowd).sum() >= 0.5 * mask.sum() for crowd in crowds):
                found.append((row["score"], False))
    return found, instances


def naive_choice(found, instances, precision=None):
    """(correct, kept) at the best of all thresholds."""
    options = []
    for threshold in {score for score, _ in found}:
        kept = [correct for score, correct in found if score >= threshold]
        share = sum(kept) / len(kept)
        if precision is None:
            options.append((2 * sum(kept) / (len(kept) + instances), threshold, sum(kept), len(kept)))
        elif share >= precision:
            options.append((sum(kept), threshold, sum(kept), len(kept)))
    return max(options)[2:]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", [None, 0.3, 0.6])
def test_no_threshold_is_better(seed, precision):
    truth, results = random_set(seed)
    scores = read_scores(truth, results)
    checked = 0
    for category, detections in scores.classes.items():
        found, instances = naive_detections(truth, results, category)
        assert detections.instances == instances
        assert sorted(zip(detections.scores, detections.is_correct, strict=True)) == sorted(found)
        if found and instances:
            chosen = choose_threshold(detections, Rule(precision))
            if chosen.problem is None:
                assert (chosen.point.found, chosen.point.kept) == naive_choice(found, instances, precision)
                checked += 1
    assert checked


def test_the_threshold_lies_between_two_scores():
    detections = ScoredDetections(np.array([0.9, 0.8, 0.8, 0.4]), np.array([True, True, True, False]), 4)
    point = choose_threshold(detections, Rule()).point
    assert point.threshold == pytest.approx(0.6)
    assert (point.precision, point.recall, point.f1) == (1, 0.75, pytest.approx(6 / 7))
    assert choose_threshold(detections, Rule(0.75)).point == point  # nothing more is found below
    last = ScoredDetections(detections.scores, np.array([True, True, False, True]), 4)
    assert choose_threshold(last, Rule(0.75)).point.threshold == 0.4  # the lowest score there is


def test_equal_scores_are_kept_together():
    detections = ScoredDetections(np.array([0.9, 0.9]), np.array([True, False]), 1)
    assert [point.kept for point in detections.curve()] == [2]
    problem = choose_threshold(detections, Rule(0.9)).problem
    assert problem == "no precision of 0.9, so the threshold is that of the highest precision"


@pytest.mark.parametrize(("count", "instances", "missing"), [(2, 0, "instances"), (0, 3, "predictions")])
def test_nothing_to_choose_from(count, instances, missing):
    detections = ScoredDetections(np.full(count, 0.7), np.zeros(count, dtype=bool), instances)
    chosen = choose_threshold(detections, Rule())
    assert chosen.point.threshold == 0.5
    assert chosen.problem == f"no {missing} in the validation data, so the threshold is 0.5"


def test_calibration_error_by_hand():
    mask = rle.encode(np.ones((4, 4), np.uint8))
    rows = [{"image_id": i, "category_id": 1, "segmentation": mask} for i in range(4)]
    truth = {
        "images": [{"id": i, "height": 4, "width": 4} for i in range(4)],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [{**rows[0], "id": 1}, {**rows[1], "id": 2}],
    }
    scores = read_scores(truth, [{**row, "score": s} for row, s in zip(rows, (0.95, 0.85, 0.85, 0.05), strict=True)])
    # Bins: 0.05 is never right, 0.85 half of the time, 0.95 always.
    assert scores.calibration_error == pytest.approx((0.05 + 2 * 0.35 + 0.05) / 4)
    assert sum(count for _, _, count in scores.bins) == 4
    assert read_scores(truth, []).calibration_error is None


@pytest.mark.parametrize("text", ["best", "precision=", "precision=0", "precision=1.5", "precision=nan", "0.9", ""])
def test_rules_that_are_none(text):
    with pytest.raises(UserError, match="best-f1, or by precision="):
        parse_rule(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory, scenes):
    config = small_config(tmp_path_factory.mktemp("run"), scenes)
    return uniquery.train(uniquery.load_config(config, ["model.score_threshold=0"]))


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


class TestModelFile:
    chosen = Thresholds((0.25, 0.5, 0.75), 0.4, "best-f1")

    @pytest.mark.parametrize("place", [".", "last", "best/model.safetensors", "alone.safetensors"])
    def test_thresholds_are_stored_and_weights_stay(self, copy, place):
        shutil.copy(copy / "best" / "model.safetensors", copy / "alone.safetensors")
        before = load_model(copy / place)[0].state_dict()
        names = sorted(p.name for p in copy.rglob("*"))
        store_thresholds(copy / place, self.chosen)
        model, info = load_model(copy / place)  # verifies the checksums
        assert info.thresholds == self.chosen
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert sorted(p.name for p in copy.rglob("*")) == names
        assert uniquery.load(copy / place).thresholds == self.chosen

    def test_a_run_goes_on_after_thresholds_were_stored(self, copy):
        store_thresholds(copy / "last", self.chosen)
        assert main(["train", str(copy), "--resume", "auto", "--set", "train.steps=5"]) == 0
        assert read_model_info(copy / "last").thresholds is None  # the weights are others now

    def test_no_model(self, tmp_path):
        with pytest.raises(CheckpointError, match="No checkpoint"):
            store_thresholds(tmp_path, self.chosen)

    def test_a_folder_that_cannot_be_written(self, copy, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("uniquery.weights.model_file.write_checksummed", full)
        with pytest.raises(UserError, match="No space left"):
            store_thresholds(copy, self.chosen)
        assert read_model_info(copy).thresholds is None


class TestPredictions:
    def test_each_class_has_its_threshold_unless_one_is_given(self, copy, scenes):
        image = next(scenes.images("val").iterdir())
        everything = uniquery.load(copy).predict(image, score_threshold=0)
        assert len(everything) > 3
        middle = everything.scores.median().item()
        store_thresholds(copy, Thresholds((0.0, middle, 1.0), 0.5, "best-f1"))
        kept = uniquery.load(copy).predict(image)
        scores = list(zip(everything.labels.tolist(), everything.scores.tolist(), strict=True))
        expected = [(label, score) for label, score in scores if score >= (0.0, middle, 1.0)[label]]
        assert list(zip(kept.labels.tolist(), kept.scores.tolist(), strict=True)) == expected
        assert 0 < len(kept) < len(everything)
        assert len(uniquery.load(copy).predict(image, score_threshold=0)) == len(everything)

    def test_the_mask_threshold_too(self, copy, scenes):
        image = next(scenes.images("val").iterdir())
        wanted = uniquery.load(copy).predict(image, score_threshold=0, mask_threshold=0.3)
        store_thresholds(copy, Thresholds((0.0,) * 3, 0.3, "best-f1"))
        found = uniquery.load(copy).predict(image)
        assert found.rles == wanted.rles
        own = uniquery.load(copy).predict(image, mask_threshold=0.6)
        assert own.rles != wanted.rles


class TestCommand:
    def test_chooses_stores_and_shows(self, copy, tmp_path, capsys):
        arguments = ["eval", str(copy), "--choose-thresholds", "best-f1", "--workers", "0"]
        assert main([*arguments, "--json", str(tmp_path / "t.json")]) == 0
        chosen = read_model_info(copy).thresholds
        assert chosen.rule == "best-f1"
        assert len(chosen.scores) == 3
        written = json.loads((tmp_path / "t.json").read_text())
        assert (written["mask"], tuple(written["scores"])) == (chosen.mask, chosen.scores)
        assert main(["weights", "show", str(copy)]) == 0
        output = capsys.readouterr().out
        assert "by best-f1" in output
        assert all(f"{score:.3f}" in output for score in chosen.scores)

    def test_a_precision_that_is_not_reached_is_a_warning(self, copy, capsys):
        assert main(["eval", str(copy), "--choose-thresholds", "precision=1", "--workers", "0"]) == 0
        warnings = capsys.readouterr().err.splitlines()
        assert 0 < len(warnings) == len({line.rpartition(": ")[0] for line in warnings})  # one for each problem
        assert all(line.startswith("warning: no ") for line in warnings)

    def test_a_model_without_thresholds_says_so(self, run, capsys):
        assert main(["weights", "show", str(run)]) == 0
        assert "none of its own" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["--choose-thresholds", "best"], "best-f1, or by precision="),
            (["--choose-thresholds", "best-f1", "--sweep-threshold"], "leave out --sweep-threshold"),
            (["--choose-thresholds", "best-f1", "--type", "bbox"], "leave out --type"),
            (["--choose-thresholds", "best-f1", "--results", "x.json", "--annotations", "y.json"], "give a model"),
        ],
    )
    def test_options_that_do_not_fit(self, run, options, sentence, capsys):
        assert main(["eval", str(run), *options]) == 2
        assert sentence in capsys.readouterr().err
