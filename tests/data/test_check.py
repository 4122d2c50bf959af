"""The data check: finds each kind of problem, counts right, and says that valid data is valid."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from helpers.coco_files import Content, assert_one_sentence, pixels, sound, write_images, write_json, write_set
from uniquery.data.check import AREA_LIMITS, COUNT_LIMITS, DataReport, check_data
from uniquery.data.coco import CocoData
from uniquery.errors import DataError


def report_of(tmp_path: Path, change: Callable[[Content, Path], Any], **options: Any) -> DataReport:
    """The check of a sound set after its json and its images are changed."""
    content = sound()
    images = write_images(tmp_path, content)
    change(content, images)
    return check_data(write_json(tmp_path, content), images, **options)


def kinds(report: DataReport) -> dict[str, int]:
    return dict(Counter(problem.kind for problem in report.problems))


def update(table: str, index: int, **values: Any) -> Callable[[Content, Path], None]:
    return lambda content, _: content[table][index].update(values)


class TestSound:
    @pytest.mark.parametrize("read_pixels", [True, False])
    def test_report(self, tmp_path, read_pixels):
        report = check_data(*write_set(tmp_path), read_pixels=read_pixels)
        assert report.is_valid
        assert report.problems == ()
        assert (report.images, report.instances, report.crowd, report.max_instances) == (4, 4, 2, 2)
        assert report.classes == {"cell": 2, "debris": 1, "dust": 1}
        assert report.counts == {"0": 2, "1–10": 2, "11–50": 0, "51–100": 0, "101–300": 0, "more": 0}
        assert sum(report.areas.values()) == 4

    def test_progress(self, tmp_path):
        seen: list[tuple[int, int]] = []
        check_data(*write_set(tmp_path), progress=lambda *step: seen.append(step))
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_warnings_alone_are_sound(self, tmp_path):
        def change(content, _):
            content["annotations"][0]["segmentation"] = [[5, 5, 5, 5, 5, 5]]
            content["annotations"][5]["segmentation"] = [[-40, 3, 12, 3, 12, 13]]

        report = report_of(tmp_path, change)
        assert kinds(report) == {"empty mask": 1, "outside": 1}
        assert report.is_valid
        assert report.instances == 4
        assert sum(report.areas.values()) == 3  # the empty one has no size

    def test_a_file_of_several_images_is_a_warning(self, tmp_path):
        report = report_of(tmp_path, lambda c, _: c["images"].append({**c["images"][0], "id": 70}))
        assert kinds(report) == {"shared file": 1}
        assert report.is_valid
        assert_one_sentence(report.problems[0].text)


class TestHistograms:
    def content(self, boxes: list[tuple[int, int]], per_image: list[int]) -> Content:
        """Images of 100 × 100 with as many instances each; boxes are their heights and widths, in turn."""
        annotations = []
        for image, count in enumerate(per_image):
            for _ in range(count):
                height, width = boxes[len(annotations) % len(boxes)]
                mask = [[0, 0, width, 0, width, height, 0, height]]
                row = {"id": len(annotations), "image_id": image, "category_id": len(annotations) % 2, "iscrowd": 0}
                annotations.append({**row, "segmentation": mask})
        images = [{"id": i, "file_name": f"{i}.png", "height": 100, "width": 100} for i in range(len(per_image))]
        categories = [{"id": i, "name": name} for i, name in enumerate("abc")]
        return {"images": images, "annotations": annotations, "categories": categories}

    def test_areas_at_their_limits(self, tmp_path):
        boxes = [(7, 9), (8, 8), (31, 33), (32, 32), (95, 97), (96, 96), (100, 100)]
        report = check_data(*write_set(tmp_path, self.content(boxes, [7])))
        assert report.areas == dict(zip(AREA_LIMITS, (1, 2, 2, 2), strict=True))
        assert report.classes == {"a": 4, "b": 3, "c": 0}

    def test_instances_per_image_at_their_limits(self, tmp_path):
        report = check_data(*write_set(tmp_path, self.content([(3, 3)], [0, 1, 10, 11, 50, 51, 100, 101, 300, 301])))
        assert report.counts == dict(zip(COUNT_LIMITS, (1, 2, 2, 2, 2, 1), strict=True))
        assert report.max_instances == 301
        assert report.instances == sum([1, 10, 11, 50, 51, 100, 101, 300, 301])

    def test_strays_are_not_counted_as_images(self, tmp_path):
        report = report_of(tmp_path, update("annotations", 0, image_id=99, category_id=99))
        assert sum(report.counts.values()) == report.images == 4
        assert report.classes == {"cell": 1, "debris": 1, "dust": 1, "unknown": 1}
        assert report.instances == 4


ONE_PROBLEM = {
    "unknown image": (update("annotations", 0, image_id=99), "unknown image", "Annotation 100"),
    "unknown image, unhashable": (update("annotations", 0, image_id=[7]), "unknown image", "Annotation 100"),
    "unknown category": (update("annotations", 0, category_id=99), "unknown category", "category 99"),
    "unknown category, unhashable": (update("annotations", 0, category_id={}), "unknown category", "category {}"),
    "annotation id": (update("annotations", 0, id="100"), "annotation id", "Annotation 100"),
    "annotation id, unhashable": (update("annotations", 0, id=[100]), "annotation id", "Annotation [100]"),
    "two annotations": (update("annotations", 0, id=4), "duplicate id", "Annotation id 4"),
    "two images": (lambda c, _: c["images"].append(c["images"][0]), "duplicate id", "Image id 7"),
    "two classes": (lambda c, _: c["categories"].append({"id": 5, "name": "x"}), "duplicate id", "Category id 5"),
    "two names": (lambda c, _: c["categories"].append({"id": 6, "name": "cell"}), "duplicate name", "'cell'"),
    "category": (lambda c, _: c["categories"].append({"id": [6], "name": "x"}), "category", "Category [6] (x)"),
    "iscrowd": (update("annotations", 0, iscrowd="yes"), "iscrowd", "iscrowd yes"),
    "segmentation": (update("annotations", 0, segmentation=[[1, 2, 3, 4]]), "segmentation", "Annotation 100 (image 7)"),
    "no width": (update("images", 2, width=None), "image entry", "Image 11"),
    "absurd": (update("images", 2, width=10**9, height=10**9), "image entry", "Image 11"),
    "no file name": (update("images", 2, file_name=None), "image entry", "Image 11"),
    "image without id": (lambda c, _: c["images"][2].pop("id"), "image entry", "Image None (nothing.png)"),
    "image id, unhashable": (update("images", 2, id={}), "image entry", "Image {} (nothing.png)"),
    "outside the folder": (update("images", 2, file_name="../annotations.json"), "file name", "Image 11"),
    "the folder": (update("images", 2, file_name="sub/.."), "file name", "Image 11"),
    "missing": (lambda _, images: (images / "a.png").unlink(), "missing file", "a.png"),
    "missing, a long name": (update("images", 2, file_name="a" * 300), "missing file", "Image 11"),
    "empty": (lambda _, images: (images / "a.png").write_bytes(b""), "unreadable file", "a.png"),
    "not an image": (lambda _, images: (images / "a.png").write_text("hello"), "unreadable file", "a.png"),
    "other size": (
        update("images", 2, width=17),
        "size mismatch",
        "nothing.png is 18×16 after EXIF rotation, the json says 17×16.",
    ),
    "no annotations": (lambda c, _: c.pop("annotations"), "no annotations", "annotations.json has no 'annotations'"),
}


class TestMistakesOfTheTool:
    """What is wrong with all masks alike stops training, and the check says it once."""

    def normalized(self, content, _):
        sizes = {row["id"]: (row["width"], row["height"]) for row in content["images"]}
        content["annotations"] = [row for row in content["annotations"] if isinstance(row["segmentation"], list)]
        for row in content["annotations"]:
            width, height = sizes[row["image_id"]]
            row["segmentation"] = [
                [value / (height if i % 2 else width) for i, value in enumerate(part)] for part in row["segmentation"]
            ]

    def test_normalized_polygons(self, tmp_path):
        report = report_of(tmp_path, self.normalized)
        (problem,) = [p for p in report.problems if p.fatal]
        assert problem.kind == "normalized polygons"
        assert_one_sentence(problem.text)
        assert "All 2 polygons lie in 0 to 1" in problem.text
        assert not report.is_valid
        with pytest.raises(DataError, match="as fractions of the image: multiply x by its width"):
            CocoData(tmp_path / "annotations.json", tmp_path / "images")

    def test_one_polygon_in_pixels_shows_that_they_are_not(self, tmp_path):
        def change(content, images):
            self.normalized(content, images)
            content["annotations"][0]["segmentation"] = [[1, 1, 9, 1, 9, 7, 1, 7]]

        assert report_of(tmp_path, change).is_valid

    @pytest.mark.parametrize("empty", [[[5, 5, 5, 5, 5, 5]], None])
    def test_all_masks_empty(self, tmp_path, empty):
        def change(content, _):
            sizes = {row["id"]: [row["height"], row["width"]] for row in content["images"]}
            for row in content["annotations"]:
                size = sizes[row["image_id"]]
                row["segmentation"] = empty or {"size": size, "counts": [size[0] * size[1]]}

        report = report_of(tmp_path, change)
        (problem,) = [p for p in report.problems if p.fatal]
        assert problem.text == "All 6 masks are empty: there is nothing to learn from."
        with pytest.raises(DataError, match="masks are empty"):
            CocoData(tmp_path / "annotations.json", tmp_path / "images")

    def test_no_annotations_at_all_are_a_set_of_negatives(self, tmp_path):
        assert report_of(tmp_path, lambda content, _: content["annotations"].clear()).is_valid


class TestHints:
    def test_images_in_another_folder(self, tmp_path):
        path, images = write_set(tmp_path)
        (tmp_path / "deep").mkdir()
        moved = images.rename(tmp_path / "deep" / "images")
        for given, near in (
            (tmp_path, None),  # two below, beside others
            (tmp_path / "deep", moved),
            (moved / "sub", moved),
        ):
            report = check_data(path, given)
            (hint,) = [problem for problem in report.problems if problem.kind == "image folder"]
            assert f"but in {near or moved}: give that folder." in hint.text
            assert not report.is_valid
            with pytest.raises(DataError, match=f"It is in {near or moved}: give that folder"):
                CocoData(path, given).check_files_exist()

    def test_no_hint_where_nothing_is_found(self, tmp_path):
        path, images = write_set(tmp_path)
        (images / "a.png").unlink()
        report = check_data(path, images)
        assert kinds(report) == {"missing file": 1}

    def test_absolute_names_and_back_slashes_are_read(self, tmp_path):
        def change(content, images):
            for row in content["images"][::2]:
                row["file_name"] = str(images / row["file_name"])
            content["images"][1]["file_name"] = content["images"][1]["file_name"].replace("/", "\\")

        assert report_of(tmp_path, change).is_valid
        assert CocoData(tmp_path / "annotations.json", tmp_path / "images").read(1).shape == (30, 20, 3)

    @pytest.mark.parametrize("table", ["images", "categories", "annotations"])
    @pytest.mark.parametrize(
        ("given", "hint"), [("5", "write numbers without quotes."), ("img-5", "number them, here")]
    )
    def test_ids_in_quotes_are_explained(self, tmp_path, table, given, hint):
        report = report_of(tmp_path, lambda content, _: content[table][0].update(id=given))
        assert any(f"'{given}' is a text: {hint}" in p.text for p in report.problems)
        assert all(p.text.isprintable() for p in report.problems)

    @pytest.mark.parametrize(("largest", "is_warned"), [(4095, True), (200, False), (40000, False)])
    def test_sixteen_bits_of_which_few_are_used(self, tmp_path, largest, is_warned):
        def change(_content, images):
            values = np.linspace(0, largest, 16 * 18).reshape(16, 18).astype(np.uint16)
            Image.fromarray(values).save(images / "nothing.png")

        report = report_of(tmp_path, change)
        assert report.is_valid
        assert kinds(report) == ({"bits": 1} if is_warned else {})
        if is_warned:
            assert_one_sentence(report.problems[0].text)
            assert "reach only 4095 of 65535" in report.problems[0].text


class TestProblems:
    @pytest.mark.parametrize("read_pixels", [True, False], ids=["pixels", "headers"])
    @pytest.mark.parametrize(("change", "kind", "says"), ONE_PROBLEM.values(), ids=ONE_PROBLEM.keys())
    def test_each_is_found_once(self, tmp_path, change, kind, says, read_pixels):
        report = report_of(tmp_path, change, read_pixels=read_pixels)
        assert kinds(report) == {kind: 1}
        assert not report.is_valid
        assert says in report.problems[0].text
        assert_one_sentence(report.problems[0].text)

    def test_truncated_files_are_found_by_reading_pixels(self, tmp_path):
        def change(_content, images):
            whole = (images / "a.png").read_bytes()
            (images / "a.png").write_bytes(whole[: len(whole) * 3 // 4])

        assert kinds(report_of(tmp_path, change)) == {"unreadable file": 1}
        assert report_of(tmp_path, change, read_pixels=False).is_valid

    @pytest.mark.parametrize("read_pixels", [True, False])
    @pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
    def test_exif_orientation(self, tmp_path, suffix, read_pixels):
        def change(content, images):
            content["images"][2]["file_name"] = f"turned.{suffix}"
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = 6
            Image.fromarray(pixels("x", 16, 18)).save(images / f"turned.{suffix}", exif=exif)

        (problem,) = report_of(tmp_path, change, read_pixels=read_pixels).problems
        assert problem.kind == "size mismatch"
        sizes = "is 16×18 after EXIF rotation, the json says 18×16"
        assert f"{sizes}: width and height are swapped (EXIF orientation?)." in problem.text

        def turn(content, images):
            change(content, images)
            content["images"][2].update(height=18, width=16)

        assert report_of(tmp_path, turn, read_pixels=read_pixels).is_valid

    def test_all_are_counted(self, tmp_path):
        def change(content, images):
            for annotation in content["annotations"]:
                annotation["segmentation"] = "x"
            (images / "a.png").unlink()
            (images / "crowd.png").unlink()
            (images / "nothing.png").write_bytes(b"")
            content["categories"].append({"id": 0, "name": "cell"})

        report = report_of(tmp_path, change)
        expected = {"segmentation": 6, "missing file": 2, "unreadable file": 1, "duplicate id": 1, "duplicate name": 1}
        assert kinds(report) == expected
        assert report.areas == dict.fromkeys(AREA_LIMITS, 0)

    def test_a_bomb_is_not_opened(self, tmp_path):
        def change(_content, images):
            image = np.zeros((16, 18), np.uint8)
            Image.fromarray(image).save(images / "nothing.png")
            whole = bytearray((images / "nothing.png").read_bytes())
            whole[16:24] = (10**5).to_bytes(4, "big") * 2  # width and height; the checksum is not looked at
            (images / "nothing.png").write_bytes(whole)

        for read_pixels in (True, False):
            (problem,) = report_of(tmp_path, change, read_pixels=read_pixels).problems
            assert problem.kind == "unreadable file"

    def test_what_cannot_be_checked_at_all(self, tmp_path):
        path, images = write_set(tmp_path)
        for wrong in ((tmp_path / "none.json", images), (path, tmp_path / "none"), (images, images)):
            with pytest.raises(DataError) as caught:
                check_data(*wrong)
            assert_one_sentence(caught.value)
