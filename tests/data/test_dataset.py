"""What every data set offers: ground truth equal to its json, names of files that are not given, extra columns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

from helpers.coco_files import Content, assert_one_sentence, changed_set, pixels, sound, write_images, write_json
from helpers.coco_sets import HEIGHT, WIDTH, random_set, rectangle
from helpers.reference import reference
from uniquery.data.check import check_data
from uniquery.data.coco import CocoData
from uniquery.data.dataset import Dataset, GroundTruth
from uniquery.errors import DataError
from uniquery.evaluation import evaluate

BACKENDS = ("hotcoco", "pycocotools")


def same_metrics(data: CocoData, results: Any, **options: Any) -> None:
    """Metrics of the held ground truth and of the json are equal to the last bit, in order too."""
    ids = {"image_ids": data.image_ids.tolist(), "category_ids": [c.id for c in data.categories]}
    for iou_type in ("segm", "bbox"):
        held = evaluate(data.ground_truth(), results, iou_type=iou_type, **options)
        read = evaluate(data.annotations, results, iou_type=iou_type, **ids, **options)
        assert held == read
        assert list(held.per_class) == list(read.per_class)


def nasty(seed: int) -> tuple[Content, list[Content]]:
    """A random set with empty masks, wrong or missing areas, and boxes that are missing or differ from the mask."""
    truth, results = random_set(seed)
    for index, row in enumerate(truth["images"]):
        row["file_name"] = f"{index}.png"
    rows = truth["annotations"]
    changes: tuple[Content, ...] = (
        {"area": ...},
        {"area": None},
        {"area": 3001},
        {"bbox": ...},
        {"bbox": None, "iscrowd": None},
        {"bbox": [], "iscrowd": True},
        {"bbox": [1, 2.5, 41, 40], "iscrowd": False},
        {"segmentation": {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}},
        {"segmentation": {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}, "area": ..., "bbox": ...},
        {},
    )
    for index, row in enumerate(rows):
        row.update(changes[index % len(changes)])
        for key in [key for key, value in row.items() if value is ...]:
            del row[key]
    rows.append({"id": 10**6, "image_id": 45, "category_id": 2, "segmentation": [[5, 5, 5, 5, 5, 5]]})
    rows.append({"id": -3, "image_id": 45, "category_id": 0, "segmentation": rectangle(0, 0, 9, 9), "iscrowd": 1})
    return truth, results


@pytest.fixture(params=range(3))
def nasty_set(request, tmp_path) -> tuple[CocoData, list[Content], Path]:
    truth, results = nasty(request.param)
    (tmp_path / "images").mkdir()
    path = write_json(tmp_path, truth)
    return CocoData(path, tmp_path / "images"), results, path


class TestGroundTruth:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("max_detections", [5, 100, 300])
    def test_metrics_are_those_of_the_json(self, nasty_set, backend, max_detections):
        data, results, _ = nasty_set
        assert (data.mask_areas == 0).any()
        same_metrics(data, results, backend=backend, max_detections=max_detections)

    @pytest.mark.parametrize("classes", [["a"], ["c", "a"], ["d", "b", "a"], ["b"]])
    def test_of_some_classes(self, nasty_set, classes):
        whole, results, path = nasty_set
        data = CocoData(path, whole.image_root, classes=classes)
        ids = {c.id for c in data.categories}
        same_metrics(data, [r for r in results if r["category_id"] in ids])

    def test_of_some_images(self, nasty_set):
        """Images without instances are neither known nor scored."""
        whole, results, path = nasty_set
        data = CocoData(path, whole.image_root, keep_empty=False)
        assert len(data) < len(whole)
        kept = set(data.image_ids.tolist())
        same_metrics(data, [r for r in results if r["image_id"] in kept])

    def test_a_box_that_is_wrong_is_told_when_boxes_are_scored(self, tmp_path):
        data = changed_set(tmp_path, lambda c: c["annotations"][1].update(bbox=[1, 2, -3, 4]))
        assert evaluate(data.ground_truth(), []).values["AP"] == 0
        for truth in (data.ground_truth(), data.annotations):
            with pytest.raises(DataError, match=r"annotation 4 \(image 0\): its bbox has a negative width") as caught:
                evaluate(truth, [], iou_type="bbox")
            assert_one_sentence(caught.value)

    def test_annotations_are_those_of_the_json(self, tmp_path):
        data = changed_set(tmp_path, lambda c: None)
        rows = {row["id"]: row for row in data.ground_truth().annotations}
        for row in sound()["annotations"]:
            held = rows[row["id"]]
            for key in ("image_id", "category_id", "iscrowd", "area", "bbox"):
                assert held[key] == row[key], key
        assert len(rows) == 6

    def test_nothing_to_score(self, tmp_path):
        data = changed_set(tmp_path, lambda c: c["annotations"].clear())
        assert data.ground_truth().annotations == []
        assert evaluate(data.ground_truth(), []).values["AP"] is None

    def test_it_is_json(self, nasty_set):
        truth = nasty_set[0].ground_truth()
        assert json.loads(json.dumps(truth.annotations)) == truth.annotations

    @pytest.mark.realdata
    @pytest.mark.parametrize("kind", ["segm", "bbox"])
    def test_of_the_coco_toolkit_example(self, kind, tmp_path):
        folder = reference("data/metrics/coco_fake100")
        data = CocoData(folder / "instances_val2014_100.json", tmp_path)
        results = folder / f"instances_val2014_fake{kind}100_results.json"
        held = evaluate(data.ground_truth(), results, iou_type=kind)
        assert held == evaluate(data.annotations, results, iou_type=kind)
        expected = {"segm": 0.3195452759, "bbox": 0.505}[kind]
        assert held.score == pytest.approx(100 * expected, abs=1e-8 if kind == "segm" else 0.05)

    @pytest.mark.realdata
    def test_of_lvis(self, tmp_path):
        folder = reference("data/metrics/lvis")
        data = CocoData(folder / "lvis_val_100.json", tmp_path)
        same_metrics(data, folder / "synthetic_segm_results.json", max_detections=300)


class TestProtocol:
    def test_coco_data_is_a_data_set(self, tmp_path):
        data: Dataset = changed_set(tmp_path, lambda c: None)
        members = [name for name in vars(Dataset) if not name.startswith("_")]
        assert len(members) == 17
        assert all(hasattr(data, name) for name in members)
        assert isinstance(data.ground_truth(), GroundTruth)


URL = "http://images.cocodataset.org/sub/b.jpg"


def with_url(url: Any) -> Callable[[Content], None]:
    """Image 0 without a name, but with an address."""

    def change(content: Content) -> None:
        del content["images"][1]["file_name"]
        content["images"][1]["coco_url"] = url

    return change


class TestFileNames:
    def test_from_the_last_two_parts_of_the_url(self, tmp_path):
        data = changed_set(tmp_path, with_url(URL))
        assert data.path(1) == data.image_root / "sub" / "b.jpg"
        data.check_files_exist()
        assert data.load(1).size == (30, 20)

    def test_from_the_last_part_if_only_that_is_a_file(self, tmp_path):
        content = sound()
        images = write_images(tmp_path, content)
        (images / "sub" / "b.jpg").rename(images / "b.jpg")
        with_url(URL)(content)
        data = CocoData(write_json(tmp_path, content), images)
        assert data.path(1) == images / "b.jpg"
        (images / "b.jpg").unlink()
        again = CocoData(data.annotations, images)
        assert again.path(1) == images / "sub" / "b.jpg"
        with pytest.raises(DataError, match=r"1 of 4 image files are missing.*sub/b\.jpg"):
            again.check_files_exist()

    @pytest.mark.parametrize(
        ("name", "url", "on_disk", "expected"),
        [
            ("COCO_val2014_000000000009.jpg", "val2017/000000000009.jpg", "sub/b.jpg", "val2017/000000000009.jpg"),
            ("COCO_val2014_000000000009.jpg", "val2017/b.jpg", "b.jpg", "b.jpg"),
            ("COCO_val2014_000000000009.jpg", "sub/b.jpg", "sub/b.jpg", "sub/b.jpg"),
            ("COCO_val2014_000000000009.jpg", "sub/b.jpg", "COCO_val2014_000000000009.jpg", None),
            ("COCO_val2014_000000000009.jpg", "val2014/COCO_val2014_000000000009.jpg", "sub/b.jpg", None),
            ("another.jpg", "sub/b.jpg", "sub/b.jpg", None),
        ],
    )
    def test_names_of_coco_2014_for_images_of_2017(self, tmp_path, name, url, on_disk, expected):
        """As in LVIS v0.5: the address counts, unless the named file exists."""
        content = sound()
        images = write_images(tmp_path, content)
        (images / "sub" / "b.jpg").rename(images / on_disk)
        content["images"][1] |= {"file_name": name, "coco_url": f"http://images.cocodataset.org/{url}"}
        data = CocoData(write_json(tmp_path, content), images)
        assert data.path(1) == images / (expected or name)

    def test_a_given_name_comes_first(self, tmp_path):
        data = changed_set(tmp_path, lambda c: c["images"][1].update(coco_url="http://x/y/z.jpg"))
        assert data.path(1).name == "b.jpg"

    @pytest.mark.parametrize(
        "url",
        ["http://x/a/..", "http://x/../..", "http://x/", "http://x", "", "../../b.jpg/..", "http://x/c:\\b"],
    )
    def test_names_outside_the_folder_are_refused(self, tmp_path, url):
        with pytest.raises(DataError, match="Image 0") as caught:
            changed_set(tmp_path, with_url(url))
        assert_one_sentence(caught.value)

    @pytest.mark.parametrize("url", [None, 3, ["x"], "\udcff/b.jpg"])
    def test_neither_name_nor_url(self, tmp_path, url):
        with pytest.raises(DataError, match=r"Image 0 \(None\).*'file_name'"):
            changed_set(tmp_path, with_url(url))

    def test_climbing_parts_never_leave_the_folder(self, tmp_path):
        (tmp_path / "secret").mkdir()
        Image.fromarray(pixels("x", 30, 20)).save(tmp_path / "secret" / "b.png")
        data = changed_set(tmp_path, with_url("http://x/../../secret/b.png"))
        assert data.path(1) == data.image_root / "secret" / "b.png"

    def test_data_check_follows_the_same_rule(self, tmp_path):
        content = sound()
        images = write_images(tmp_path, content)
        with_url(URL)(content)
        assert check_data(write_json(tmp_path, content), images).problems == ()
        (images / "sub" / "b.jpg").rename(images / "b.jpg")
        assert check_data(tmp_path / "annotations.json", images).problems == ()
        (images / "b.jpg").unlink()
        (problem,) = check_data(tmp_path / "annotations.json", images).problems
        assert problem.kind == "missing file"
        assert "sub/b.jpg is missing" in problem.text

    @pytest.mark.realdata
    def test_of_lvis(self, tmp_path):
        path = reference("data/metrics/lvis/lvis_val_100.json")
        content = json.loads(path.read_text())
        for row in content["images"]:
            row.pop("file_name", None)
        data = CocoData(write_json(tmp_path, content), tmp_path)
        first = content["images"][0]["coco_url"].split("/")
        assert data.path(0) == tmp_path / first[-2] / first[-1]


class TestExtraColumns:
    EXTRAS: ClassVar[Content] = {"coco_url": URL, "neg_category_ids": [5, 90], "not_exhaustive_category_ids": []}

    def test_of_images(self, tmp_path):
        data = changed_set(tmp_path, lambda c: c["images"][1].update(self.EXTRAS, license=3))
        images = data.ground_truth().images
        assert images[0] == {"id": 0, "height": 30, "width": 20, **self.EXTRAS}
        assert images[7] == {"id": 7, "height": 24, "width": 32}

    def test_of_categories(self, tmp_path):
        extras = {"frequency": "r", "isthing": 0, "supercategory": "matter"}
        data = changed_set(tmp_path, lambda c: c["categories"][2].update(extras), classes=["dust", "cell"])
        categories = data.ground_truth().categories
        assert list(categories.items()) == [(5, {"id": 5, "name": "cell"}), (90, {"id": 90, "name": "dust", **extras})]

    def test_only_those_that_training_reads_change_the_checksum(self, tmp_path):
        plain = changed_set(tmp_path, lambda c: None)
        url = changed_set(tmp_path, lambda c: c["images"][1].update(coco_url=URL))
        lists = changed_set(tmp_path, lambda c: c["images"][1].update(neg_category_ids=[5, 90]))
        assert plain.checksum() == url.checksum()
        assert plain.checksum() != lists.checksum()

    @pytest.mark.realdata
    def test_of_lvis(self, tmp_path):
        path = reference("data/metrics/lvis/lvis_val_100.json")
        content = json.loads(path.read_text())
        truth = CocoData(path, tmp_path).ground_truth()
        for row in content["images"]:
            for key in ("neg_category_ids", "not_exhaustive_category_ids", "coco_url"):
                assert truth.images[row["id"]].get(key) == row.get(key)
        for row in content["categories"]:
            assert truth.categories[row["id"]] == row
