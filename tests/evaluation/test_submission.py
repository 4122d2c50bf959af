"""What the evaluation server of COCO takes: names, form, and data without annotations."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO

from helpers.small_runs import small_config
from uniquery.cli import main
from uniquery.data.coco_json import read_json
from uniquery.evaluation.submission import submission_name, write_submission
from uniquery.masks import rle

TEST_DEV = Path("annotations/image_info_test-dev2017.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, scenes) -> Path:
    """A run whose model predicts something."""
    folder = tmp_path_factory.mktemp("trained")
    config = small_config(folder, scenes)
    assert main(["train", str(config), "--set", "model.score_threshold=0", "--set", "train.steps=1"]) == 0
    return folder / "runs" / "small"


@pytest.fixture
def unlabeled(tmp_path, scenes) -> Path:
    """As COCO gives it for test-dev: images and categories only."""
    content = read_json(scenes.annotations("val"))
    file = tmp_path / TEST_DEV.name
    file.write_text(json.dumps({key: content[key] for key in ("images", "categories")}))
    return file


def row(image: int = 1) -> dict:
    mask = rle.encode(np.eye(4, dtype=np.uint8))
    return {"image_id": image, "category_id": 2, "segmentation": mask, "bbox": [0, 0, 4, 4], "score": 0.5}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("solov2", "detections_test-dev2017_solov2_results"),
        ("table1-solov2-r50", "detections_test-dev2017_table1-solov2-r50_results"),
        ("my_best_run", "detections_test-dev2017_my-best-run_results"),
        ("detections_test-dev2017_x_results", "detections_test-dev2017_x_results"),
    ],
)
def test_the_name_is_the_servers(name, expected):
    assert submission_name(TEST_DEV, name) == expected


def test_the_split_is_the_end_of_the_json_s_name():
    assert submission_name(Path("instances_val2017.json"), "x") == "detections_val2017_x_results"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_zip_with_one_json_of_masks(tmp_path, count):
    file = write_submission(tmp_path / "mine.zip", [row(n) for n in range(count)], TEST_DEV)
    assert file == tmp_path / "detections_test-dev2017_mine_results.zip"
    assert list(tmp_path.iterdir()) == [file]
    with zipfile.ZipFile(file) as archive:
        assert archive.namelist() == ["detections_test-dev2017_mine_results.json"]
        rows = json.loads(archive.read(archive.namelist()[0]))
    assert [set(one) for one in rows] == [{"image_id", "category_id", "segmentation", "score"}] * count


def test_pycocotools_reads_the_areas_of_masks_not_of_boxes(tmp_path):
    """With a 'bbox', its loadRes, which the server uses, would take the box's area."""
    file = write_submission(tmp_path / "mine.zip", [row()], TEST_DEV)
    truth = COCO()
    truth.dataset = {"images": [{"id": 1, "height": 4, "width": 4}], "categories": [{"id": 2, "name": "x"}]}
    truth.createIndex()
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path)
    (annotation,) = truth.loadRes(str(tmp_path / f"{file.stem}.json")).dataset["annotations"]
    assert annotation["area"] == 4


class TestCommand:
    def test_data_without_annotations_is_predicted_and_not_scored(self, trained, unlabeled, scenes, capsys):
        images = str(scenes.images("val"))
        save = unlabeled.parent / "mine.zip"
        assert (
            main(["eval", str(trained), "--data", str(unlabeled), images, "--save", str(save), "--workers", "0"]) == 0
        )
        printed = capsys.readouterr().out
        assert "has no annotations: nothing is scored" in printed
        file = unlabeled.parent / "detections_test-dev2017_mine_results.zip"
        assert file.name in printed.replace("\n", "")
        with zipfile.ZipFile(file) as archive:
            rows = json.loads(archive.read(f"{file.stem}.json"))
        assert {one["image_id"] for one in rows} == {image["id"] for image in read_json(unlabeled)["images"]}

    def test_a_json_of_labeled_data_is_scored_as_before(self, trained, tmp_path, scenes, capsys):
        save = tmp_path / "results.json"
        assert main(["eval", str(trained), "--save", str(save), "--workers", "0"]) == 0
        assert "AP" in capsys.readouterr().out
        assert {"bbox", "segmentation"} <= set(json.loads(save.read_text())[0])

    def test_without_save_there_is_nothing_to_do(self, trained, unlabeled, scenes, capsys):
        assert main(["eval", str(trained), "--data", str(unlabeled), str(scenes.images("val"))]) == 2
        assert "has no 'annotations'" in capsys.readouterr().err
