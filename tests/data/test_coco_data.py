"""COCO data: every form of mask, any ids, shared arrays, and one sentence for everything that can be wrong."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from pycocotools.coco import COCO

from helpers.coco_files import (
    Content,
    assert_one_sentence,
    changed_set,
    pixels,
    ring,
    sound,
    write_images,
    write_json,
    write_set,
)
from helpers.samples import equal
from uniquery.data.coco import CocoData, PackedStrings
from uniquery.errors import DataError
from uniquery.masks import rle

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    return write_set(tmp_path)


@pytest.fixture
def data(files) -> CocoData:
    return CocoData(*files)


def row(content: Content, table: str, number: int) -> Content:
    return next(r for r in content[table] if r["id"] == number)


class TestMasks:
    def test_they_are_those_of_coco(self, data, files):
        reference = COCO(str(files[0]))
        for index, image_id in enumerate(data.image_ids.tolist()):
            annotations = reference.loadAnns(reference.getAnnIds([image_id], iscrowd=False))
            sample = data.load(index)
            assert sample.masks.dtype == torch.uint8
            assert sample.masks.shape == (len(annotations), *sample.size)
            labels = sample.labels.tolist()
            assert [data.categories[label].id for label in labels] == [a["category_id"] for a in annotations]
            for mask, annotation in zip(sample.masks, annotations, strict=True):
                assert np.array_equal(mask, reference.annToMask(annotation))

    def test_run_lengths_are_those_of_coco_so_that_anything_can_read_them(self, data):
        for _, mask in data.instances(0):
            assert mask["size"] == [24, 32]
            assert rle.encode(rle.decode(mask)) == mask

    def test_crowds_are_never_targets(self, data, files):
        assert data.annotation_ids[data.crowd].tolist() == [9, 12]
        assert [len(data.load(i).masks) for i in range(4)] == [2, 2, 0, 0]
        assert [len(data.instances(i)) for i in range(4)] == [2, 2, 0, 0]
        assert data.instances_per_image().tolist() == [2, 2, 0, 0]
        content = sound()
        for annotation in content["annotations"]:
            annotation["iscrowd"] = 1
        everything = CocoData(write_json(files[0].parent, content), files[1])
        assert everything.instances_per_image().tolist() == [0, 0, 0, 0]
        assert everything.load(0).masks.shape == (0, 24, 32)

    def test_holes_stay_open(self, data):
        masks = data.load(0).masks
        assert np.array_equal(masks[1], ring(24, 32))

    def test_polygons_of_several_parts_are_one_instance(self, data):
        mask = data.load(0).masks[0]
        assert mask[4, 4] == mask[12, 25] == 1
        assert mask[4, 15] == 0

    @pytest.mark.parametrize("flag", [None, 0, False, 0.0, "missing"])
    def test_iscrowd_may_be_left_out(self, tmp_path, flag):
        def change(content):
            content["annotations"][3]["iscrowd"] = flag
            if flag == "missing":
                del content["annotations"][3]["iscrowd"]

        assert changed_set(tmp_path, change).instances_per_image().tolist() == [3, 2, 0, 0]

    def test_empty_masks_are_ignored_with_a_warning(self, tmp_path):
        def change(content):
            row(content, "annotations", 4)["segmentation"] = {"size": [30, 20], "counts": [600]}
            row(content, "annotations", 13)["segmentation"] = [[5, 5, 5, 5, 5, 5]]

        data = changed_set(tmp_path, change)
        assert [text.split(" has")[0] for text in data.warnings] == [
            "Annotation 4 (image 0)",
            "Annotation 13 (image 0)",
        ]
        assert data.instances_per_image().tolist() == [2, 0, 0, 0]
        assert data.load(1).masks.shape == (0, 30, 20)
        assert changed_set(tmp_path, change, keep_empty=False).image_ids.tolist() == [7]

    def test_a_file_of_several_images_is_a_warning(self, tmp_path):
        def change(content):
            content["images"].append({**content["images"][0], "id": 70, "file_name": "sub/../a.png"})

        data = changed_set(tmp_path, change)
        assert len(data) == 5
        (warning,) = data.warnings
        assert warning == "Images [7, 70] are the same file, a.png."

    def test_polygons_that_leave_the_image_are_cut_with_a_warning(self, tmp_path):
        def change(content):
            row(content, "annotations", 13)["segmentation"] = [[-50, -50, 500, -50, 500, 500, -50, 500]]

        data = changed_set(tmp_path, change)
        (warning,) = data.warnings
        assert "Annotation 13 (image 0) reaches outside its 20×30 image" in warning
        assert_one_sentence(warning)
        assert data.load(1).masks[1].all()

    def test_a_pixel_outside_is_no_reason_to_warn(self, tmp_path):
        def change(content):
            row(content, "annotations", 13)["segmentation"] = [[-1, -0.5, 21, 0, 20.5, 31]]

        assert changed_set(tmp_path, change).warnings == []


class TestClasses:
    def test_labels_follow_the_ids_whatever_they_are(self, data):
        assert [(c.id, c.name) for c in data.categories] == [(0, "debris"), (5, "cell"), (90, "dust")]
        assert data.classes == ["debris", "cell", "dust"]
        assert data.load(0).labels.tolist() == [1, 0]
        assert data.load(1).labels.tolist() == [2, 1]

    def test_the_order_in_the_file_does_not_matter(self, tmp_path, data):
        reversed_data = changed_set(tmp_path, lambda content: content["categories"].reverse())
        assert reversed_data.categories == data.categories
        assert torch.equal(reversed_data.labels, data.labels)

    def test_chosen_classes_keep_the_chosen_order(self, files):
        data = CocoData(*files, classes=["dust", "cell"])
        assert data.classes == ["dust", "cell"]
        assert [c.id for c in data.categories] == [90, 5]
        assert [data.load(i).labels.tolist() for i in range(4)] == [[1], [0, 1], [], []]
        assert data.annotation_ids.tolist() == [100, 9, 4, 13]

    def test_a_misspelled_class(self, files):
        with pytest.raises(DataError, match=r"no class 'cel'\. Did you mean 'cell'\?$") as caught:
            CocoData(*files, classes=["dust", "cel"])
        assert_one_sentence(caught.value)
        assert str(files[0]) in str(caught.value)
        with pytest.raises(DataError, match=r"no class 'zebra'\.$"):
            CocoData(*files, classes=["zebra"])

    @pytest.mark.parametrize("classes", [[], ["cell", "cell"]])
    def test_no_class_or_the_same_twice(self, files, classes):
        with pytest.raises(DataError, match="different names") as caught:
            CocoData(*files, classes=classes)
        assert_one_sentence(caught.value)

    def test_classes_without_instances_stay(self, tmp_path):
        data = changed_set(tmp_path, lambda content: content["categories"].insert(0, {"id": 1, "name": "spare"}))
        assert data.classes == ["debris", "spare", "cell", "dust"]
        assert data.load(0).labels.tolist() == [2, 0]


class TestImages:
    def test_images_keep_the_order_of_the_file(self, data):
        assert data.image_ids.tolist() == [7, 0, 11, 3]
        assert data.sizes.tolist() == [[24, 32], [30, 20], [16, 18], [24, 32]]
        assert [data.path(i).name for i in range(len(data))] == ["a.png", "b.jpg", "nothing.png", "crowd.png"]
        assert np.array_equal(data.read(0), pixels("a.png", 24, 32))

    def test_images_without_instances_stay_or_go(self, files, data):
        assert len(data) == 4
        fewer = CocoData(*files, keep_empty=False)
        assert fewer.image_ids.tolist() == [7, 0]
        for index in range(2):
            assert equal(fewer.load(index), data.load(index))
        assert CocoData(*files, keep_empty=False, classes=["dust"]).image_ids.tolist() == [0]

    def test_nothing_left(self, files):
        content = {**sound(), "annotations": []}
        path = write_json(files[0].parent, content)
        assert len(CocoData(path, files[1])) == 4
        with pytest.raises(DataError, match=r"no image left to use: set data\.keep_empty") as caught:
            CocoData(path, files[1], keep_empty=False)
        assert_one_sentence(caught.value)

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_sizes_are_those_of_the_upright_image(self, tmp_path, orientation):
        content = sound()
        images = write_images(tmp_path, content)
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(pixels("a.png", 24, 32)).save(images / "a.png", exif=exif)
        turned = orientation > 4
        data = CocoData(write_json(tmp_path, content), images)
        if turned:
            message = r"24×32 after EXIF rotation, but the annotations say 32×24 .*EXIF"
            with pytest.raises(DataError, match=message) as caught:
                data.load(0)
            assert_one_sentence(caught.value)
            row(content, "images", 7).update(height=32, width=24)
            content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 7]
            data = CocoData(write_json(tmp_path, content), images)
        assert data.load(0).size == ((32, 24) if turned else (24, 32))

    def test_names_of_any_script(self, tmp_path):
        content = sound()
        content["images"][0]["file_name"] = "größe 細胞/😀 1.png"
        data = CocoData(*write_set(tmp_path, content))
        assert data.load(0).image.shape == (3, 24, 32)

    def test_ids_up_to_64_bits(self, tmp_path):
        def change(content):
            for entry in (content["images"][0], *[a for a in content["annotations"] if a["image_id"] == 7]):
                entry["id" if "file_name" in entry else "image_id"] = 2**63 - 1
            content["annotations"][0]["id"] = -(2**63)

        data = changed_set(tmp_path, change)
        assert data.image_ids[0] == 2**63 - 1
        assert data.annotation_ids[0] == -(2**63)

    def test_a_byte_order_mark_and_other_encodings(self, files):
        text = files[0].read_text()
        for encoding in ("utf-8-sig", "utf-16"):
            files[0].write_bytes(text.encode(encoding))
            assert len(CocoData(*files)) == 4


class TestSharing:
    def tensors(self, data: CocoData) -> dict[str, torch.Tensor]:
        flat = {}
        for name, value in vars(data).items():
            inner = vars(value) if isinstance(value, PackedStrings) else {"": value}
            flat |= {f"{name}{key}": tensor for key, tensor in inner.items() if isinstance(tensor, torch.Tensor)}
        return flat

    def test_everything_is_in_shared_tensors(self, data):
        tensors = self.tensors(data)
        assert len(tensors) == 15
        assert {name: tensor.is_shared() for name, tensor in tensors.items()} == dict.fromkeys(tensors, True)
        assert data.crowd.dtype == torch.bool

    def test_also_when_there_is_nothing_to_share(self, tmp_path):
        data = changed_set(tmp_path, lambda content: content["annotations"].clear())
        assert all(tensor.is_shared() for tensor in self.tensors(data).values())

    def test_nothing_grows_with_the_data_but_tensors(self, tmp_path):
        """Python objects would be copied into every worker, one by one, as their reference counts change."""

        def pickled_rest(copies: int) -> int:
            content = sound()
            template = content["annotations"][0]
            content["annotations"] += [{**template, "id": 1000 + i} for i in range(copies)]
            images = write_images(tmp_path, content)
            state = vars(CocoData(write_json(tmp_path, content), images))
            return len(
                pickle.dumps({k: v for k, v in state.items() if not isinstance(v, torch.Tensor | PackedStrings)})
            )

        assert pickled_rest(500) == pickled_rest(0)

    def test_packed_strings(self):
        strings = ["", "a", "größe", "", "x" * 1000, ""]
        packed = PackedStrings(strings)
        assert len(packed) == 6
        assert [packed[i] for i in range(6)] == strings
        assert len(PackedStrings([])) == 0
        assert PackedStrings([""])[0] == ""
