"""A data set in the formats of other tools comes back with the same instances, classes and pixels."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.foreign_sets import (
    Picture,
    assert_same,
    of_coco,
    pictures,
    read_back,
    write_cvat,
    write_id_masks,
    write_images,
    write_instance_masks,
    write_label_studio,
    write_voc,
    write_yolo,
)
from helpers.reference import reference
from uniquery.data.check import check_data
from uniquery.data.coco import CocoData
from uniquery.data.importing import import_data


def imported(output: Path) -> list[Picture]:
    assert check_data(output / "annotations.json", output / "images").is_valid
    return read_back(output / "annotations.json", output / "images")


class TestMasksAreExact:
    @pytest.mark.parametrize("write", [write_id_masks, write_instance_masks])
    def test_mask_files(self, tmp_path, write):
        sources = write(tmp_path / "source", pictures())
        report = import_data("masks", sources, tmp_path / "out", class_name="cell")
        assert_same(pictures(), imported(tmp_path / "out"), class_name="cell")
        assert (report.images, report.instances, report.classes) == ({"": 3}, {"": 4}, {"cell": 4})
        assert not report.dropped

    def test_a_folder_per_image(self, tmp_path):
        """The layout of the Data Science Bowl 2018."""
        _, masks = write_instance_masks(tmp_path / "source", pictures())
        for picture in pictures():
            place = tmp_path / "bowl" / Path(picture.name).stem
            write_images(place / "images", [picture])
            (masks / Path(picture.name).stem).rename(place / "masks")
        import_data("masks", [tmp_path / "bowl"], tmp_path / "out")
        assert_same(pictures(), imported(tmp_path / "out"), class_name="object")
        names = [row["file_name"] for row in json.loads((tmp_path / "out/annotations.json").read_text())["images"]]
        assert names == ["a/images/a.png", "b/images/b.png", "empty/images/empty.png"]

    @pytest.mark.parametrize("write", [write_cvat, write_label_studio])
    def test_tools(self, tmp_path, write):
        sources = write(tmp_path / "source", pictures())
        report = import_data(write.__name__[6:].replace("_", "-"), sources, tmp_path / "out")
        assert_same(pictures(), imported(tmp_path / "out"))
        assert (report.images, report.classes) == ({"": 3}, {"person": 2, "dog": 2})
        assert not report.dropped

    def test_voc_with_splits(self, tmp_path):
        source = write_voc(tmp_path / "VOC2012", pictures(), {"train": ["b", "a"], "val": ["empty"]})
        report = import_data("voc", [source], tmp_path / "out")
        assert report.images == {"train": 2, "val": 1}
        assert len(report.classes) == 20
        annotations = tmp_path / "out" / "annotations"
        given = pictures()
        train = read_back(annotations / "instances_train.json", tmp_path / "out/images/train")
        assert_same([given[1], given[0]], train)
        assert_same([given[2]], read_back(annotations / "instances_val.json", tmp_path / "out/images/val"))

    def test_voc_without_lists(self, tmp_path):
        import_data("voc", [write_voc(tmp_path / "VOC2012", pictures())], tmp_path / "out")
        assert_same(pictures(), imported(tmp_path / "out"))


class TestPolygonsStayPolygons:
    def test_yolo(self, tmp_path):
        lines = ["1 0.1 0.2 0.5 0.2 0.5 0.75", "", "0 0 0 1 0 1 1 0 1"]
        file = write_yolo(tmp_path / "set", {"a": lines, "b": []}, ["cell", "debris"], val="images/train")
        report = import_data("yolo", [file], tmp_path / "out")
        content = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())
        assert [row["segmentation"] for row in content["annotations"]] == [
            [[4.0, 4.0, 20.0, 4.0, 20.0, 15.0]],
            [[0.0, 0.0, 40.0, 0.0, 40.0, 20.0, 0.0, 20.0]],
        ]
        assert [row["category_id"] for row in content["annotations"]] == [2, 1]
        assert content["annotations"][1] | {"segmentation": None, "id": 0} == {
            "id": 0, "image_id": 1, "category_id": 1, "segmentation": None, "area": 800, "bbox": [0, 0, 40, 20],
            "iscrowd": 0,
        }  # fmt: skip
        assert report.images == {"train": 2, "val": 2}
        assert report.instances == {"train": 2, "val": 2}

    def test_coordinates_in_hundredths_of_pixels_come_back_exactly(self, tmp_path):
        hundredths = np.random.default_rng(0).integers(0, 2001, (200, 6)).tolist()
        polygons = [[value / 100 for value in polygon] for polygon in hundredths]
        lines = [" ".join(repr(v / (20 if i % 2 else 40)) for i, v in enumerate(polygon)) for polygon in polygons]
        file = write_yolo(tmp_path / "set", {"a": [f"0 {line}" for line in lines]}, ["cell"], val="images/train")
        import_data("yolo", [file], tmp_path / "out")
        content = json.loads((tmp_path / "out/annotations/instances_train.json").read_text())
        found = [row["segmentation"][0] for row in content["annotations"]]
        assert len(found) > 190  # some cover no pixel
        assert all(polygon in polygons for polygon in found)

    def test_cvat(self, tmp_path):
        file, images = write_cvat(tmp_path, pictures()[2:])
        points = "1.50,2.25;10.00,2.25;10.00,9.75"
        polygon = f'<polygon label="dog" source="manual" occluded="0" points="{points}" z_order="0"></polygon>'
        file.write_text(file.read_text().replace("</image>", f"{polygon}</image>"))
        import_data("cvat", [file, images], tmp_path / "out")
        (row,) = json.loads((tmp_path / "out/annotations.json").read_text())["annotations"]
        assert row["segmentation"] == [[1.5, 2.25, 10.0, 2.25, 10.0, 9.75]]

    def test_label_studio(self, tmp_path):
        file, images = write_label_studio(tmp_path, pictures()[2:])
        tasks = json.loads(file.read_text())
        tasks[0]["annotations"][0]["result"] = [
            {
                "id": "LrdPBd3RiH",
                "type": "polygonlabels",
                "original_width": 24,
                "original_height": 20,
                "image_rotation": 0,
                "value": {"points": [[12.5, 10], [50, 10], [50, 75]], "closed": True, "polygonlabels": ["干净"]},
            }
        ]
        file.write_text(json.dumps(tasks))
        report = import_data("label-studio", [file, images], tmp_path / "out")
        (row,) = json.loads((tmp_path / "out/annotations.json").read_text())["annotations"]
        assert row["segmentation"] == [[3.0, 2.0, 12.0, 2.0, 12.0, 15.0]]
        assert report.classes == {"干净": 1}


@pytest.mark.realdata
class TestRealData:
    @pytest.mark.parametrize("write", [write_id_masks, write_instance_masks, write_cvat, write_label_studio])
    def test_nuclei(self, tmp_path, write):
        data = CocoData(reference("data", "nuclei", "annotations", "val.json"), reference("data", "nuclei", "images"))
        given = sorted(of_coco(data, 2), key=lambda picture: picture.name)
        assert sum(len(picture.objects) for picture in given) > 30
        sources = write(tmp_path / "source", given)
        name = "masks" if "masks" in write.__name__ else write.__name__[6:].replace("_", "-")
        import_data(name, sources, tmp_path / "out", class_name="nucleus")
        assert_same(given, imported(tmp_path / "out"), class_name="nucleus" if name == "masks" else None)

    def test_voc(self, tmp_path):
        data = CocoData(reference("data", "voc", "annotations", "val.json"), reference("data", "voc", "images", "val"))
        wanted = of_coco(data, 10)
        import_data("voc", [write_voc(tmp_path / "source", wanted)], tmp_path / "out")
        assert_same(sorted(wanted, key=lambda p: p.name), imported(tmp_path / "out"))


def test_images_are_links_or_copies(tmp_path):
    images, masks = write_id_masks(tmp_path / "source", pictures())
    import_data("masks", [images, masks], tmp_path / "out")
    (images / "a.png").unlink()
    assert np.array_equal(imported(tmp_path / "out")[0].pixels, pictures()[0].pixels)
