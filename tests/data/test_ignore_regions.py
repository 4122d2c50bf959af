"""Valid pixels and thing flags: from crowd regions of a json, through every augmentation, into the targets."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.coco_files import changed_set, write_set
from helpers.reference import reference
from helpers.samples import equal, noisy, painted, rng
from uniquery.data.augment import (
    Augmentation,
    Color,
    Crop,
    Flip,
    Sample,
    ScaleJitter,
    ShortSide,
    Transpose,
    augment,
    crop,
    resize,
)
from uniquery.data.batch import LoadedSample, TrainingSamples, collate
from uniquery.data.coco import CocoData
from uniquery.masks import rle
from uniquery.report.preview import sample_picture

STEPS: dict[str, Augmentation] = {
    "short side, smaller": ShortSide(range=(20, 40), longest=64),
    "short side, larger": ShortSide(range=(60, 90), longest=200),
    "flip": Flip(p=1),
    "flip, vertical": Flip(p=1, axis="vertical"),
    "transpose": Transpose(p=1),
    "crop": Crop(range=(0.4, 0.9)),
    "scale jitter, smaller": ScaleJitter(range=(0.3, 0.9), size=48),
    "scale jitter, larger": ScaleJitter(range=(1.0, 2.0), size=48),
    "color": Color(),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())


def with_valid(sample: Sample) -> Sample:
    """Invalid where the first mask is; the second instance is stuff."""
    return replace(sample, valid=1 - sample.masks[0], things=torch.tensor([True, False]))


class TestEveryAugmentation:
    @every_step
    @pytest.mark.parametrize("seed", range(4))
    def test_valid_pixels_move_with_the_masks(self, step, seed):
        """Invalid is the first mask, before and after: padding, which has no mask, is valid."""
        changed = step(with_valid(noisy()), rng(seed))
        assert changed.valid is not None
        assert changed.valid.dtype == torch.uint8
        assert changed.valid.shape == changed.size
        assert torch.equal(changed.valid, 1 - changed.masks[0])
        assert changed.things.tolist() == [True, False]

    @every_step
    def test_they_change_nothing_else(self, step):
        plain, changed = step(noisy(), rng(3)), step(with_valid(noisy()), rng(3))
        assert equal(replace(changed, valid=None, things=None), plain)

    @every_step
    def test_none_stays_none(self, step):
        changed = step(noisy(), rng())
        assert changed.valid is None
        assert changed.things is None

    @every_step
    def test_without_instances(self, step):
        sample = with_valid(noisy())
        changed = augment(replace(sample, masks=sample.masks[:0], labels=sample.labels[:0], things=None), [step], rng())
        assert changed.masks.shape == (0, *changed.size)
        assert torch.equal(changed.valid, step(sample, rng()).valid)

    def test_things_follow_the_instances_that_stay(self):
        """A crop of the upper left corner shows the first instance only."""
        sample = replace(painted(), things=torch.tensor([False, True]))
        window = replace(sample, image=sample.image[:, :20, :30], masks=sample.masks[:, :20, :30])
        assert window.without_empty().things.tolist() == [False]
        assert replace(window, masks=window.masks.flip(0)).without_empty().things.tolist() == [True]
        assert replace(window, masks=window.masks * 0).without_empty().things.shape == (0,)

    def test_resize_is_nearest_and_crop_is_a_window(self):
        valid = torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8)
        sample = Sample(torch.zeros(3, 2, 2, dtype=torch.uint8), valid[None][:0], torch.zeros(0), valid)
        larger = resize(sample, (4, 6)).valid
        assert larger.tolist() == [[1, 1, 1, 0, 0, 0]] * 2 + [[0, 0, 0, 1, 1, 1]] * 2
        assert crop(sample, (2, 1), rng(1)).valid.flatten().tolist() in ([1, 0], [0, 1])


class TestTargets:
    def loaded(self, sample: Sample) -> LoadedSample:
        return LoadedSample(sample, 1, sample.size)

    def test_padding_is_valid(self):
        sample = with_valid(noisy(40, 50))
        (target,) = collate([self.loaded(sample)]).targets
        expected = torch.ones(64, 64, dtype=torch.bool)
        expected[:40, :50] = sample.valid.bool()
        assert target.valid.dtype == torch.bool
        assert torch.equal(target.valid, expected)
        assert target.things.tolist() == [True, False]

    def test_none_stays_none_beside_others(self):
        first, second = collate([self.loaded(noisy()), self.loaded(with_valid(noisy(10, 70)))]).targets
        assert first.valid is None
        assert first.things is None
        assert second.valid.shape == second.masks.shape[1:]

    def test_moves_with_the_batch(self):
        batch = collate([self.loaded(with_valid(noisy()))]).to(torch.device("meta"))
        assert batch.targets[0].valid.is_meta
        assert batch.targets[0].things.is_meta


class TestCrowdRegions:
    """In the sound set, images 7 and 3 have a crowd in the rows from 15 on and the columns before 12."""

    @pytest.fixture
    def data(self, tmp_path) -> CocoData:
        return CocoData(*write_set(tmp_path))

    def crowd(self) -> Tensor:
        region = torch.zeros(24, 32, dtype=torch.bool)
        region[15:, :12] = True
        return region

    def test_they_are_not_valid(self, data):
        assert torch.equal(data.load(0).valid, (~self.crowd()).byte())
        assert torch.equal(data.load(3).valid, (~self.crowd()).byte())
        assert len(data.load(3).masks) == 0

    def test_images_without_crowd_have_no_valid(self, data):
        assert data.load(1).valid is None
        assert data.load(2).valid is None
        assert all(data.load(i).things is None for i in range(4))

    def test_they_are_background_if_asked_for(self, tmp_path, data):
        plain = CocoData(*write_set(tmp_path), ignore_crowd=False)
        assert [plain.load(i).valid for i in range(4)] == [None] * 4
        assert equal(replace(data.load(0), valid=None), plain.load(0))

    def test_instances_inside_a_crowd_stay_valid(self, tmp_path):
        def change(content):
            content["annotations"][0]["segmentation"] = [[2, 17, 6, 17, 6, 21, 2, 21]]

        sample = changed_set(tmp_path, change).load(0)
        inside = sample.masks[0].bool()
        assert (inside & self.crowd()).sum() == 16
        assert sample.valid[inside].all()
        assert torch.equal(sample.valid == 0, self.crowd() & ~inside)

    def test_several_crowds_are_joined(self, tmp_path):
        def change(content):
            more = {"size": [24, 32], "counts": [700, 68]}
            content["annotations"].append({**content["annotations"][3], "id": 99, "segmentation": more})

        sample = changed_set(tmp_path, change).load(0)
        assert int((sample.valid == 0).sum()) == int(self.crowd().sum()) + 68

    def test_crowds_of_unused_classes_and_empty_crowds_do_not_count(self, tmp_path):
        assert CocoData(*write_set(tmp_path), classes=["debris"]).load(0).valid is None

        def change(content):
            content["annotations"][3]["segmentation"] = {"size": [24, 32], "counts": [768]}

        assert changed_set(tmp_path, change).load(0).valid is None

    def test_they_reach_the_targets(self, data):
        batch = collate([TrainingSamples(data, [Flip(p=1)], seed=0)[0, 0]])
        assert torch.equal(batch.targets[0].valid[:24, :32], ~self.crowd().flip(1))
        assert batch.targets[0].valid[24:].all()

    def test_the_preview_shows_them(self, data):
        sample = data.load(3)
        picture, plain = sample_picture(sample, data.classes), sample.image.permute(1, 2, 0).numpy()
        assert np.array_equal(picture[~self.crowd()], plain[~self.crowd()])
        gray = picture[self.crowd()]
        assert (gray == gray[:, :1]).all()
        assert (gray == 255).any()
        assert not np.array_equal(gray, plain[self.crowd()])


@pytest.mark.realdata
class TestRealCrowds:
    def test_of_coco(self):
        folder: Path = reference("data/coco")
        data = CocoData(folder / "annotations/instances_train.json", folder / "images/train")
        plain = CocoData(data.annotations, data.image_root, ignore_crowd=False)
        crowded = sorted({int(i) for i in self.images(data)})
        assert len(crowded) >= 3
        for index in crowded:
            sample = data.load(index)
            region = self.region(data, index) & ~sample.masks.any(0).bool().numpy()
            assert np.array_equal(sample.valid.numpy() == 0, region)
            assert region.any()
            assert equal(replace(sample, valid=None), plain.load(index))
        others = [index for index in range(len(data)) if index not in crowded]
        assert all(data.load(index).valid is None for index in others[:20])

    def images(self, data: CocoData) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(len(data)), data.starts.diff())
        return owner[data.crowd]

    def region(self, data: CocoData, index: int) -> np.ndarray:
        """The crowd of an image, straight from the json."""
        content = json.loads(data.annotations.read_text())
        height, width = data.sizes[index].tolist()
        region = np.zeros((height, width), bool)
        for row in content["annotations"]:
            if row["image_id"] == int(data.image_ids[index]) and row["iscrowd"]:
                region |= rle.decode(rle.from_segmentation(row["segmentation"], height, width)).astype(bool)
        return region
