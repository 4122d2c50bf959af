"""Drawn scenes in the form of LVIS."""

import hashlib
import json
from collections import Counter

import pytest

from helpers.coco_files import assert_one_sentence
from helpers.naive_lvis import NaiveLvis
from helpers.small_runs import small_config
from uniquery.data.check import check_data
from uniquery.data.coco import CocoData
from uniquery.data.lvis_scenes import LONG_TAIL, long_tailed
from uniquery.data.scenes import ScenesConfig, make_scenes
from uniquery.errors import ConfigError, DataError
from uniquery.training.batches import load_splits
from uniquery.training.config import load_config
from uniquery.training.log import EvalLine, read_metrics
from uniquery.training.loop import train

CONFIG = ScenesConfig(train_images=60, val_images=12, size=64, classes=8, crowding=6, lvis=True)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("lvis") / "scenes", CONFIG)


def content(scenes, split):
    return json.loads(scenes.annotations(split).read_text())


class TestForm:
    @pytest.mark.parametrize("split", ["train", "val"])
    def test_is_that_of_lvis(self, scenes, split):
        tables = content(scenes, split)
        assert all("iscrowd" not in row for row in tables["annotations"])
        assert all("file_name" not in row and row["coco_url"].startswith("http://") for row in tables["images"])
        assert {row["frequency"] for row in tables["categories"]} <= set("rcf")
        assert check_data(scenes.annotations(split), scenes.images(split)).is_valid
        assert check_data(scenes.annotations(split), scenes.images(split).parent).is_valid

    @pytest.mark.parametrize("split", ["train", "val"])
    def test_lists_of_classes(self, scenes, split):
        tables = content(scenes, split)
        present = Counter((row["image_id"], row["category_id"]) for row in tables["annotations"])
        for image in tables["images"]:
            assert not any(present[image["id"], c] for c in image["neg_category_ids"])
            assert all(present[image["id"], c] for c in image["not_exhaustive_category_ids"])
        for key in ("neg_category_ids", "not_exhaustive_category_ids"):
            assert any(image[key] for image in tables["images"])

    def test_frequencies_are_those_of_the_training_images(self, scenes):
        tables = content(scenes, "train")
        lost = Counter(c for image in tables["images"] for c in image["not_exhaustive_category_ids"])
        assert lost
        for row in tables["categories"]:
            images = len({a["image_id"] for a in tables["annotations"] if a["category_id"] == row["id"]})
            assert row["frequency"] == ("r" if images <= 10 else "c" if images <= 100 else "f")
        assert content(scenes, "val")["categories"] == tables["categories"]

    def test_a_long_tail_in_training_only(self, scenes):
        train_counts, val_counts = (
            Counter(row["category_id"] for row in content(scenes, split)["annotations"]) for split in ("train", "val")
        )
        assert train_counts[1] > 1.5 * train_counts[2] > 1.5 * train_counts[3] > 4 * train_counts[6]
        assert max(val_counts.values()) < 5 * min(val_counts[i] for i in range(1, 9))

    def test_the_draw(self):
        draws = Counter(long_tailed((i + 0.5) / 10**4, 4) for i in range(10**4))
        for label in range(3):
            assert draws[label] / draws[label + 1] == pytest.approx(LONG_TAIL, rel=0.02)
        assert long_tailed(1 - 1e-16, 3) == 0 or long_tailed(1 - 1e-16, 3) == 2


class TestFolder:
    def test_drawn_again_it_is_the_same(self, scenes, tmp_path):
        again = make_scenes(tmp_path / "scenes", CONFIG)
        for split in ("train", "val"):
            first, second = (
                hashlib.sha256(files.annotations(split).read_bytes()).hexdigest() for files in (scenes, again)
            )
            assert first == second

    def test_it_is_reused(self, scenes):
        before = scenes.annotations("train").stat().st_mtime_ns
        make_scenes(scenes.root, CONFIG)
        assert scenes.annotations("train").stat().st_mtime_ns == before

    def test_the_usual_form_is_another_data_set(self, scenes):
        with pytest.raises(DataError, match="lvis is True, not False") as caught:
            make_scenes(scenes.root, CONFIG.model_copy(update={"lvis": False}))
        assert_one_sentence(caught.value)


class TestProtocol:
    def test_lvis_is_asked_for_without_frequencies(self, tmp_path):
        plain = make_scenes(tmp_path / "plain", CONFIG.model_copy(update={"lvis": False, "train_images": 2}))
        config = load_config(small_config(tmp_path, plain), ["eval.protocol=lvis"])
        with pytest.raises(DataError, match="the class disc has no 'frequency'") as caught:
            load_splits(config)
        assert_one_sentence(caught.value)

    def test_lvis_with_the_backend_of_coco(self, scenes, tmp_path):
        path = small_config(tmp_path, scenes)
        with pytest.raises(ConfigError, match="LVIS metrics need") as caught:
            load_splits(load_config(path, ["eval.backend=pycocotools"]))
        assert_one_sentence(caught.value)
        load_splits(load_config(path, ["eval.backend=pycocotools", "eval.protocol=coco"]))


def test_a_training_reports_rare_and_frequent_classes(scenes, tmp_path):
    changes = ["train.steps=2", "data.sampling=repeat_factor", ("data.federated", {"classes": 4})]
    folder = train(load_config(small_config(tmp_path, scenes), [*changes, "model.score_threshold=0"]))
    *_, last = [line for line in read_metrics(folder / "metrics.jsonl") if isinstance(line, EvalLine)]
    assert {"APr", "APc", "APf", "AR@300"} <= set(last.metrics)
    data = CocoData(scenes.annotations("val"), scenes.images("val"))
    assert set(last.per_class) == set(data.classes)
    results = json.loads((folder / "predictions.json").read_text())
    assert results
    truth = json.loads(scenes.annotations("val").read_text())
    labels = {row["id"]: row["name"] for row in truth["categories"]}
    naive = NaiveLvis(truth, results)
    for category, name in labels.items():
        assert last.per_class[name] == pytest.approx(naive.ap([category]), abs=1e-6)
