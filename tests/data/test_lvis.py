"""LVIS annotations: lists of classes, frequencies, and the classes that an image teaches."""

from typing import Any

import numpy as np
import pytest
import torch

from helpers.coco_files import Content, assert_one_sentence, changed_set
from uniquery.data.augment import Flip
from uniquery.data.batch import TrainingSamples, collate
from uniquery.data.check import check_data
from uniquery.data.dataset import ClassLists
from uniquery.data.lvis import FederatedClasses, FederatedSettings
from uniquery.errors import DataError


def as_lvis(content: Content) -> None:
    """Names from addresses, no 'iscrowd', frequencies; image 0 lists classes in v1's spelling, image 7 in v0.5's."""
    for row in content["images"]:
        row["coco_url"] = f"http://images.cocodataset.org/{'' if '/' in row['file_name'] else 'x/'}{row['file_name']}"
        del row["file_name"]
    content["annotations"] = [a for a in content["annotations"] if not a["iscrowd"]]
    for row in content["annotations"]:
        del row["iscrowd"]
    for row, frequency in zip(content["categories"], "rcf", strict=True):
        row["frequency"] = frequency
    content["images"][1] |= {"neg_category_ids": [0], "not_exhaustive_category_ids": [5]}
    content["images"][0] |= {"neg_category_ids": [90, 12345], "non_exhaustive_category_ids": [0]}


class TestReading:
    def test_everything(self, tmp_path):
        data = changed_set(tmp_path, as_lvis)
        assert data.classes == ["debris", "cell", "dust"]
        assert data.frequencies == ["c", "r", "f"]
        assert data.class_lists(1) == ClassLists(negative=(0,), not_exhaustive=(1,))
        assert data.class_lists(0) == ClassLists(negative=(2,), not_exhaustive=(0,))
        assert data.class_lists(2) == ClassLists()
        assert not data.crowd.any()
        assert data.load(0).size == (24, 32)
        truth = data.ground_truth()
        assert truth.images[7]["not_exhaustive_category_ids"] == [0]

    def test_some_classes(self, tmp_path):
        data = changed_set(tmp_path, as_lvis, classes=["dust", "cell"])
        assert data.class_lists(1) == ClassLists(negative=(), not_exhaustive=(1,))
        assert data.class_lists(0) == ClassLists(negative=(0,), not_exhaustive=())

    def test_plain_coco(self, tmp_path):
        data = changed_set(tmp_path, lambda c: None)
        assert data.frequencies == [None, None, None]
        assert data.class_lists(0) == ClassLists()

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (lambda c: c["images"][1].update(neg_category_ids=3), "'neg_category_ids', which must be a list of"),
            (
                lambda c: c["images"][1].update(not_exhaustive_category_ids=["a"]),
                "'not_exhaustive_category_ids', which",
            ),
            (lambda c: c["images"][1].update(non_exhaustive_category_ids={}), "'not_exhaustive_category_ids', which"),
            (lambda c: c["categories"][1].update(frequency="often"), "frequency often, which must be one of r, c, f"),
            (lambda c: c["categories"][1].update(frequency=["r"]), r"frequency \['r'\], which must be"),
            (lambda c: c["images"][1].pop("coco_url"), "and a text as 'file_name', or as 'coco_url'"),
            (lambda c: c["images"][1].update(coco_url=5), "and a text as 'file_name', or as 'coco_url'"),
            (lambda c: c["images"][1].update(coco_url="http://host/../../secret.png"), "inside the image folder"),
            (lambda c: c["images"][1].update(coco_url="http://host"), "inside the image folder"),
        ],
    )
    def test_what_is_wrong_is_told_in_a_sentence(self, tmp_path, change, sentence):
        def both(content: Content) -> None:
            as_lvis(content)
            change(content)

        with pytest.raises(DataError, match=sentence) as caught:
            changed_set(tmp_path, both)
        assert_one_sentence(caught.value)
        report = check_data(tmp_path / "annotations.json", tmp_path / "images")
        assert not report.is_valid


