"""`uniquery.load` and `Model` as a Python user meets them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import uniquery
from helpers.small_runs import small_config
from uniquery.data.images import read_image
from uniquery.errors import CheckpointError, ConfigError, DataError
from uniquery.evaluation.inference import predict_image
from uniquery.structures import Instances


@pytest.fixture(scope="module")
def run(tmp_path_factory, scenes) -> Path:
    file = small_config(tmp_path_factory.mktemp("run"), scenes)
    return uniquery.train(uniquery.load_config(file, ["model.score_threshold=0"]))


@pytest.fixture(scope="module")
def model(run) -> uniquery.Model:
    return uniquery.load(run, device="cpu")


@pytest.fixture(scope="module")
def photo(scenes) -> Path:
    return next(scenes.images("val").iterdir())


def equal(a: Instances, b: Instances) -> bool:
    same = all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("scores", "labels", "boxes"))
    return same and a.rles == b.rles and a.size == b.size and a.classes == b.classes


class TestLoad:
    def test_run_folder_checkpoint_folder_and_file(self, run, photo):
        paths = [run, str(run), run / "best", str(run / "best" / "model.safetensors")]
        predictions = [uniquery.load(path).predict(photo, score_threshold=0) for path in paths]
        assert len(predictions[0])
        assert all(equal(predictions[0], other) for other in predictions)

    def test_what_a_model_knows(self, model, scenes):
        assert [(c.id, c.name) for c in model.categories] == list(enumerate(model.classes, start=1))
        assert len(model.classes) == 3
        assert model.device == torch.device("cpu")
        assert isinstance(model.segmenter, torch.nn.Module)
        assert not model.segmenter.training
        assert repr(model) == "Model(condinst, 3 classes, cpu)"

    def test_nothing_to_load(self, tmp_path):
        with pytest.raises(CheckpointError, match="No checkpoint"):
            uniquery.load(str(tmp_path / "none"))

    def test_a_device_that_is_not_there(self, run):
        with pytest.raises(ConfigError, match="device 'quantum' cannot be used"):
            uniquery.load(run, device="quantum")


class TestPredict:
    def test_every_form_of_an_image_gives_the_same(self, model, photo):
        array = read_image(photo)
        tensor = torch.tensor(array).permute(2, 0, 1)
        forms = [photo, str(photo), Image.open(photo), array, tensor]
        predictions = model.predict(forms, score_threshold=0)
        assert isinstance(predictions, list)
        assert all(equal(predictions[0], other) for other in predictions)
        assert all(equal(predictions[0], model.predict(form, score_threshold=0)) for form in forms)
        assert len(model.predict((photo, array))) == 2
        assert model.predict([]) == []

    def test_the_default_size_is_the_models_own(self, model, photo):
        expected = predict_image(model.segmenter, read_image(photo), 64, 96)
        assert torch.equal(model.predict(photo, score_threshold=0).scores, expected.scores)
        smaller = predict_image(model.segmenter, read_image(photo), 32, 48)
        assert torch.equal(model.predict(photo, score_threshold=0, short=32).scores, smaller.scores)

    def test_a_larger_short_side_is_not_capped(self, model, photo, monkeypatch):
        """The limit of the long side, 96 at a short side of 64, grows with it."""
        sizes = []
        monkeypatch.setattr(
            model.segmenter,
            "forward",
            lambda images: sizes.extend(images.sizes) or type(model.segmenter).forward(model.segmenter, images),
        )
        wide = np.zeros((100, 150, 3), np.uint8)
        model.predict(wide, short=128)
        model.predict(np.zeros((100, 400, 3), np.uint8), short=128)
        assert sizes == [(128, 192), (48, 192)]

    def test_thresholds(self, model, photo):
        every = model.predict(photo, score_threshold=0)
        middle = float(every.scores.median())
        kept = model.predict(photo, score_threshold=middle)
        assert len(kept) == int((every.scores >= middle).sum()) < len(every)
        assert len(model.predict(photo, score_threshold=1)) == 0
        assert torch.equal(model.predict(photo).scores, every.scores[every.scores >= 0.5])
        loose = model.predict(photo, score_threshold=0, mask_threshold=0.1)
        assert loose.masks.sum() > every.masks.sum()

    def test_instances_have_the_size_of_the_image_and_the_classes(self, model):
        instances = model.predict(np.zeros((33, 50), np.uint8), score_threshold=0)
        assert instances.size == (33, 50)
        assert instances.classes == model.classes
        assert {result["category_id"] for result in instances.to_coco(image_id=3)} <= {1, 2, 3}

    def test_predictions_need_no_gradient_and_leave_the_weights(self, model, photo):
        before = [parameter.clone() for parameter in model.segmenter.parameters()]
        assert not model.predict(photo).scores.requires_grad
        assert all(torch.equal(a, b) for a, b in zip(before, model.segmenter.parameters(), strict=True))

    def test_wrong_inputs(self, model, photo):
        with pytest.raises(DataError, match="uint8"):
            model.predict([photo, np.zeros((8, 8, 3))])
        with pytest.raises(ConfigError, match="short"):
            model.predict(photo, short=0)
        for name, value in (("score_threshold", 1.5), ("mask_threshold", 50), ("score_threshold", -0.1)):
            with pytest.raises(ConfigError, match=f"{name} is a probability from 0 to 1, not"):
                model.predict(photo, **{name: value})
        with pytest.raises(ConfigError, match="mask_threshold"):
            model.predict(photo, mask_threshold=float("nan"))

    def test_drawing_takes_the_same_forms(self, model, photo):
        instances = model.predict(photo, score_threshold=0, mask_threshold=0.1)[:3]
        picture = instances.draw(photo)
        assert picture.shape == (*instances.size, 3)
        assert np.array_equal(picture, instances.draw(Image.open(photo)))
        assert (picture != read_image(photo)).any()
