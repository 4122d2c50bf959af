"""What cannot be imported is left out, with its reason; what is hostile is refused, and nothing is written."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from helpers.coco_files import assert_one_sentence
from helpers.foreign_sets import (
    brush_result,
    label_studio_task,
    pictures,
    write_cvat,
    write_id_masks,
    write_images,
    write_instance_masks,
    write_label_studio,
    write_voc,
    write_yolo,
)
from uniquery.data.importing import import_data
from uniquery.errors import UserError

GOOD = "0 0.1 0.1 0.9 0.1 0.9 0.9"


def reasons(report) -> dict[str, int]:
    return {reason: len(places) for reason, places in report.dropped.items()}


def refused(name: str, sources: list[Path], output: Path) -> str:
    """The sentence of an import that fails; nothing is written."""
    with pytest.raises(UserError) as caught:
        import_data(name, sources, output)
    assert_one_sentence(caught.value)
    assert not list(output.parent.glob(f"*{output.name}*"))
    return str(caught.value)


class TestYolo:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("0 0.5 0.5 0.2 0.2", "box, which has no outline"),
            ("7 0.1 0.1 0.9 0.1 0.9 0.9", "class number that data.yaml does not name"),
            ("-1 0.1 0.1 0.9 0.1 0.9 0.9", "class number that data.yaml does not name"),
            ("cell 0.1 0.1 0.9 0.1 0.9 0.9", "line that is not 'class x y x y …'"),
            ("0 0.1 0.1 0.9 0.1 0.9 0.9 0.5", "line that is not 'class x y x y …' with at least three points"),
            ("0 4 4 20 4 20 15", "coordinates outside 0 to 1: YOLO has them in fractions of the image"),
            ("0 nan 0.1 0.9 0.1 0.9 0.9", "coordinates outside 0 to 1: YOLO has them in fractions of the image"),
            ("0 0.5 0.5 0.5 0.5 0.5 0.5", "instance without a pixel inside its image"),
        ],
    )
    def test_lines(self, tmp_path, line, reason):
        file = write_yolo(tmp_path / "set", {"a": [GOOD, line]}, ["cell"])
        report = import_data("yolo", [file], tmp_path / "out")
        assert report.instances == {"": 1}
        assert reasons(report) == {reason: 1}
        assert report.dropped[reason] == [f"{tmp_path / 'set/labels/train/a.txt'}, line 2"]

    def test_images_without_labels_are_negatives(self, tmp_path):
        file = write_yolo(tmp_path / "set", {"a": [GOOD], "b": [GOOD]}, {0: "cell", 1: "dust"})
        (tmp_path / "set/labels/train/b.txt").unlink()
        report = import_data("yolo", [tmp_path / "set"], tmp_path / "out")
        assert (report.images, report.classes) == ({"": 2}, {"cell": 1, "dust": 0})
        assert list(report.notes) == ["image without a label file, kept as a negative"]
        assert file.is_file()

    def test_roboflow_writes_one_folder_too_many_and_lists_work(self, tmp_path):
        folder = tmp_path / "set"
        file = write_yolo(folder, {"a": [GOOD], "b": [GOOD]}, ["cell"], train="../images/train", val="val.txt", nc=1)
        (folder / "val.txt").write_text("./images/train/b.png\n\nimages/train/none.png\n")
        report = import_data("yolo", [file], tmp_path / "out")
        assert report.images == {"train": 2, "val": 1}
        assert reasons(report) == {"image file that is missing": 1}

    def test_another_root(self, tmp_path):
        file = write_yolo(tmp_path / "set", {"a": [GOOD]}, ["cell"])
        moved = file.rename(tmp_path / "data.yaml")
        assert import_data("yolo", [moved, tmp_path / "set"], tmp_path / "out").images == {"": 1}
        moved.write_text(yaml.safe_dump({"path": "set", "train": "images/train", "names": ["cell"]}))
        assert import_data("yolo", [moved], tmp_path / "out2").images == {"": 1}

    @pytest.mark.parametrize(
        "changes",
        [
            {"train": "../../etc"},
            {"train": "/etc"},
            {"train": ["images/train", "a/../../.."]},
            {"train": 3},
            {"train": None},
            {"train": "a\0b"},
            {"train": "a" * 5000},
            {"path": "/etc", "train": "nowhere"},
            {"path": "../..", "train": "nowhere"},
            {"names": None},
            {"names": {1: "cell"}},
            {"names": ["cell", "cell"]},
            {"names": []},
        ],
    )
    def test_bad_yaml(self, tmp_path, changes):
        file = write_yolo(tmp_path / "set", {"a": [GOOD]}, ["cell"])
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))
        refused("yolo", [file], tmp_path / "out")

    @pytest.mark.parametrize("content", [b"", b"[", b"3", b"\xff\xfe\x00", b"!!python/object:os.system {}", b"a: *b"])
    def test_not_a_yaml(self, tmp_path, content):
        (tmp_path / "data.yaml").write_bytes(content)
        refused("yolo", [tmp_path / "data.yaml"], tmp_path / "out")

    @pytest.mark.parametrize("key", ["train", "names"])
    def test_aliases_that_stand_for_a_billion_names(self, tmp_path, key):
        lines = ["l0: &l0 [cell]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 11))]
        (tmp_path / "data.yaml").write_text("\n".join([*lines, "train: images", "names: [cell]", f"{key}: *l10"]))
        assert "aliases" in refused("yolo", [tmp_path / "data.yaml"], tmp_path / "out")

    def test_a_list_that_leads_outside(self, tmp_path):
        file = write_yolo(tmp_path / "set", {"a": [GOOD]}, ["cell"], val="val.txt")
        (tmp_path / "set/val.txt").write_text("../../secret.png\n")
        assert "inside" in refused("yolo", [file], tmp_path / "out")

    def test_boxes_only(self, tmp_path):
        file = write_yolo(tmp_path / "set", {"a": ["0 0.5 0.5 0.2 0.2"] * 3}, ["cell"])
        assert "3 × box" in refused("yolo", [file], tmp_path / "out")


class TestMaskFiles:
    def test_sizes_and_values(self, tmp_path):
        images, masks = write_instance_masks(tmp_path / "source", pictures())
        Image.fromarray(np.ones((5, 5), np.uint8)).save(masks / "a" / "small.png")
        Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40)).save(masks / "a" / "many.png")
        (masks / "a" / "broken.png").write_bytes(b"\x89PNG")
        report = import_data("masks", [images, masks], tmp_path / "out")
        assert reasons(report) == {
            "mask file that cannot be read": 1,
            "mask of one instance with several values beside 0": 1,
            "mask of another size than its image": 1,
        }
        assert report.instances == {"": 4}

    def test_colors_and_one_value(self, tmp_path):
        """Two colors that differ in blue only are two instances; a mask of 255 is one, which is noted."""
        colors = np.zeros((20, 24, 3), np.uint8)
        colors[2:5, 2:5], colors[8:12, 3:9] = (10, 20, 30), (10, 20, 31)
        images, masks = write_images(tmp_path / "images", pictures()[1:]), tmp_path / "masks"
        masks.mkdir()
        Image.fromarray(colors).save(masks / "empty.png")
        Image.fromarray(np.full((30, 40), 255, np.uint8)).save(masks / "b.png")
        report = import_data("masks", [images, masks], tmp_path / "out")
        assert report.instances == {"": 3}
        assert report.notes == {"mask with one value: all of it is one instance": [str(masks / "b.png")]}

    def test_unreadable_images_and_images_without_masks(self, tmp_path):
        images, masks = write_id_masks(tmp_path / "source", pictures())
        (images / "b.png").write_bytes(b"no image")
        (masks / "empty.png").unlink()
        report = import_data("masks", [images, masks], tmp_path / "out")
        assert (report.images, report.instances) == ({"": 2}, {"": 3})
        assert list(report.dropped) == ["image that cannot be read"]
        assert list(report.notes) == ["image without masks, kept as a negative"]

    def test_two_kinds_of_masks(self, tmp_path):
        images, masks = write_id_masks(tmp_path / "source", pictures())
        (masks / "a").mkdir()
        assert "same image" in refused("masks", [images, masks], tmp_path / "out")

    def test_nothing_fits(self, tmp_path):
        images, _ = write_id_masks(tmp_path / "source", pictures())
        (tmp_path / "none").mkdir()
        refused("masks", [images, tmp_path / "none"], tmp_path / "out")
        refused("masks", [tmp_path / "none"], tmp_path / "out")


class TestVoc:
    def test_no_class_several_classes_no_mask(self, tmp_path):
        source = write_voc(tmp_path / "voc", pictures(), {"train": ["a", "b", "none", "x" * 5000]})
        for name, change in (("a", lambda c: np.where(c == 12, 77, c)), ("b", lambda c: np.where(c == 15, c - 1, c))):
            file = source / "SegmentationClass" / f"{name}.png"
            values = np.asarray(Image.open(file)).copy()
            changed = change(values)
            if name == "b":
                changed[:3] = values[:3]  # the smaller part keeps its class
            Image.fromarray(changed.astype(np.uint8)).save(file)
        report = import_data("voc", [source], tmp_path / "out")
        assert reasons(report) == {
            "object without a class in SegmentationClass": 2,
            "image without masks in SegmentationObject and SegmentationClass": 2,
        }
        assert {name: n for name, n in report.classes.items() if n} == {"person": 1, "motorbike": 1}
        assert list(report.notes) == ["object with pixels of several classes, which gets the most frequent one"]

    @pytest.mark.parametrize("is_palette", [True, False])
    def test_a_label_map_names_colors(self, tmp_path, is_palette):
        source = write_voc(tmp_path / "voc", pictures())
        (source / "labelmap.txt").write_text(
            "# label:color_rgb:parts:actions\nbackground:0,0,0::\nhuman:192,128,128::\nhound:64,0,128::\n"
        )
        if not is_palette:
            for file in source.glob("Segmentation*/*.png"):
                Image.open(file).convert("RGB").save(file)
        report = import_data("voc", [source], tmp_path / "out")
        assert report.classes == {"human": 2, "hound": 2}
        assert not report.dropped

    def test_bad_label_map(self, tmp_path):
        source = write_voc(tmp_path / "voc", pictures())
        (source / "labelmap.txt").write_text("cell:red::\n")
        refused("voc", [source], tmp_path / "out")

    def test_not_voc(self, tmp_path):
        assert "SegmentationClass" in refused("voc", [tmp_path], tmp_path / "out")

    def test_names_that_lead_outside(self, tmp_path):
        source = write_voc(tmp_path / "voc", pictures(), {"train": ["../../../etc/passwd"]})
        refused("voc", [source], tmp_path / "out")


class TestCvat:
    def changed(self, tmp_path: Path, old: str, new: str) -> list[Path]:
        file, images = write_cvat(tmp_path / "source", pictures())
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        return [file, images]

    @pytest.mark.parametrize(
        ("shape", "reason"),
        [
            ('<box label="dog" xtl="1" ytl="1" xbr="5" ybr="5"/>', "box, which has no outline"),
            ('<polyline label="dog" points="1,1;5,5"/>', "polyline, which has no outline"),
            ('<polygon label="dog" points="1,1;5"/>', "polygon that is not valid: its points are not x,y;x,y;…"),
            ('<polygon label="dog"/>', "polygon that is not valid: 'points' is missing"),
            (
                '<polygon label="dog" points="1,1;5,5"/>',
                "instance that is not valid: a polygon has 2 points and needs at least 3",
            ),
            ('<polygon points="1,1;5,5;1,5"/>', "shape without a label"),
            (
                '<mask label="dog" rle="1" left="0" top="0" width="900000000" height="900000000"/>',
                "mask that is not valid: its box leaves the image",
            ),
            (
                '<mask label="dog" rle="2,99999999999" left="0" top="0" width="4" height="4"/>',
                "mask that is not valid: its runs are negative, or more than the pixels of its box",
            ),
            (
                '<mask label="dog" rle="" left="0" top="0" width="4" height="4"/>',
                "mask that is not valid: invalid literal for int() with base 10: ''",
            ),
        ],
    )
    def test_shapes(self, tmp_path, shape, reason):
        report = import_data("cvat", self.changed(tmp_path, "</image>", f"{shape}</image>"), tmp_path / "out")
        assert reasons(report) == {reason: 1}
        assert report.instances == {"": 4}

    def test_groups_are_one_instance(self, tmp_path):
        """Grouped shapes of a label are parts of one instance: polygons stay polygons, with a mask all become one."""
        square = "{0},{0};{1},{0};{1},{1};{0},{1}"
        shapes = (
            f'<polygon label="dog" group_id="3" points="{square.format(1, 4)}"/>'
            f'<polygon label="dog" group_id="3" points="{square.format(10, 12)}"/>'
            f'<polygon label="person" group_id="3" points="{square.format(5, 9)}"/>'
            f'<polygon label="dog" group_id="4" points="{square.format(1, 4)}"/>'
            '<mask label="dog" group_id="4" rle="0,6" left="8" top="0" width="3" height="2"/>'
        )
        file, images = write_cvat(tmp_path / "source", pictures()[2:])
        file.write_text(file.read_text().replace("</image>", f"{shapes}</image>"))
        import_data("cvat", [file, images], tmp_path / "out")
        first, second, third = json.loads((tmp_path / "out/annotations.json").read_text())["annotations"]
        assert [len(first["segmentation"]), first["area"]] == [2, 9 + 4]
        assert [len(second["segmentation"]), second["area"]] == [1, 16]
        assert third["area"] == 9 + 6

    def test_subsets_are_splits(self, tmp_path):
        file, images = write_cvat(tmp_path / "source", pictures(), 'subset="Train"')
        file.write_text('subset="Validation"'.join(file.read_text().rsplit('subset="Train"', 1)))
        assert import_data("cvat", [file, images], tmp_path / "out").images == {"train": 2, "val": 1}

    def test_images_elsewhere(self, tmp_path):
        """A file one folder deeper is found; others and those of another size are dropped."""
        file, images = write_cvat(tmp_path / "source", pictures())
        (images / "default").mkdir()
        (images / "a.png").rename(images / "default/a.png")
        (images / "empty.png").unlink()
        Image.new("RGB", (4, 4)).save(images / "b.png")
        report = import_data("cvat", [file], tmp_path / "out")
        assert reasons(report) == {"image file that is missing": 1, "image of another size than its annotations": 1}

    @pytest.mark.parametrize(
        "prolog",
        [
            '<!DOCTYPE a [<!ENTITY lol "lol"><!ENTITY lol2 "&lol;&lol;&lol;&lol;&lol;">]>',
            '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
            '<!DOCTYPE a SYSTEM "http://127.0.0.1:1/a.dtd">',
            "<!DOCTYPE annotations>",
        ],
    )
    def test_a_document_type_is_refused(self, tmp_path, prolog):
        sources = self.changed(tmp_path, "<annotations>", f"{prolog}<annotations>")
        assert "DOCTYPE" in refused("cvat", sources, tmp_path / "out")

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("<annotations>", "<html>"),
            ('encoding="utf-8"', 'encoding="klingon"'),
            ("</annotations>", ""),
            ('name="a.png"', 'name="../../secret.png"'),
            ('name="a.png"', 'name="/etc/passwd"'),
            ('name="a.png"', ""),
            ("<version>", '<track id="0" label="dog">'),
            ("<name>person", "<name>"),
        ],
    )
    def test_bad_xml(self, tmp_path, old, new):
        refused("cvat", self.changed(tmp_path, old, new), tmp_path / "out")

    def test_a_video_says_what_to_do(self, tmp_path):
        sources = self.changed(tmp_path, "<version>1.1</version>", "<track/>")
        assert "CVAT for images 1.1" in refused("cvat", sources, tmp_path / "out")

    @pytest.mark.parametrize("content", [b"", b"\0", b"<a", b"<annotations/>", b"<annotations>" * 100_000])
    def test_not_xml(self, tmp_path, content):
        file, images = write_cvat(tmp_path / "source", pictures())
        file.write_bytes(content)
        refused("cvat", [file, images], tmp_path / "out")


class TestLabelStudio:
    def written(self, tmp_path: Path, results: list, **task) -> list[Path]:
        images = write_images(tmp_path / "source", pictures())
        good = brush_result("dog", pictures()[0].objects[1][1], 99)
        tasks = [label_studio_task(1, "a.png", [good, *results]) | task]
        (tmp_path / "export.json").write_text(json.dumps(tasks))
        return [tmp_path / "export.json", images]

    @pytest.mark.parametrize(
        ("changes", "value", "reason"),
        [
            ({"type": "rectanglelabels"}, {}, "result of type rectanglelabels, which has no outline"),
            ({"type": ["brushlabels"]}, {}, "result of type ['brushlabels'], which has no outline"),
            ({}, {"brushlabels": []}, "region without a label"),
            ({"original_width": 80}, {}, "brush that is not valid: it is for 80×30 pixels, but the image is 40×30"),
            ({"image_rotation": 90}, {}, "brush that is not valid: the image was rotated in Label Studio"),
            ({}, {"rle": None}, "brush that is not valid: it has no rle"),
            ({}, {"rle": [1, 2, "3"]}, "brush that is not valid: its rle is not a list of bytes"),
            ({}, {"rle": [1, 2]}, "brush that is not valid: its rle is cut off"),
            (
                {},
                {"rle": [255] * 40},
                "brush that is not valid: its rle is of 4294967295 values, but 40×30 pixels have 4800",
            ),
        ],
    )
    def test_regions(self, tmp_path, changes, value, reason):
        region = brush_result("person", pictures()[0].objects[0][1]) | changes
        region["value"] = region["value"] | value
        report = import_data("label-studio", self.written(tmp_path, [region]), tmp_path / "out")
        assert reasons(report) == {reason: 1}
        assert report.classes == {"dog": 1}

    @pytest.mark.parametrize("points", [None, [1, 2], [[1, 2], [3]], [[1, "2"], [3, 4], [5, 6]], [[float("nan"), 1]]])
    def test_bad_polygons(self, tmp_path, points):
        region = brush_result("person", pictures()[0].objects[0][1]) | {"type": "polygonlabels"}
        region["value"] = {"points": points, "polygonlabels": ["person"]}
        report = import_data("label-studio", self.written(tmp_path, [region]), tmp_path / "out")
        assert reasons(report) == {"polygon that is not valid: its points are not pairs of numbers": 1}

    def test_label_and_region_may_be_two_results(self, tmp_path):
        region = brush_result("person", pictures()[0].objects[0][1]) | {"type": "brush"}
        label = {**region, "type": "labels", "value": {"labels": ["person"]}}
        del region["value"]["brushlabels"]
        report = import_data("label-studio", self.written(tmp_path, [region, label]), tmp_path / "out")
        assert (report.classes, report.dropped) == ({"dog": 1, "person": 1}, {})

    def test_tasks(self, tmp_path):
        """Skipped tasks, second annotations, missing and ambiguous images are dropped."""
        images = write_images(tmp_path / "source", pictures())
        write_images(tmp_path / "source/more", pictures()[1:2])
        good = [brush_result("dog", pictures()[0].objects[1][1])]
        tasks = [label_studio_task(n, name, good) for n, name in enumerate(("a.png", "b.png", "none.png", "a.png"))]
        tasks[0]["annotations"] *= 2
        tasks[3]["annotations"][0]["was_cancelled"] = True
        tasks.append(label_studio_task(9, "x", good) | {"data": {"text": "no image"}})
        tasks.append(label_studio_task(10, "x", good) | {"data": {"image": "/data/local-files/?d=more/b.png"}})
        (tmp_path / "export.json").write_text(json.dumps(tasks))
        report = import_data("label-studio", [tmp_path / "export.json", images], tmp_path / "out")
        assert report.images == {"": 2}
        assert reasons(report) == {
            "further annotation of the same image; the first is taken": 1,
            "image whose name several files have": 1,
            "image file that is missing": 1,
            "task without an annotation, or skipped by its annotator": 1,
            "task without the name of an image": 1,
        }

    def test_a_url_that_leads_outside_finds_nothing(self, tmp_path):
        (tmp_path / "secret.png").write_bytes((write_images(tmp_path / "x", pictures()) / "a.png").read_bytes())
        sources = self.written(tmp_path, [], data={"image": "/data/local-files/?d=../secret.png"})
        assert "missing" in refused("label-studio", sources, tmp_path / "out")

    @pytest.mark.parametrize(
        "content", ["", "{}", "[3]", '[{"image": "a.png", "label": []}]', "[" * 100_000, '[{"annotations": 3}]', "[]"]
    )
    def test_bad_json(self, tmp_path, content):
        sources = self.written(tmp_path, [])
        sources[0].write_text(content)
        refused("label-studio", sources, tmp_path / "out")

    @pytest.mark.parametrize("task", [{"annotations": [3]}, {"annotations": [{"result": 3}]}, {"data": 3}])
    def test_odd_tasks(self, tmp_path, task):
        refused("label-studio", self.written(tmp_path, [], **task), tmp_path / "out")


class TestOutput:
    def test_an_existing_folder_is_not_touched(self, tmp_path):
        sources = write_label_studio(tmp_path / "source", pictures())
        (tmp_path / "out").mkdir()
        (tmp_path / "out/mine.txt").write_text("mine")
        with pytest.raises(UserError, match="not an empty folder"):
            import_data("label-studio", sources, tmp_path / "out")
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]

    def test_number_of_sources(self, tmp_path):
        assert "export.json IMAGES" in refused("label-studio", [tmp_path], tmp_path / "out")
        assert "does not exist" in refused("voc", [tmp_path / "none"], tmp_path / "out")
        assert "label-studio" in refused("coco", [tmp_path], tmp_path / "out")

    def test_an_archive_is_not_unpacked(self, tmp_path):
        (tmp_path / "task.zip").write_bytes(b"PK")
        assert "unpack it" in refused("cvat", [tmp_path / "task.zip"], tmp_path / "out")