class TestFederatedClasses:
    @pytest.fixture
    def data(self, tmp_path) -> Any:
        """Thirty classes besides the three, of which class i is in i of the images' worth of annotations."""

        def many(content: Content) -> None:
            as_lvis(content)
            content["categories"] += [{"id": 100 + i, "name": f"c{i}", "frequency": "r"} for i in range(30)]
            template, number = content["annotations"][0], 1000
            for i in range(30):
                for image in (7, 0)[: 1 + i % 2]:
                    number += 1
                    size = {7: [24, 32], 0: [30, 20]}[image]
                    mask = {"size": size, "counts": [0, 4, size[0] * size[1] - 4]}
                    content["annotations"].append(
                        {**template, "id": number, "image_id": image, "category_id": 100 + i, "segmentation": mask}
                    )

        return changed_set(tmp_path, many)

    def test_own_and_known_classes_then_others(self, data):
        federated = FederatedClasses(data, FederatedSettings(classes=10))
        for epoch in range(50):
            drawn = federated.draw(1, [1, 2], np.random.default_rng(epoch))
            assert drawn.not_exhaustive == (1,)
            assert {0, 1, 2} < set(drawn.negative)
            assert len(drawn.negative) == 10
            assert drawn.negative == tuple(sorted(set(drawn.negative)))

    def test_drawn_by_the_root_of_the_frequency(self, data):
        """Odd classes are in twice as many images."""
        federated, counts = FederatedClasses(data, FederatedSettings(classes=4)), np.zeros(33)
        for seed in range(6000):
            drawn = federated.draw(2, [0, 1, 2], np.random.default_rng(seed))
            (one,) = set(drawn.negative) - {0, 1, 2}
            counts[one] += 1
        assert counts[4::2].sum() / counts[3::2].sum() == pytest.approx(2**0.5, rel=0.08)
        assert counts[:3].sum() == 0

    def test_never_more_than_there_are(self, data):
        drawn = FederatedClasses(data, FederatedSettings(classes=500)).draw(2, [0], np.random.default_rng(0))
        assert drawn.negative == tuple(range(33))

    def test_known_classes_stay_even_if_they_are_too_many(self, data):
        drawn = FederatedClasses(data, FederatedSettings(classes=1)).draw(1, [1, 2], np.random.default_rng(0))
        assert drawn == ClassLists((0, 1, 2), (1,))

    def test_a_class_that_was_pasted_is_not_exhaustively_labeled(self, data):
        federated = FederatedClasses(data, FederatedSettings(classes=1))
        drawn = federated.draw(1, [1, 2], np.random.default_rng(0), pasted=[0, 2, 7])
        assert drawn == ClassLists((0, 1, 2), (1, 7))  # 0 is known to be absent, 2 was there before

    def test_a_mirror_image_has_the_lists_of_the_mirrored_classes(self, data):
        """In image 1, class 0 is known to be absent and class 1 is not exhaustively labeled."""
        settings, swap = FederatedSettings(classes=1), torch.tensor([3, 4, 2, 0, 1, *range(5, 33)])
        for flips in range(3):
            augmentations = [Flip(p=1)] * flips
            plain, swapped = (
                TrainingSamples(data, augmentations, 0, federated=settings, mirrored=mirrored)[0, 1]
                for mirrored in (None, swap)
            )
            expected = plain.classes.with_labels(swap.tolist()) if flips == 1 else plain.classes
            assert swapped.classes == expected
            assert swapped.classes.not_exhaustive == ((4,) if flips == 1 else (1,))
            assert set(swapped.sample.labels.tolist()) <= set(swapped.classes.negative)

    def test_targets_carry_them(self, data):
        plain, federated = (
            TrainingSamples(data, (), 0, federated=settings) for settings in (None, FederatedSettings(classes=8))
        )
        without, batch, again = (collate([samples[5, 1]]) for samples in (plain, federated, federated))
        assert without.targets[0].negative_classes is None
        assert without.targets[0].not_exhaustive_classes is None
        target = batch.targets[0]
        assert torch.equal(target.not_exhaustive_classes, torch.tensor([1]))
        assert target.negative_classes.dtype == torch.int64
        assert torch.equal(target.negative_classes, again.targets[0].negative_classes)
        assert torch.equal(batch.images.pixels, without.images.pixels)
        assert batch.to(torch.device("cpu")).targets[0].negative_classes is not None

    def test_other_epochs_draw_others(self, data):
        samples = TrainingSamples(data, (), 0, federated=FederatedSettings(classes=30))
        drawn = {tuple(collate([samples[epoch, 2]]).targets[0].negative_classes.tolist()) for epoch in range(8)}
        assert len(drawn) > 1
