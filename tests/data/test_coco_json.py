"""One sentence for everything that can be wrong with a COCO json or its images."""

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.coco_files import (
    Content,
    assert_one_sentence,
    changed_set,
    pixels,
    sound,
    write_images,
    write_json,
    write_set,
)
from uniquery.data.coco import CocoData
from uniquery.data.coco_json import read_json
from uniquery.data.images import MAX_PIXELS
from uniquery.errors import DataError
from uniquery.evaluation.entries import check_annotations, read_ground_truth


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    return write_set(tmp_path)


@pytest.fixture
def data(files) -> CocoData:
    return CocoData(*files)


def set_value(table: str, index: int, **values: Any) -> Callable[[Content], None]:
    return lambda content: content[table][index].update(values)


def drop(table: str, index: int, key: str) -> Callable[[Content], Any]:
    return lambda content: content[table][index].pop(key)


def segmentation(value: Any) -> Callable[[Content], None]:
    """Of annotation 4, on image 0 of 30 × 20 pixels."""
    return set_value("annotations", 1, segmentation=value)


IN_4 = ("Annotation 4 (image 0)",)
WRONG_TABLES: dict[str, tuple[Callable[[Content], Any], tuple[str, ...]]] = {
    "annotation of an unknown image": (
        set_value("annotations", 1, image_id=99),
        ("Annotation 4 (image 99)", "not in 'images'"),
    ),
    "annotation of no image": (drop("annotations", 1, "image_id"), ("Annotation 4 (image None)", "not in 'images'")),
    "image id as text": (set_value("annotations", 1, image_id="0"), ("Annotation 4 (image 0)", "not in 'images'")),
    "image id as a truth": (set_value("annotations", 1, image_id=False), ("Annotation 4", "not in 'images'")),
    "image id as a list": (set_value("annotations", 1, image_id=[0]), ("Annotation 4 (image [0])", "not in 'images'")),
    "unknown category": (set_value("annotations", 1, category_id=91), (*IN_4, "category 91", "not in 'categories'")),
    "no category": (drop("annotations", 1, "category_id"), (*IN_4, "category None")),
    "category as a truth": (set_value("annotations", 1, category_id=False), (*IN_4, "category False")),
    "category as a table": (set_value("annotations", 1, category_id={"id": 5}), (*IN_4, "category {'id': 5}")),
    "annotation id as text": (set_value("annotations", 1, id="4"), (*IN_4, "whole number")),
    "annotation id as a truth": (set_value("annotations", 1, id=True), ("Annotation True (image 0)", "whole number")),
    "annotation id as a fraction": (set_value("annotations", 1, id=4.0), ("Annotation 4.0 (image 0)", "whole number")),
    "annotation id beyond 64 bits": (
        set_value("annotations", 1, id=2**63),
        ("Annotation 9223372036854775808", "64 bits"),
    ),
    "annotation without id": (drop("annotations", 1, "id"), ("Annotation None (image 0)", "'id'")),
    "duplicate annotation": (
        lambda c: c["annotations"].append(c["annotations"][1]),
        ("Annotation id 4 appears 2 times",),
    ),
    "duplicate image": (lambda c: c["images"].append(c["images"][1]), ("Image id 0 appears 2 times",)),
    "duplicate category": (
        lambda c: c["categories"].append({"id": 5, "name": "other"}),
        ("Category id 5 appears 2 times",),
    ),
    "duplicate class": (
        lambda c: c["categories"].append({"id": 6, "name": "cell"}),
        ("2 categories are named 'cell'",),
    ),
    "category id as text": (set_value("categories", 0, id="5"), ("Category 5 (cell)", "whole number")),
    "category id as a truth": (set_value("categories", 0, id=True), ("Category True (cell)", "whole number")),
    "category id as a list": (set_value("categories", 0, id=[5]), ("Category [5] (cell)",)),
    "category without name": (drop("categories", 0, "name"), ("Category 5 (None)", "'name'")),
    "category name as a number": (set_value("categories", 0, name=5), ("Category 5 (5)", "'name'")),
    "category name with half a character": (set_value("categories", 0, name="\ud83d"), ("Category 5 ('\\ud83d')",)),
    "image without id": (drop("images", 1, "id"), ("Image None (sub/b.jpg)", "'id'")),
    "image id as a nested list": (set_value("images", 1, id=[[0]]), ("Image [[0]] (sub/b.jpg)", "'id'")),
    "own image id as text": (set_value("images", 1, id="0"), ("Image 0 (sub/b.jpg)", "whole number")),
    "image id beyond 64 bits": (set_value("images", 1, id=10**30), ("Image 1000000000", "64 bits")),
    "image without file name": (drop("images", 1, "file_name"), ("Image 0 (None)", "'file_name'")),
    "file name as a number": (set_value("images", 1, file_name=3), ("Image 0 (3)", "'file_name'")),
    "file name with half a character": (set_value("images", 1, file_name="\udcff.png"), ("Image 0", "'file_name'")),
    "empty file name": (set_value("images", 1, file_name=""), ("Image 0", "''", "does not name a file inside")),
    "file name is the folder": (set_value("images", 1, file_name="."), ("Image 0", "'.'", "does not name a file")),
    "file name climbs": (
        set_value("images", 1, file_name="../b.jpg"),
        ("Image 0", "'../b.jpg'", "does not name a file"),
    ),
    "file name climbs late": (set_value("images", 1, file_name="a/../../b.jpg"), ("Image 0", "does not name a file")),
    "file name is absolute": (
        set_value("images", 1, file_name="/etc/passwd"),
        ("Image 0", "'/etc/passwd'", "does not name a file"),
    ),
    "file name with NUL": (set_value("images", 1, file_name="b\0.jpg"), ("Image 0", "does not name a file")),
    "file name with a line break": (set_value("images", 1, file_name="b\n.jpg"), ("Image 0", "'b\\n.jpg'")),
    "no width": (drop("images", 1, "width"), ("Image 0 (sub/b.jpg)", "'width'", "not None and 30")),
    "no height": (drop("images", 1, "height"), ("Image 0 (sub/b.jpg)", "'height'", "not 20 and None")),
    "zero width": (set_value("images", 1, width=0), ("Image 0 (sub/b.jpg)", "above 0", "not 0 and 30")),
    "negative height": (set_value("images", 1, height=-30), ("Image 0 (sub/b.jpg)", "above 0")),
    "height as text": (set_value("images", 1, height="30"), ("Image 0 (sub/b.jpg)", "whole numbers")),
    "height as a truth": (set_value("images", 1, height=True), ("Image 0 (sub/b.jpg)", "whole numbers")),
    "height as a fraction": (set_value("images", 1, height=30.5), ("Image 0 (sub/b.jpg)", "whole numbers")),
    "absurd size": (set_value("images", 1, width=10**9, height=10**9), ("Image 0 (sub/b.jpg)", "178,956,970 pixels")),
    "absurd width": (set_value("images", 1, width=10**40), ("Image 0 (sub/b.jpg)", "178,956,970 pixels")),
    "no segmentation": (drop("annotations", 1, "segmentation"), (*IN_4, "missing")),
    "segmentation as text": (segmentation("x"), (*IN_4, "of type str")),
    "no polygon": (segmentation([]), (*IN_4, "no polygon")),
    "two points": (segmentation([[1, 1, 5, 5]]), (*IN_4, "2 points")),
    "odd": (segmentation([[1, 1, 5, 5, 5, 1, 9]]), (*IN_4, "odd number")),
    "nan": (segmentation([[1, 1, 5, 5, 5, float("nan")]]), (*IN_4, "finite")),
    "beyond floats": (segmentation([[1, 1, 5, 5, 5, 10**400]]), (*IN_4, "finite")),
    "nested too deep": (segmentation([[[1, 1], [5, 5], [5, 1]]]), (*IN_4, "finite")),
    "flat": (segmentation([1, 1, 5, 5, 5, 1]), (*IN_4, "list of numbers")),
    "runs of another size": (segmentation({"size": [20, 30], "counts": [600]}), (*IN_4, "[20, 30]", "[30, 20]")),
    "runs of no size": (segmentation({"size": 600, "counts": [600]}), (*IN_4, "600")),
    "too short": (segmentation({"size": [30, 20], "counts": [599]}), (*IN_4, "599 pixels", "600")),
    "too long": (segmentation({"size": [30, 20], "counts": [0, 601]}), (*IN_4, "601 pixels")),
    "negative run": (segmentation({"size": [30, 20], "counts": [601, -1]}), (*IN_4, "whole numbers")),
    "garbage": (segmentation({"size": [30, 20], "counts": "garbage!"}), (*IN_4, "not COCO's")),
    "not ascii": (segmentation({"size": [30, 20], "counts": "é" * 9}), (*IN_4, "not COCO's")),
    "iscrowd as text": (set_value("annotations", 1, iscrowd="0"), (*IN_4, "iscrowd 0", "0 or 1")),
    "iscrowd as a number": (set_value("annotations", 1, iscrowd=2), (*IN_4, "iscrowd 2")),
    "iscrowd as a list": (set_value("annotations", 1, iscrowd=[0]), (*IN_4, "iscrowd [0]")),
    "area below zero": (set_value("annotations", 1, area=-5), (*IN_4, "area -5", "at least 0")),
    "area that is no number": (set_value("annotations", 1, area=float("nan")), (*IN_4, "area nan")),
    "area without end": (set_value("annotations", 1, area=float("inf")), (*IN_4, "area inf")),
    "area beyond floats": (set_value("annotations", 1, area=10**400), (*IN_4, "finite number")),
    "area as text": (set_value("annotations", 1, area="x"), (*IN_4, "area x")),
    "area as a list": (set_value("annotations", 1, area=[1]), (*IN_4, "area [1]")),
    "area as a truth": (set_value("annotations", 1, area=True), (*IN_4, "area True")),
}


