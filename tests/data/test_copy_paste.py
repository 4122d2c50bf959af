"""Copy-paste against a loop over pixels, and at its limits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from uniquery.data.augment import CopyPaste, Flip, Sample, ScaleJitter, augment, paste
from uniquery.data.batch import TrainingSamples
from uniquery.data.coco import CocoData


def sample(size, boxes, labels, color, **more):
    height, width = size
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    for mask, (top, left, bottom, right) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = 1
    image = torch.full((3, height, width), color, dtype=torch.uint8)
    return Sample(image, masks, torch.tensor(labels, dtype=torch.int64), **more)


def naive_paste(target, other, chosen):
    image, masks = target.image.clone(), [mask.clone() for mask in target.masks]
    pasted = [torch.zeros_like(target.image[0]) for _ in chosen]
    for y in range(min(target.size[0], other.size[0])):
        for x in range(min(target.size[1], other.size[1])):
            owners = [k for k, instance in enumerate(chosen) if other.masks[instance, y, x]]
            for k in owners:
                pasted[k][y, x] = 1
            if owners:
                image[:, y, x] = other.image[:, y, x]
                for mask in masks:
                    mask[y, x] = 0
    return image, torch.stack([*masks, *pasted]) if masks or pasted else target.masks


TARGET = sample((12, 16), [(1, 1, 6, 6), (8, 8, 11, 15)], [0, 1], 10)
OTHERS = {
    "same size": sample((12, 16), [(3, 3, 9, 12), (0, 0, 2, 2)], [2, 3], 200),
    "smaller": sample((7, 9), [(3, 3, 7, 9), (0, 0, 2, 2)], [2, 3], 200),
    "larger": sample((20, 30), [(3, 3, 19, 29), (15, 20, 18, 25)], [2, 3], 200),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("chosen", [[0], [1], [1, 0]])
def test_pixel_by_pixel(name, chosen):
    result = paste(TARGET, OTHERS[name], torch.tensor(chosen))
    image, masks = naive_paste(TARGET, OTHERS[name], chosen)
    assert torch.equal(result.image, image)
    assert torch.equal(result.masks, masks)
    assert result.labels.tolist() == [0, 1, *(OTHERS[name].labels[k].item() for k in chosen)]
    assert result.masks.dtype == torch.uint8


def test_valid_and_things():
    valid = torch.ones(12, 16, dtype=torch.uint8)
    valid[:, :8] = 0
    target = replace(TARGET, valid=valid, things=torch.tensor([True, False]))
    result = paste(target, OTHERS["same size"], torch.tensor([0]))
    assert result.valid[5, 5] == 1  # a pasted pixel is annotated
    assert result.valid[0, 0] == 0
    assert result.things.tolist() == [True, False, True]
    assert paste(TARGET, OTHERS["same size"], torch.tensor([0])).things is None


def test_an_instance_that_is_covered_is_dropped():
    cover = sample((12, 16), [(0, 0, 12, 16)], [4], 99)
    result = augment(TARGET, [CopyPaste(p=1.0)], np.random.default_rng(0), lambda _: cover)
    assert result.labels.tolist() == [4]
    assert (result.image == 99).all()


@pytest.mark.parametrize(
    ("settings", "load"),
    [
        ({"p": 0.0}, lambda _: OTHERS["same size"]),
        ({"p": 1.0}, None),
        ({"p": 1.0}, lambda _: sample((12, 16), [], [], 200)),
    ],
)
def test_nothing_to_paste(settings, load):
    result = augment(TARGET, [CopyPaste(**settings)], np.random.default_rng(0), load)
    assert torch.equal(result.image, TARGET.image)
    assert torch.equal(result.masks, TARGET.masks)


def test_the_number_of_instances_is_limited():
    many = sample((12, 16), [(i, i, i + 1, i + 1) for i in range(12)], list(range(12)), 200)
    counts = {
        len(augment(TARGET, [CopyPaste(p=1.0, max_instances=3)], np.random.default_rng(s), lambda _: many).labels) - 2
        for s in range(40)
    }
    assert counts == {1, 2, 3}


def test_the_other_image_goes_through_what_comes_before():
    left = sample((12, 16), [(0, 0, 12, 4)], [5], 200)
    result = augment(TARGET, [Flip(p=1.0), CopyPaste(p=1.0)], np.random.default_rng(0), lambda _: left)
    assert result.masks[-1, :, 12:].all()
    assert not result.masks[-1, :, :12].any()


def test_samples_depend_on_seed_epoch_and_image_only(scenes):
    data = CocoData(scenes.annotations("train"), scenes.images("train"))
    augmentations = [ScaleJitter(range=(0.8, 1.2), size=64), CopyPaste(p=1.0)]
    first, second = (TrainingSamples(data, augmentations, seed=3) for _ in range(2))
    for key in [(0, 1), (4, 0), (0, 1)]:
        assert torch.equal(first[key].sample.image, second[key].sample.image)
        assert torch.equal(first[key].sample.masks, second[key].sample.masks)
    assert first[0, 1].image_id == int(data.image_ids[1])


@pytest.mark.parametrize("settings", [{"p": 1.5}, {"p": -0.1}, {"max_instances": 0}, {"instances": 3}])
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CopyPaste(**settings)
