"""Which images are found, and what is written about them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.small_segmenters import SMALL, small
from uniquery.backbones import BackboneConfig
from uniquery.data.augment import TestSize
from uniquery.data.coco import Category
from uniquery.errors import DataError, UserError
from uniquery.model import Model
from uniquery.report.predictions import find_images, write_predictions
from uniquery.weights.model_file import ModelInfo


@pytest.fixture
def photos(tmp_path):
    """a.png and deep/a.jpg with pixels, and a file that is no image."""
    (tmp_path / "deep").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    Image.fromarray(noise[:30]).save(tmp_path / "deep" / "a.jpg")
    (tmp_path / "notes.txt").write_text("none")
    return tmp_path


@pytest.fixture(scope="module")
def model():
    categories = (Category(7, "cat"), Category(2, "dog"), Category(9, "cow"))
    info = ModelInfo(SMALL["condinst"], BackboneConfig(name="tiny", weights="random"), categories, TestSize(short=64))
    return Model(small("condinst").eval(), info)


class TestFindImages:
    def test_files_folders_and_patterns_name_each_image_once(self, photos):
        first, second = photos / "a.png", photos / "deep" / "a.jpg"
        assert find_images([str(first)]) == [first]
        assert find_images([photos]) == [first, second]
        assert find_images([str(photos / "**" / "*.jpg"), photos]) == [second, first]
        assert find_images([first, str(first), photos]) == [first, second]

    @pytest.mark.parametrize("name", ["none.png", "*.bmp", "empty"])
    def test_an_input_without_images_is_an_error(self, photos, name):
        (photos / "empty").mkdir()
        with pytest.raises(UserError, match="No image at"):
            find_images([photos, str(photos / name)])


class TestWritePredictions:
    def test_what_is_written(self, model, photos, tmp_path):
        files, out = find_images([photos]), tmp_path / "new" / "out"
        progress = []
        count = write_predictions(
            model, files, out, score_threshold=0, mask_threshold=0.1, progress=lambda *done: progress.append(done)
        )
        names = ["a-2.labels.png", "a-2.overlay.png", "a.labels.png", "a.overlay.png", "images.json", "results.json"]
        assert sorted(path.name for path in out.iterdir()) == names
        results = json.loads((out / "results.json").read_text())
        assert count == len(results) > 0
        assert {result["category_id"] for result in results} <= {7, 2, 9}
        assert {result["image_id"] for result in results} == {1, 2}
        described = json.loads((out / "images.json").read_text())
        assert [image["file_name"] for image in described["images"]] == [str(file) for file in files]
        assert described["categories"] == [{"id": 7, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 9, "name": "cow"}]
        assert Image.open(out / "a-2.overlay.png").size == (60, 30)
        assert progress == [(1, 2), (2, 2)]

    def test_label_maps_number_the_instances(self, model, photos, tmp_path):
        write_predictions(model, [photos / "a.png"], tmp_path / "out", score_threshold=0, mask_threshold=0.1)
        labels = np.asarray(Image.open(tmp_path / "out" / "a.labels.png"))
        instances = model.predict(photos / "a.png", score_threshold=0, mask_threshold=0.1)
        assert np.array_equal(labels > 0, instances.masks.any(dim=0).numpy())
        assert labels.max() <= len(instances)

    @pytest.mark.parametrize(("name", "suffixes"), [("coco", {".json"}), ("png", {".png"}), ("overlay", {".png"})])
    def test_one_format(self, model, photos, tmp_path, name, suffixes):
        write_predictions(model, [photos / "a.png"], tmp_path / "out", formats=[name])
        assert {path.suffix for path in (tmp_path / "out").iterdir()} == suffixes

    def test_no_instance_still_writes_every_file(self, model, photos, tmp_path):
        assert write_predictions(model, [photos / "a.png"], tmp_path / "out", score_threshold=1) == 0
        assert json.loads((tmp_path / "out" / "results.json").read_text()) == []
        assert np.asarray(Image.open(tmp_path / "out" / "a.labels.png")).max() == 0
        assert torch.equal(
            torch.tensor(np.asarray(Image.open(tmp_path / "out" / "a.overlay.png"))),
            torch.tensor(np.asarray(Image.open(photos / "a.png"))),
        )

    def test_a_file_that_is_no_image(self, model, photos, tmp_path):
        with pytest.raises(DataError, match=r"notes\.txt is not a readable image"):
            write_predictions(model, [photos / "notes.txt"], tmp_path / "out")