class TestWrongTables:
    @pytest.mark.parametrize(("change", "says"), WRONG_TABLES.values(), ids=WRONG_TABLES.keys())
    def test_is_one_sentence_that_says_where(self, tmp_path, change, says):
        start = time.process_time()
        with pytest.raises(DataError) as caught:
            changed_set(tmp_path, change)
        assert time.process_time() - start < 2
        assert_one_sentence(caught.value)
        for part in ("annotations.json", *says):
            assert part in str(caught.value)

    def test_of_several_problems_the_first_is_told_and_the_others_counted(self, tmp_path):
        def change(content):
            for annotation in content["annotations"][:3]:
                annotation["category_id"] = 77

        with pytest.raises(DataError, match=r"Annotation 100 .*2 more problems; see: uniquery data check") as caught:
            changed_set(tmp_path, change)
        assert_one_sentence(caught.value)

    @pytest.mark.parametrize("change", [drop("annotations", 1, "area"), set_value("annotations", 1, area=None)])
    def test_an_area_that_is_left_out_is_the_masks(self, tmp_path, change):
        data = changed_set(tmp_path, change)
        (counted,) = (
            row
            for row in check_annotations(read_ground_truth(data.annotations), "segm", [0])
            if row["category_id"] == 90
        )
        assert counted["area"] == 100

    def test_the_largest_size_that_is_not_absurd(self, tmp_path):
        data = changed_set(tmp_path, set_value("images", 2, width=MAX_PIXELS, height=1))
        assert data.sizes[2].tolist() == [1, MAX_PIXELS]

    def test_long_values_are_not_told_whole(self, tmp_path):
        with pytest.raises(DataError) as caught:
            changed_set(tmp_path, set_value("images", 1, file_name=["x" * 10**6]))
        assert_one_sentence(caught.value)


