"""What holds for every augmentation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor

from helpers.samples import equal, noisy, painted, rng, without_instances
from uniquery.data.augment import (
    AnyAugmentation,
    Augmentation,
    Color,
    Crop,
    Flip,
    Sample,
    ScaleJitter,
    ShortSide,
    Transpose,
    augment,
)

STEPS: dict[str, Augmentation] = {
    "short side, smaller": ShortSide(range=(20, 40), longest=64),
    "short side, larger": ShortSide(range=(60, 90), longest=200),
    "flip": Flip(p=1),
    "flip, vertical": Flip(p=1, axis="vertical"),
    "transpose": Transpose(p=1),
    "crop": Crop(range=(0.4, 0.9)),
    "scale jitter, smaller": ScaleJitter(range=(0.3, 0.9), size=48),
    "scale jitter, larger": ScaleJitter(range=(1.0, 2.0), size=48),
    "scale jitter, both": ScaleJitter(range=(0.2, 3.0), size=40),
    "color": Color(brightness=0.1, contrast=0.1, saturation=0.5),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())


def interior(masks: Tensor) -> Tensor:
    """Where a mask is known not to change within two pixels: elsewhere a resized image may be gray."""
    inner = F.max_pool2d(masks.float(), 5, 1) == -F.max_pool2d(-masks.float(), 5, 1)
    return F.pad(inner, (2, 2, 2, 2))


class TestEveryStep:
    @every_step
    @pytest.mark.parametrize("seed", range(6))
    def test_image_and_masks_stay_together(self, step, seed):
        changed = step(painted(), rng(seed))
        inside = interior(changed.masks)
        assert inside.float().mean() > 0.3
        assert torch.equal((changed.image[:2] > 127)[inside], changed.masks.bool()[inside])
        assert changed.masks.shape[1:] == changed.image.shape[1:]

    @every_step
    def test_types_and_labels_are_kept(self, step):
        changed = step(painted(), rng())
        assert changed.image.dtype == changed.masks.dtype == torch.uint8
        assert changed.labels.tolist() == [5, 3]
        assert set(changed.masks.unique().tolist()) <= {0, 1}

    @every_step
    def test_the_generator_decides_everything(self, step):
        assert all(equal(step(noisy(), rng(seed)), step(noisy(), rng(seed))) for seed in range(4))

    @every_step
    def test_other_generators_decide_otherwise(self, step):
        if isinstance(step, Flip | Transpose):
            step = step.model_copy(update={"p": 0.5})
        first, *others = [step(noisy(), rng(seed)) for seed in range(8)]
        assert not all(equal(first, other) for other in others)

    @every_step
    def test_the_sample_itself_is_not_changed(self, step):
        sample, before = noisy(), noisy()
        step(sample, rng())
        assert equal(sample, before)

    @every_step
    def test_without_instances(self, step):
        changed = augment(without_instances(), [step], rng())
        assert changed.masks.shape == (0, *changed.size)
        assert changed.labels.shape == (0,)
        assert torch.equal(changed.image, step(noisy(), rng()).image)

    @every_step
    @pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1)])
    def test_smallest_images(self, step, size):
        sample = Sample(torch.full((3, *size), 9, dtype=torch.uint8), torch.ones(1, *size).byte(), torch.tensor([0]))
        changed = step(sample, rng())
        assert min(changed.size) >= 1
        assert changed.masks.shape[1:] == changed.image.shape[1:]

    @every_step
    def test_as_configured_by_name(self, step):
        adapter: TypeAdapter[Any] = TypeAdapter(AnyAugmentation)
        assert adapter.validate_python(step.model_dump()) == step
        assert adapter.validate_json(step.model_dump_json()) == step
