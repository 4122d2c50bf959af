import json
from pathlib import Path

import pytest
from PIL import Image

from helpers.coco_files import assert_one_sentence
from helpers.foreign_sets import pictures, write_id_masks
from uniquery.cli import main
from uniquery.data.importing import import_data
from uniquery.data.layouts import FoundData, find_dataset
from uniquery.data.split import split_annotations
from uniquery.errors import DataError


def put(folder: Path, annotations: str, images: str | None, name: str = "a.png") -> Path:
    """A json with one image, and that image."""
    file = folder / annotations
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"images": [{"id": 1, "file_name": name, "height": 4, "width": 4}], "annotations": []}
    file.write_text(json.dumps({**content, "categories": [{"id": 1, "name": "cell"}]}))
    if images is not None:
        (folder / images / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(folder / images / name)
    return file


def taken(folder: Path, found: FoundData) -> list[str | None]:
    paths = [found.train.annotations, found.train.images]
    paths += [found.val.annotations, found.val.images] if found.val else [None, None]
    return [None if path is None else path.relative_to(folder).as_posix() for path in [*paths, found.test]]


class TestLayouts:
    def test_roboflow(self, tmp_path):
        for split in ("train", "valid", "test"):
            put(tmp_path, f"{split}/_annotations.coco.json", split, f"{split}_jpg.rf.1234.jpg")
        assert taken(tmp_path, find_dataset(tmp_path)) == [
            "train/_annotations.coco.json",
            "train",
            "valid/_annotations.coco.json",
            "valid",
            "test/_annotations.coco.json",
        ]

    @pytest.mark.parametrize("images", ["", "images/"])
    def test_coco(self, tmp_path, images):
        for split in ("train2017", "val2017"):
            put(tmp_path, f"annotations/instances_{split}.json", f"{images}{split}", f"{split}.jpg")
            for other in ("captions", "person_keypoints", "panoptic"):
                put(tmp_path, f"annotations/{other}_{split}.json", None)
        put(tmp_path, "annotations/image_info_test-dev2017.json", None)
        assert taken(tmp_path, find_dataset(tmp_path)) == [
            "annotations/instances_train2017.json",
            f"{images}train2017",
            "annotations/instances_val2017.json",
            f"{images}val2017",
            None,
        ]

    def test_panoptic_alone(self, tmp_path):
        put(tmp_path, "annotations/panoptic_train2017.json", "train2017")
        assert taken(tmp_path, find_dataset(tmp_path))[0] == "annotations/panoptic_train2017.json"

    def test_two_files_and_one_folder(self, tmp_path):
        """As with this project's drawn scenes and with nuclei; names may have folders."""
        put(tmp_path, "annotations/train.json", "images", "x/a.png")
        put(tmp_path, "annotations/val.json", "images", "x/b.png")
        assert taken(tmp_path, find_dataset(tmp_path)) == [
            "annotations/train.json",
            "images",
            "annotations/val.json",
            "images",
            None,
        ]

    @pytest.mark.parametrize("images", ["images", "photos", "data/raw", "."])
    def test_one_file_and_one_folder(self, tmp_path, images):
        put(tmp_path, "labels.json", images)
        assert taken(tmp_path, find_dataset(tmp_path)) == ["labels.json", images, None, None, None]

    def test_what_import_and_split_write(self, tmp_path):
        import_data("masks", write_id_masks(tmp_path / "source", pictures()), tmp_path / "out")
        assert taken(tmp_path / "out", find_dataset(tmp_path / "out"))[:3] == ["annotations.json", "images", None]
        split_annotations(tmp_path / "out/annotations.json", share=0.4)
        found = find_dataset(tmp_path / "out")
        assert taken(tmp_path / "out", found) == ["train.json", "images", "val.json", "images", None]
        assert found.train.count + (found.val.count if found.val else 0) == 3

    def test_a_split_in_a_folder_of_its_own(self, tmp_path):
        import_data("masks", write_id_masks(tmp_path / "source", pictures()), tmp_path / "out")
        split_annotations(tmp_path / "out/annotations.json", share=0.4, output=tmp_path / "out/seed0")
        found = find_dataset(tmp_path / "out/seed0")
        assert found.train.images == tmp_path / "out/images"


class TestWhatIsNotFound:
    def sentence(self, folder: Path) -> str:
        with pytest.raises(DataError) as caught:
            find_dataset(folder)
        assert_one_sentence(caught.value)
        return str(caught.value)

    def test_no_folder_no_file(self, tmp_path):
        assert "not a folder" in self.sentence(tmp_path / "none")
        assert "no training data" in self.sentence(tmp_path)

    def test_only_validation_data(self, tmp_path):
        put(tmp_path, "val.json", "images")
        assert "no training data" in self.sentence(tmp_path)

    @pytest.mark.parametrize(
        "names", [("a.json", "b.json"), ("annotations/train.json", "annotations/instances_train.json")]
    )
    def test_ambiguous(self, tmp_path, names):
        for name in names:
            put(tmp_path, name, "images")
        message = self.sentence(tmp_path)
        assert all(name in message for name in names)

    def test_a_split_of_training_data_is_not_mixed_with_it(self, tmp_path):
        """The images of val.json are also in instances_train.json."""
        put(tmp_path, "annotations/instances_train.json", "images/train")
        for name in ("train", "val"):
            put(tmp_path, f"annotations/{name}.json", None)
        assert "Several files could be the train data" in self.sentence(tmp_path)

    def test_missing_images(self, tmp_path):
        put(tmp_path / "set", "train.json", "../elsewhere/deep")
        assert "a.png" in self.sentence(tmp_path / "set")

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"images": [{"file_name": 3}], "categories": [{}]}'])
    def test_bad_json(self, tmp_path, content):
        (tmp_path / "train.json").write_text(content)
        self.sentence(tmp_path)

    def test_names_that_lead_outside(self, tmp_path):
        put(tmp_path / "set", "train.json", None, "../../secret.png")
        self.sentence(tmp_path / "set")


def test_train_prints_what_it_took(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("uniquery.experiment.train", lambda config, **_: tmp_path / config.data.val.annotations.name)
    assert main(["train", "condinst_lite0", "--dataset", str(scenes.root)]) == 0
    printed = capsys.readouterr().out
    assert f"train: {scenes.annotations('train')}, 6 images in {scenes.images('train')}" in printed
    assert f"val: {scenes.annotations('val')}, 4 images in {scenes.images('val')}" in printed
    assert main(["train", "condinst_lite0", "--dataset", str(tmp_path)]) == 2
