"""Panoptic annotations as a data set."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.coco_files import assert_one_sentence, write_set
from helpers.panoptic_files import CAT, CONTENT, CROWD, DOG, SKY, maps, panoptic_set, save_ids, write_panoptic
from helpers.reference import reference
from uniquery.cli import main
from uniquery.data import coco_json
from uniquery.data.augment import CopyPaste
from uniquery.data.batch import LoadedSample, collate
from uniquery.data.check import check_data
from uniquery.data.coco import CocoData
from uniquery.data.dataset import Category, is_panoptic
from uniquery.data.json_stream import JsonStream
from uniquery.data.open import open_data
from uniquery.data.panoptic import PanopticData
from uniquery.errors import DataError
from uniquery.masks import rle
from uniquery.masks.panoptic import ids_to_rgb, rgb_to_ids


class TestLoad:
    def test_segments_become_instances_and_the_rest_is_not_valid(self, tmp_path):
        data = panoptic_set(tmp_path)
        assert data.categories == [Category(2, "dog", True), Category(5, "cat", True), Category(40, "sky", False)]
        assert is_panoptic(data.categories)
        sample, ids = data.load(0), maps()[7]
        assert sample.labels.tolist() == [1, 0, 2]
        assert sample.things.tolist() == [True, True, False]
        for mask, number in zip(sample.masks, (CAT, DOG, SKY), strict=True):
            assert np.array_equal(mask.numpy(), ids == number)
        assert np.array_equal(sample.valid.numpy(), ~np.isin(ids, (0, CROWD)))
        assert torch.equal(sample.image, CocoData.load(plain(tmp_path), 0).image)

    def test_an_image_without_void_is_valid_everywhere(self, tmp_path):
        sample = panoptic_set(tmp_path).load(1)
        assert sample.valid is None
        assert sample.masks.shape == (1, 10, 8)
        assert sample.masks.all()

    def test_an_image_of_void(self, tmp_path):
        sample = panoptic_set(tmp_path).load(2)
        assert sample.masks.shape == (0, 6, 6)
        assert sample.things.shape == sample.labels.shape == (0,)
        assert not sample.valid.any()

    def test_crowd_and_void_may_count_as_background(self, tmp_path):
        sample = panoptic_set(tmp_path, ignore_crowd=False).load(0)
        assert sample.valid is None
        assert len(sample.masks) == 3

    def test_other_classes_are_void(self, tmp_path):
        data = panoptic_set(tmp_path, classes=["sky", "cat"])
        sample = data.load(0)
        assert sample.labels.tolist() == [1, 0]
        assert sample.things.tolist() == [True, False]
        assert np.array_equal(sample.valid.numpy(), np.isin(maps()[7], (CAT, SKY)))
        assert {row["category_id"] for row in data.ground_truth().annotations} == {5, 40}
        assert data.instances_per_image().tolist() == [2, 1, 0]

    def test_a_segment_without_pixels_is_left_out(self, tmp_path):
        def add(content):
            content["annotations"][0]["segments_info"].append({"id": 77, "category_id": 2})

        data = panoptic_set(tmp_path, add)
        assert len(data.load(0).masks) == len(data.instances(0)) == 3
        assert len(data.ground_truth().annotations) == 5

    def test_batches_carry_things_and_valid_pixels(self, tmp_path):
        data = panoptic_set(tmp_path)
        batch = collate([LoadedSample(data.load(i), i, data.load(i).size) for i in range(3)])
        assert [t.things.tolist() for t in batch.targets] == [[True, True, False], [False], []]
        assert [t.valid is None for t in batch.targets] == [False, True, False]
        assert not batch.targets[2].valid[:6, :6].any()
        assert batch.targets[2].valid[6:].all()

    def test_copy_paste_leaves_stuff_where_it_is(self, tmp_path):
        data = panoptic_set(tmp_path)
        for seed in range(5):
            pasted = CopyPaste(p=1)(data.load(0), np.random.default_rng(seed), lambda: data.load(0))
            assert int((~pasted.things).sum()) == 1
            assert int(pasted.things.sum()) > 2
        alone = CopyPaste(p=1)(data.load(0), np.random.default_rng(0), lambda: data.load(1))
        assert len(alone.labels) == 3


class TestDataset:
    def test_instances(self, tmp_path):
        found = panoptic_set(tmp_path).instances(0)
        assert [label for label, _ in found] == [1, 0, 2]
        assert np.array_equal(rle.decode(found[2][1]), maps()[7] == SKY)

    def test_counts_and_empty_images(self, tmp_path):
        assert panoptic_set(tmp_path).instances_per_image().tolist() == [3, 1, 0]
        assert panoptic_set(tmp_path, keep_empty=False).image_ids.tolist() == [7, 0]
        assert panoptic_set(tmp_path, keep_empty=False, classes=["dog"]).image_ids.tolist() == [7]

    def test_classes_of_images(self, tmp_path):
        images, labels = panoptic_set(tmp_path, classes=["sky", "cat"]).image_classes()
        assert list(zip(images.tolist(), labels.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0)]

    def test_other_classes_are_counted_and_some_may_be_missing(self, tmp_path):
        assert panoptic_set(tmp_path).unused == {}
        data = panoptic_set(tmp_path, classes=["sea", "sky"], allow_missing=True)
        assert data.classes == ["sky"]
        assert data.unused == {"cat": 2, "dog": 1}
        with pytest.raises(DataError, match="has no class 'sea'"):
            panoptic_set(tmp_path, classes=["sea", "sky"])

    def test_a_large_json_gives_the_same(self, tmp_path, monkeypatch):
        path, images = write_panoptic(tmp_path)
        small, report = open_data(path, images), check_data(path, images)
        monkeypatch.setattr(coco_json, "LARGE_FILE", 0)
        large = open_data(path, images)
        assert isinstance(coco_json.read_json(path)["annotations"], JsonStream)
        assert large.checksum() == small.checksum()
        assert large.ground_truth() == small.ground_truth()
        assert check_data(path, images) == report

    def test_ground_truth_has_crowds(self, tmp_path):
        truth = panoptic_set(tmp_path).ground_truth()
        assert [(row["image_id"], row["category_id"], row["iscrowd"]) for row in truth.annotations] == [
            (7, 5, 0),
            (7, 2, 0),
            (7, 5, 1),
            (7, 40, 0),
            (0, 40, 0),
        ]
        assert list(truth.categories) == [2, 5, 40]
        assert truth.images[0] == {"id": 0, "height": 10, "width": 8}

    def test_the_checksum_follows_the_json_but_not_the_folder(self, tmp_path):
        first = panoptic_set(tmp_path / "a").checksum()
        assert panoptic_set(tmp_path / "b").checksum() == first
        for number, changes in enumerate([{"id": 9}, {"category_id": 2}, {"iscrowd": 1}]):
            other = panoptic_set(tmp_path / str(number), first_segment(**changes))
            assert other.checksum() != first
        flipped = panoptic_set(tmp_path / "flipped", lambda c: c["categories"][0].update(isthing=0))
        assert flipped.checksum() != first

    def test_workers_get_it(self, tmp_path):
        data = panoptic_set(tmp_path)
        copied = pickle.loads(pickle.dumps(data))
        assert torch.equal(copied.load(0).masks, data.load(0).masks)

    def test_the_json_says_which_format_it_is(self, tmp_path):
        instances = open_data(*write_set(tmp_path))
        assert type(instances) is CocoData
        assert not is_panoptic(instances.categories)
        with pytest.raises(DataError, match="not panoptic") as error:
            open_data(*write_set(tmp_path), pngs=tmp_path)
        assert_one_sentence(error.value)

    def test_the_folder_of_the_png_files_can_be_named(self, tmp_path):
        path, images = write_panoptic(tmp_path)
        (tmp_path / "annotations").rename(tmp_path / "elsewhere")
        with pytest.raises(DataError, match="panoptic_pngs") as error:
            open_data(path, images)
        assert "folder of panoptic PNG files is missing" in str(error.value)
        assert len(open_data(path, images, pngs=tmp_path / "elsewhere").load(0).masks) == 3

    @pytest.mark.realdata
    def test_a_sample_of_coco(self):
        folder = reference("data", "metrics", "panoptic_sample", "sample_data")
        data = PanopticData(folder / "panoptic_examples.json", folder / "input_images")
        data.check_files_exist()
        rows = {row["image_id"]: row for row in json.loads(data.annotations.read_bytes())["annotations"]}
        for index, image in enumerate(data.image_ids.tolist()):
            sample = data.load(index)
            expected = [s for s in rows[image]["segments_info"] if not s["iscrowd"]]
            assert sample.masks.sum((1, 2)).tolist() == [s["area"] for s in expected]
            assert [data.categories[k].id for k in sample.labels] == [s["category_id"] for s in expected]
            assert (sample.valid == 0).any()


def plain(folder: Path) -> CocoData:
    content = {**CONTENT, "annotations": []}
    return CocoData(folder / "annotations.json", folder / "images", tables=content)


def first_segment(**changes):
    return lambda content: content["annotations"][0]["segments_info"][0].update(changes)


def entry(**changes):
    return lambda content: content["annotations"][0].update(changes)


WRONG_TABLES = {
    "isthing missing": (lambda c: c["categories"][0].pop("isthing"), r"Category 5 \(cat\) needs 'isthing'"),
    "isthing text": (lambda c: c["categories"][0].update(isthing="yes"), "needs 'isthing'"),
    "image": (entry(image_id=99), "image 99 belongs to an image that is not in 'images'"),
    "no entry": (lambda c: c["annotations"].pop(), "Image 0 has no entry"),
    "two entries": (lambda c: c["annotations"].append(c["annotations"][0]), "Image 7 has several entries"),
    "no file": (entry(file_name=None), "needs a text as 'file_name'"),
    "outside": (entry(file_name="../secret.png"), "does not name a file inside"),
    "absolute": (entry(file_name="/etc/passwd"), "does not name a file inside"),
    "segments": (entry(segments_info={}), "needs a list of tables as 'segments_info'"),
    "id 0": (first_segment(id=0), "from 1 to 16,777,215"),
    "large id": (first_segment(id=256**3), "from 1 to 16,777,215"),
    "same id": (first_segment(id=DOG), "appears 2 times"),
    "category": (first_segment(category_id=1), "has category 1, which is not in 'categories'"),
    "crowd": (first_segment(iscrowd=2), "iscrowd 2"),
    "area": (first_segment(area=-1), "area -1"),
    "size": (lambda c: c["images"][0].pop("width"), "needs 'width' and 'height'"),
}


class TestBadInput:
    @pytest.mark.parametrize("name", WRONG_TABLES)
    def test_wrong_tables(self, tmp_path, name):
        change, message = WRONG_TABLES[name]
        with pytest.raises(DataError, match=message) as error:
            panoptic_set(tmp_path, change)
        assert_one_sentence(error.value)
        path, images = write_panoptic(tmp_path, change)
        report = check_data(path, images)
        assert not report.is_valid
        assert any(
            problem.text in str(error.value) or problem.text[:-1] in str(error.value) for problem in report.problems
        )

    def test_a_missing_png(self, tmp_path):
        data = panoptic_set(tmp_path)
        data.png_path(0).unlink()
        with pytest.raises(DataError, match=r"1 of 3 panoptic PNG files are missing, the first is .*a\.png") as error:
            data.check_files_exist()
        assert_one_sentence(error.value)
        with pytest.raises(DataError, match="PNG file of image 7 is missing") as error:
            data.load(0)
        assert_one_sentence(error.value)

    def test_a_png_of_another_size(self, tmp_path):
        data = panoptic_set(tmp_path)
        save_ids(data.png_path(0), np.zeros((16, 12), int))
        with pytest.raises(DataError, match=r"a\.png is 12×16, but image 7 is 16×12") as error:
            data.load(0)
        assert_one_sentence(error.value)

    def test_an_id_that_the_json_does_not_name(self, tmp_path):
        data, ids = panoptic_set(tmp_path), maps()[7]
        ids[3, 4] = 300
        save_ids(data.png_path(0), ids)
        with pytest.raises(DataError, match=r"the segment id 300 \(at x 4, y 3\).*image 7 does not name") as error:
            data.load(0)
        assert_one_sentence(error.value)

    def test_a_png_that_is_none(self, tmp_path):
        data = panoptic_set(tmp_path)
        data.png_path(0).write_bytes(b"none")
        with pytest.raises(DataError, match="not a readable image") as error:
            data.load(0)
        assert_one_sentence(error.value)


class TestCheck:
    def test_sound_data(self, tmp_path, capsys):
        path, images = write_panoptic(tmp_path)
        report = check_data(path, images)
        assert report.is_valid
        assert (report.images, report.instances, report.stuff, report.crowd) == (3, 4, 2, 1)
        assert report.classes == {"cat": 1, "dog": 1, "sky": 2}
        assert report.areas["tiny (< 8²)"] == 2
        assert report.areas["small (< 32²)"] == 2
        assert report.max_instances == 3
        assert main(["data", "check", str(path), str(images), str(tmp_path / "annotations")]) == 0
        assert "4 instances (2 of them stuff), 1 crowd regions" in " ".join(capsys.readouterr().out.split())

    def test_every_png_is_read(self, tmp_path):
        path, images = write_panoptic(tmp_path)
        save_ids(tmp_path / "annotations" / "a.png", np.full((12, 16), 300))
        save_ids(tmp_path / "annotations" / "void.png", np.zeros((7, 6), int))
        (tmp_path / "annotations" / "sub" / "b.png").unlink()
        texts = [problem.text for problem in check_data(path, images).problems]
        assert len(texts) == 3
        assert "segment id 300" in texts[0]
        assert "is missing" in texts[1]
        assert "6×7" in texts[2]
        assert len(check_data(path, images, read_pixels=False).problems) == 2
        assert main(["data", "check", str(path), str(images)]) == 1

    def test_the_verdict_says_when_training_would_stop(self, tmp_path):
        path, images = write_panoptic(tmp_path)
        save_ids(tmp_path / "annotations" / "a.png", np.full((12, 16), 300))
        assert check_data(path, images).verdict.startswith("Training would start")
        (tmp_path / "annotations" / "void.png").unlink()
        assert check_data(path, images).verdict.startswith("Training would not start")

    def test_the_right_image_folder_is_hinted_at(self, tmp_path):
        path, images = write_panoptic(tmp_path)
        texts = [problem.text for problem in check_data(path, images / "sub").problems if not problem.fatal]
        assert texts == [f"a.png is not in {images / 'sub'}, but in {images}: give that folder."]

    def test_a_segment_without_pixels_is_a_warning(self, tmp_path):
        def add(content):
            content["annotations"][0]["segments_info"].append({"id": 77, "category_id": 2})

        report = check_data(*write_panoptic(tmp_path, add))
        assert report.is_valid
        assert [p.text for p in report.problems] == ["Segment 77 of image 7 has no pixels; training ignores it."]

    def test_the_preview_hatches_void(self, tmp_path):
        path, images = write_panoptic(tmp_path)
        picture = tmp_path / "preview.png"
        command = ["data", "preview", "scenes/panoptic_mask2former_lite0", "--train", str(path), str(images)]
        assert main([*command, "--images", "1", "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_colors_and_ids_are_inverse():
    ids = np.array([[0, 1, 255], [256, 65535, 256**3 - 1]])
    assert np.array_equal(rgb_to_ids(ids_to_rgb(ids)), ids)
    assert ids_to_rgb(np.array([[CAT]])).tolist() == [[[3, 5, 7]]]
