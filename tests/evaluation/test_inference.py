"""A model on a data set: results, threshold sweeps, and opening a run with its data."""

import json

import pytest
from rich.console import Console

from helpers.small_runs import small_config
from uniquery.data.augment import TestSize
from uniquery.data.coco import CocoData
from uniquery.errors import UserError
from uniquery.evaluation import evaluate
from uniquery.evaluation.diagnose import TRANSFORMS, diagnose
from uniquery.evaluation.inference import predict_dataset, predict_image
from uniquery.evaluation.sweep import MASK_THRESHOLDS, sweep_mask_thresholds
from uniquery.evaluation.tables import sweep_table
from uniquery.report.preview import preview_picture
from uniquery.report.responses import response_picture
from uniquery.training.config import load_config
from uniquery.training.loop import train
from uniquery.training.model_and_data import ModelAndData, open_model_and_data
from uniquery.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory, scenes):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("inference")
    config = load_config(small_config(folder, scenes), ["model.score_threshold=0", "eval.max_detections=7"])
    return train(config, console=Console(quiet=True))


@pytest.fixture(scope="module")
def trained(run) -> ModelAndData:
    return open_model_and_data(run)


class TestPredictDataset:
    def test_it_is_each_image_alone(self, trained):
        model, data, size = trained.model, trained.data, trained.info.test_size
        (results,) = predict_dataset(model, data, trained.classes, size, batch_size=1).values()
        assert [r["image_id"] for r in results] == sorted(
            (r["image_id"] for r in results), key=data.image_ids.tolist().index
        )
        for index, image_id in enumerate(data.image_ids.tolist()):
            alone = predict_image(model, data.read(index), size.short, size.longest)
            assert [r["score"] for r in results if r["image_id"] == image_id] == alone.scores.tolist()

    def test_ranks_share_the_images(self, trained):
        model, data, size = trained.model, trained.data, trained.info.test_size
        (whole,) = predict_dataset(model, data, trained.classes, size).values()
        shares = [predict_dataset(model, data, trained.classes, size, rank=rank, ranks=3)[None] for rank in range(3)]
        assert sorted(json.dumps(r) for share in shares for r in share) == sorted(json.dumps(r) for r in whole)
        assert all(shares)

    def test_thresholds_come_from_one_pass(self, trained):
        model, data, size = trained.model, trained.data, trained.info.test_size
        calls: list[tuple[int, int]] = []
        both = predict_dataset(
            model, data, trained.classes, size, mask_thresholds=(0.3, 0.6), progress=lambda *step: calls.append(step)
        )
        assert list(both) == [0.3, 0.6]
        assert calls[-1] == (len(data), len(data))
        assert len(calls) == len(data)
        assert both[0.3] == predict_dataset(model, data, trained.classes, size, mask_thresholds=(0.3,))[0.3]
        assert both[0.3] != both[0.6]

    def test_classes_that_the_data_does_not_have_are_dropped(self, trained):
        names = ["no such class" for _ in trained.classes]
        results = predict_dataset(trained.model, trained.data, names, trained.info.test_size)
        assert results == {None: []}


class TestSweep:
    def test_each_threshold_is_its_own_evaluation(self, trained):
        model, data, size = trained.model, trained.data, trained.info.test_size
        sweep = sweep_mask_thresholds(model, data, trained.classes, size, mask_thresholds=(0.3, 0.6), max_detections=9)
        for threshold, metrics in sweep.items():
            results = predict_dataset(model, data, trained.classes, size, mask_thresholds=(threshold,))[threshold]
            assert metrics == evaluate(data.annotations, results, max_detections=9)

    def test_the_table_names_the_headline(self, trained):
        sweep = sweep_mask_thresholds(trained.model, trained.data, trained.classes, trained.info.test_size)
        console = Console(width=120, record=True, quiet=False)
        console.print(sweep_table(sweep))
        text = console.export_text()
        assert tuple(sweep) == MASK_THRESHOLDS
        assert all(name in text for name in ("AP50", "APl", "mask AP"))
        assert "AR" not in text


class TestDiagnosis:
    def test_as_a_whole(self, trained):
        diagnosis = diagnose(trained.model, trained.data, trained.info.test_size, images=3)
        assert len(diagnosis.images) == 3
        assert list(diagnosis.equivariance) == list(TRANSFORMS)
        numbers = json.loads(json.dumps(diagnosis.to_dict()))
        assert numbers["images"] == 3
        assert "sweep" not in numbers
        groups = {"inside", "outside", "same_class", "other_class"}
        assert set(numbers["cross_scene"]) == {"queries", "instances", "own", "mean", "p99", "above_half"} | groups
        picture = response_picture(trained.model, diagnosis.images)
        assert picture.shape[2] == 3

    def test_more_images_than_there_are(self, trained):
        diagnosis = diagnose(trained.model, trained.data, trained.info.test_size, images=10**6)
        assert len(diagnosis.images) == len(trained.data)

    def test_no_matched_query(self, trained):
        with pytest.raises(UserError, match="none of the images has a matched query"):
            response_picture(trained.model, [])


class TestOpening:
    def test_a_run_brings_its_data_and_settings(self, run, trained, scenes):
        assert trained.data.annotations == scenes.annotations("val")
        assert trained.max_detections == 7
        assert not trained.model.training
        assert trained.classes == trained.data.classes
        for path in (run, run / "best", run / "best" / "model.safetensors"):
            assert RunFolder.of_model(path).read_config() == load_config(run / "config.yaml")

    def test_other_data(self, run, scenes):
        opened = open_model_and_data(run, (scenes.annotations("train"), scenes.images("train")))
        assert opened.data.annotations == scenes.annotations("train")
        assert opened.max_detections == 7

    def test_a_model_without_a_run(self, run, scenes, tmp_path):
        file = tmp_path / "a" / "b" / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes((run / "best" / "model.safetensors").read_bytes())
        assert RunFolder.of_model(file) is None
        with pytest.raises(UserError, match="no validation data of its own: add --data"):
            open_model_and_data(file)
        opened = open_model_and_data(file, (scenes.annotations("val"), scenes.images("val")))
        assert (opened.max_detections, opened.protocol) == (None, None)


def test_a_preview_has_a_row_for_each_image(scenes):
    data = CocoData(scenes.annotations("train"), scenes.images("train"))
    one, three = (preview_picture(data, [], seed=0, rows=rows) for rows in (1, 3))
    assert one.shape[1] == three.shape[1]
    assert three.shape[0] > 2.5 * one.shape[0]


def test_the_log_names_the_headline(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert evaluations
    for line in evaluations:
        assert line["headline"] == "AP"
        assert line["headline"] in line["metrics"]


def test_a_test_size_is_used_as_given(trained):
    small = predict_dataset(trained.model, trained.data, trained.classes, TestSize(short=32, longest=32))[None]
    usual = predict_dataset(trained.model, trained.data, trained.classes, trained.info.test_size)[None]
    assert small != usual
    assert {tuple(r["segmentation"]["size"]) for r in small} == {tuple(size) for size in trained.data.sizes.tolist()}