WRONG_FILES = {
    "empty": (b"", "not valid json"),
    "cut off": (json.dumps(sound()).encode()[:300], "not valid json"),
    "not utf-8": (json.dumps(sound()).encode().replace(b"cell", b"\xff\xfe"), "not valid json"),
    "binary": (bytes(range(256)), "not valid json"),
    "a list": (b"[1, 2]", "holds a list"),
    "a number": (b"3", "holds a int"),
    "null": (b"null", "holds a NoneType"),
    "too deep": (b"[" * 10**5, "not valid json"),
    "a number without end": (b'{"images": [' + b"9" * 10**4 + b"]}", "not valid json"),
    "no images": (json.dumps({**sound(), "images": []}).encode(), "lists no images"),
    "images left out": (b'{"categories": [{"id": 1, "name": "a"}]}', "lists no images"),
    "no categories": (json.dumps({**sound(), "categories": []}).encode(), "no 'categories'"),
    "no annotations": (
        json.dumps({k: v for k, v in sound().items() if k != "annotations"}).encode(),
        "has no 'annotations'",
    ),
    "images is a table": (b'{"images": {"id": 1}}', "'images' must be a list"),
    "annotations is null": (b'{"annotations": null}', "'annotations' must be a list"),
    "a row is a list": (b'{"images": [[1]]}', "every entry of 'images'"),
    "a row is null": (b'{"annotations": [null]}', "every entry of 'annotations'"),
}


