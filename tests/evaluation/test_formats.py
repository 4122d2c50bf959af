"""Predictions in the formats of other tools: read again, they are the same masks."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageDraw

from helpers.foreign_sets import pictures, read_back
from helpers.reference import reference
from uniquery.data.coco import CocoData
from uniquery.data.importing import import_data
from uniquery.evaluation.formats import to_geojson, to_labelme, to_yolo
from uniquery.masks import rle
from uniquery.report import predictions
from uniquery.structures import Instances


def instances_of(masks: list[np.ndarray], labels: list[int]) -> Instances:
    rles = [rle.encode(mask) for mask in masks]
    scores = torch.linspace(0.9, 0.6, len(masks))
    size = masks[0].shape[0], masks[0].shape[1]
    boxes = torch.zeros(len(masks), 4)
    return Instances(scores, torch.tensor(labels), boxes, rles, size, classes=("person", "dög"), category_ids=(1, 2))


@pytest.fixture
def found() -> Instances:
    """A ring, two parts, one pixel, and a mask without pixels."""
    masks = [mask for _, mask in pictures()[0].objects]
    return instances_of([*masks, np.zeros_like(masks[0])], [0, 1, 1, 0])


def fill(rings: list, size: tuple[int, int]) -> np.ndarray:
    """Pillow's filling at pixel centers, as an independent reader: the corners are doubled so that centers are odd."""
    total = np.zeros(size, bool)
    for ring in rings:
        picture = Image.new("1", (2 * size[1] + 2, 2 * size[0] + 2))
        ImageDraw.Draw(picture).polygon([(2 * x, 2 * y) for x, y in ring], fill=1)
        total ^= np.asarray(picture)[1 : 2 * size[0] : 2, 1 : 2 * size[1] : 2]
    return total


class TestGeoJson:
    def test_holes_and_parts(self, found):
        content = json.loads(json.dumps(to_geojson(found)))
        assert content["type"] == "FeatureCollection"
        kinds = [(f["geometry"]["type"], f["properties"]["classification"]["name"]) for f in content["features"]]
        assert kinds == [("Polygon", "person"), ("MultiPolygon", "dög"), ("Polygon", "dög")]
        assert content["features"][0]["properties"]["score"] == pytest.approx(0.9)
        assert len(content["features"][0]["geometry"]["coordinates"]) == 2
        for feature, mask in zip(content["features"], found.masks.numpy(), strict=False):
            geometry = feature["geometry"]
            polygons = geometry["coordinates"] if geometry["type"] == "MultiPolygon" else [geometry["coordinates"]]
            rings = [ring for polygon in polygons for ring in polygon]
            assert all(ring[0] == ring[-1] for ring in rings)
            assert np.array_equal(fill(rings, found.size), mask)


class TestLabelme:
    def test_content(self, found):
        content = json.loads(json.dumps(to_labelme(found, "../a.png")))
        about = {key: content[key] for key in ("imagePath", "imageData", "imageHeight", "imageWidth")}
        assert about == {"imagePath": "../a.png", "imageData": None, "imageHeight": 30, "imageWidth": 40}
        shapes = [(s["label"], s["group_id"], s["shape_type"]) for s in content["shapes"]]
        assert shapes == [
            ("person", None, "polygon"),
            ("dög", 2, "polygon"),
            ("dög", 2, "polygon"),
            ("dög", None, "polygon"),
        ]
        assert content["shapes"][0]["description"] == "score 0.900"
        for index, members in enumerate([[0], [1, 2], [3]]):
            polygons = [np.array(content["shapes"][i]["points"]).flatten().tolist() for i in members]
            assert rle.from_polygons(polygons, *found.size) == found.rles[index]


class TestYolo:
    def test_import_reads_the_same_masks(self, found, tmp_path):
        (tmp_path / "set/labels").mkdir(parents=True)
        (tmp_path / "set/images").mkdir()
        Image.fromarray(pictures()[0].pixels).save(tmp_path / "set/images/a.png")
        (tmp_path / "set/labels/a.txt").write_text(to_yolo(found))
        (tmp_path / "set/data.yaml").write_text(yaml.safe_dump({"train": "images", "names": ["person", "dög"]}))
        import_data("yolo", [tmp_path / "set"], tmp_path / "out")
        (picture,) = read_back(tmp_path / "out/annotations.json", tmp_path / "out/images")
        assert [name for name, _ in picture.objects] == ["person", "dög", "dög"]
        for (_, mask), expected in zip(picture.objects, found.masks.numpy(), strict=False):
            assert np.array_equal(mask, expected)

    @pytest.mark.realdata
    def test_real_masks(self):
        """Every mask of some VOC and nuclei images, through text and back, by COCO's own rasterizer."""
        count = 0
        for name in ("voc", "nuclei"):
            images = reference("data", name, "images")
            images = images / "val" if (images / "val").is_dir() else images
            data = CocoData(reference("data", name, "annotations", "val.json"), images)
            for index in range(0, 40, 4):
                height, width = data.sizes[index].tolist()
                masks = [mask for _, mask in data.instances(index)]
                ones, zeros = torch.ones(len(masks)), torch.zeros(len(masks), dtype=torch.int64)
                given = Instances(ones, zeros, torch.zeros(len(masks), 4), masks, (height, width), classes=("a",))
                for line, mask in zip(to_yolo(given).splitlines(), masks, strict=True):
                    values = [float(v) for v in line.split()[1:]]
                    polygon = [v * (height if i % 2 else width) for i, v in enumerate(values)]
                    assert rle.from_polygons([polygon], height, width)["counts"] == mask["counts"]
                    count += 1
        assert count > 200


def test_no_instance():
    empty = instances_of([np.zeros((4, 5))], [0])[:0]
    assert to_yolo(empty) == ""
    assert to_geojson(empty)["features"] == to_labelme(empty, "a.png")["shapes"] == []


def test_files_of_predict(found, tmp_path):
    class Model:
        classes = ("person", "dög")
        categories = ()
        info = SimpleNamespace(bit_depth=None)

        def predict(self, image, **_):
            return found

    Image.fromarray(pictures()[0].pixels).save(tmp_path / "a.png")
    formats = ["yolo", "labelme", "geojson"]
    count = predictions.write_predictions(Model(), [tmp_path / "a.png"], tmp_path / "out", formats=formats)
    assert count == 4
    written = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert written == ["data.yaml", "geojson/a.geojson", "labelme/a.json", "labels/a.txt"]
    assert yaml.safe_load((tmp_path / "out/data.yaml").read_text())["names"] == {0: "person", 1: "dög"}
    shown = json.loads((tmp_path / "out/labelme/a.json").read_text())
    assert (tmp_path / "out/labelme" / Path(shown["imagePath"])).resolve() == (tmp_path / "a.png").resolve()
