"""Drawn scenes in the form of LVIS."""

import hashlib
import json
from collections import Counter

import pytest

from helpers.coco_files import assert_one_sentence
from helpers.naive_lvis import assert_lvis_equals_the_naive_way
from helpers.small_runs import small_config
from helpers.small_segmenters import SMALL
from uniquery.data.check import check_data
from uniquery.data.lvis_scenes import LONG_TAIL, long_tailed
from uniquery.data.scenes import ScenesConfig, make_scenes
from uniquery.errors import ConfigError, DataError
from uniquery.training.batches import load_splits
from uniquery.training.config import load_config
from uniquery.training.log import EvalLine, read_metrics
from uniquery.training.loop import train
from uniquery.training.run_folder import RunFolder

MODEL = SMALL["solov2"].model_dump(mode="json") | {"score_threshold": 1e-4, "max_detections": 300}
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


def trained(folder, files, **changes):
    """The last evaluation of a run, and its metrics computed again, also by a second implementation."""
    settings = {"data.sampling": {"threshold": 0.25}, "data.federated": {"classes": 4}, **changes}
    run = RunFolder(train(load_config(small_config(folder, files, model=MODEL), [*settings.items()])))
    *_, line = [line for line in read_metrics(run.metrics_file) if isinstance(line, EvalLine)]
    found = assert_lvis_equals_the_naive_way(files.annotations("val"), run.predictions_file)
    assert line.metrics == pytest.approx(found.values)
    assert line.per_class == pytest.approx(found.per_class)
    return found.values


def test_a_training_reports_rare_and_frequent_classes(scenes, tmp_path):
    values = trained(tmp_path, scenes, **{"train.steps": 20, "train.eval_every": 20, "train.batch_size": 4})
    assert {"APr", "APc", "APf", "AR@300"} <= set(values)
    assert values["AP"] > 0
    assert values["APf"] is None


@pytest.mark.slow
def test_every_figure_of_a_model_that_learned_a_little(tmp_path):
    files = make_scenes(tmp_path / "scenes", CONFIG.model_copy(update={"train_images": 160, "val_images": 30}))
    steps = {"train.steps": 600, "train.eval_every": 600, "train.save_every": 600, "train.log_every": 100}
    values = trained(tmp_path, files, **steps, **{"train.batch_size": 4})
    assert min(values[name] for name in ("AP", "AP50", "AP75", "APs", "APm", "APr", "APc", "APf")) > 0