class TestWrongFiles:
    @pytest.mark.parametrize(("content", "says"), WRONG_FILES.values(), ids=WRONG_FILES.keys())
    def test_json(self, files, content, says):
        files[0].write_bytes(content)
        with pytest.raises(DataError) as caught:
            CocoData(*files)
        assert_one_sentence(caught.value)
        assert says in str(caught.value)
        assert str(files[0]) in str(caught.value)

    def test_json_that_is_not_there(self, files, tmp_path):
        for path, says in (
            (tmp_path / "none.json", "not found"),
            (tmp_path, "is a folder"),
            (files[0] / "below.json", "cannot be read"),
            (tmp_path / ("a" * 300), "cannot be read"),
        ):
            with pytest.raises(DataError, match=says) as caught:
                CocoData(path, files[1])
            assert_one_sentence(caught.value)
            assert str(path) in str(caught.value)

    def test_json_without_permission(self, files, monkeypatch):
        def refuse(self):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(DataError, match="cannot be read: Permission denied"):
            read_json(files[0])

    def test_no_image_folder(self, files):
        for folder in (files[1] / "nowhere", files[0]):
            with pytest.raises(DataError, match="Image folder not found") as caught:
                CocoData(files[0], folder)
            assert_one_sentence(caught.value)

    def test_missing_images_are_found_early(self, data):
        data.check_files_exist()
        data.path(1).unlink()
        data.path(2).unlink()
        with pytest.raises(
            DataError, match=r"2 of 4 image files are missing.*b\.jpg \(image 0, annotation 4\)"
        ) as caught:
            data.check_files_exist()
        assert_one_sentence(caught.value)
        with pytest.raises(DataError, match=r"not found: .*b\.jpg \(image 0, annotation 4\)\.$") as caught:
            data.load(1)
        assert_one_sentence(caught.value)
        with pytest.raises(DataError, match=r"\(image 11, no annotations\)\.$"):
            data.load(2)

    def test_a_name_that_the_system_refuses_is_missing(self, tmp_path):
        data = changed_set(tmp_path, set_value("images", 1, file_name="b" * 300))
        with pytest.raises(DataError, match="1 of 4 image files are missing"):
            data.check_files_exist()
        with pytest.raises(DataError, match="image 0, annotation 4") as caught:
            data.load(1)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("damage", ["cut off", "not an image", "empty", "a folder"])
    def test_broken_images(self, data, damage):
        path = data.path(0)
        content = {"cut off": path.read_bytes()[:200], "not an image": b"hello", "empty": b""}.get(damage)
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        with pytest.raises(
            DataError, match=r"a\.png is not a readable image: .* \(image 7, annotation 100\)\.$"
        ) as caught:
            data.load(0)
        assert_one_sentence(caught.value)

    def test_images_of_another_size(self, tmp_path):
        content = sound()
        images = write_images(tmp_path, content)
        Image.fromarray(pixels("x", 20, 30)).save(images / "sub/b.jpg")
        data = CocoData(write_json(tmp_path, content), images)
        message = r"b\.jpg is 30×20 after EXIF rotation, but the annotations say 20×30 \(image 0, annotation 4\)"
        with pytest.raises(DataError, match=message) as caught:
            data.load(1)
        assert_one_sentence(caught.value)
