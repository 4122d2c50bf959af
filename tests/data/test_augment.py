"""Augmentations: image and masks stay together, draws follow the generator, settings are checked."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from helpers.samples import equal, noisy, painted, rng, white
from uniquery.data.augment import (
    AnyAugmentation,
    Color,
    Crop,
    Flip,
    Sample,
    ScaleJitter,
    ShortSide,
    Transpose,
    augment,
    crop,
    random_window,
    resize,
    resize_and_crop,
)


class TestShortSide:
    def test_the_range_is_respected_and_used(self):
        step = ShortSide(range=(20, 24), longest=1000)
        sides = [min(step(noisy(), rng(seed)).size) for seed in range(60)]
        assert set(sides) == {20, 21, 22, 23, 24}

    @pytest.mark.parametrize("size", [(48, 60), (60, 48), (48, 48), (30, 300)])
    def test_shape_is_kept_and_the_long_side_limited(self, size):
        step = ShortSide(range=(40, 80), longest=120)
        for seed in range(20):
            height, width = step(noisy(*size), rng(seed)).size
            assert max(height, width) <= 120
            assert abs(height / width - size[0] / size[1]) < 0.05 * size[0] / size[1]


class TestFlipAndTranspose:
    def test_what_they_do(self):
        sample = noisy()
        assert equal(Flip(p=1)(sample, rng()), Sample(sample.image.flip(2), sample.masks.flip(2), sample.labels))
        vertical = Flip(p=1, axis="vertical")(sample, rng())
        assert equal(vertical, Sample(sample.image.flip(1), sample.masks.flip(1), sample.labels))
        transposed = Transpose(p=1)(sample, rng())
        assert torch.equal(transposed.image[:, 7, 3], sample.image[:, 3, 7])
        assert transposed.size == (60, 48)

    @pytest.mark.parametrize("step", [Flip(p=1), Flip(p=1, axis="vertical"), Transpose(p=1)])
    def test_twice_is_nothing(self, step):
        assert equal(step(step(noisy(), rng()), rng()), noisy())

    @pytest.mark.parametrize("kind", [Flip, Transpose])
    def test_how_often(self, kind):
        def share(p: float) -> float:
            generator = rng()
            return float(np.mean([not equal(kind(p=p)(noisy(4, 4), generator), noisy(4, 4)) for _ in range(300)]))

        assert share(0) == 0
        assert share(1) == 1
        assert abs(share(0.3) - 0.3) < 0.08

    def test_together_they_make_all_eight_poses(self):
        steps = [Flip(), Flip(axis="vertical"), Transpose()]
        generator = rng()
        poses = {augment(noisy(5, 5), steps, generator).image.numpy().tobytes() for _ in range(100)}
        assert len(poses) == 8


class TestCrop:
    def test_it_is_a_window_of_the_image(self):
        sample = noisy()
        for seed in range(20):
            changed = Crop(range=(0.3, 0.9))(sample, rng(seed))
            height, width = changed.size
            windows = sample.image.unfold(1, height, 1).unfold(2, width, 1)  # (3, top, left, h, w)
            found = (windows == changed.image[:, None, None]).all(0).all(-1).all(-1)
            assert found.sum() == 1
            top, left = found.nonzero()[0].tolist()
            assert torch.equal(changed.masks, sample.masks[:, top : top + height, left : left + width])

    def test_range_of_sides(self):
        sizes = np.array([Crop(range=(0.5, 0.8))(noisy(100, 60), rng(seed)).size for seed in range(80)])
        fractions = sizes / [100, 60]
        assert fractions.min() >= 0.49
        assert fractions.max() <= 0.81
        assert (np.ptp(fractions, axis=0) > 0.2).all()
        assert len({tuple(row) for row in (sizes - sizes.mean(0) > 0).tolist()}) == 4  # the sides are drawn apart

    def test_every_place_is_possible_up_to_the_edges(self):
        column = Sample(torch.arange(5).byte().expand(3, 1, 5), torch.ones(1, 1, 5).byte(), torch.tensor([0]))
        assert {int(crop(column, (1, 2), rng(seed)).image[0, 0, 0]) for seed in range(60)} == {0, 1, 2, 3}

    def test_whole_and_never(self):
        assert equal(Crop(range=(1, 1))(noisy(), rng()), noisy())
        assert equal(Crop(p=0, range=(0.1, 0.1))(noisy(), rng()), noisy())

    def test_instances_that_are_cut_away_are_dropped(self):
        sample, kept = painted(), set()
        for seed in range(40):
            changed = augment(sample, [Crop(range=(0.2, 0.4))], rng(seed))
            assert changed.masks.flatten(1).any(1).all()
            assert len(changed.masks) == len(changed.labels)
            kept.add(tuple(changed.labels.tolist()))
        assert {(), (5,), (3,)} <= kept


class TestScaleJitter:
    @pytest.mark.parametrize("size", [(48, 60), (60, 48), (7, 200), (300, 300)])
    def test_size_is_fixed(self, size):
        step = ScaleJitter(range=(0.1, 2.5), size=64)
        assert {step(noisy(*size), rng(seed)).size for seed in range(30)} == {(64, 64)}

    def test_factor_one_fits(self):
        changed = ScaleJitter(range=(1, 1), size=64)(Sample(*white(32, 48)), rng())
        assert (changed.masks[0, :43] == 1).all()  # 64 · 32 / 48
        assert (changed.masks[0, 43:] == 0).all()
        assert (changed.image[:, 43:] == 0).all()

    def test_range_of_factors(self):
        step = ScaleJitter(range=(0.25, 0.75), size=64)
        sides = [int(step(Sample(*white(20, 20)), rng(seed)).masks[0, 0].sum()) for seed in range(80)]
        assert min(sides) >= 16
        assert max(sides) <= 48
        assert max(sides) - min(sides) > 28

    def test_padding_is_right_and_below(self):
        changed = ScaleJitter(range=(0.5, 0.5), size=64)(Sample(*white(20, 20)), rng())
        assert changed.masks[0].nonzero().max(0).values.tolist() == [31, 31]
        assert int(changed.masks.sum()) == 32 * 32

    def test_large_factors_cut_at_random_places(self):
        step = ScaleJitter(range=(2, 2), size=60)
        assert len({step(noisy(), rng(seed)).image.numpy().tobytes() for seed in range(10)}) == 10


class TestColor:
    def test_only_colors_change(self):
        changed = Color()(noisy(), rng())
        assert torch.equal(changed.masks, noisy().masks)
        assert not torch.equal(changed.image, noisy().image)

    def test_zero_strength_is_nothing(self):
        assert equal(Color(brightness=0, contrast=0, saturation=0)(noisy(), rng()), noisy())

    def test_brightness_is_a_factor_in_range(self):
        gray = Sample(torch.full((3, 4, 4), 100, dtype=torch.uint8), torch.zeros(0, 4, 4).byte(), torch.zeros(0).long())
        step = Color(brightness=0.3, contrast=0.9, saturation=0.9)  # which do nothing to an even gray
        values = [step(gray, rng(seed)).image for seed in range(60)]
        assert all(len(image.unique()) == 1 for image in values)
        levels = [int(image[0, 0, 0]) for image in values]
        assert min(levels) >= 70
        assert max(levels) <= 130
        assert max(levels) - min(levels) > 40

    def test_contrast_keeps_the_mean_and_saturation_the_gray(self):
        image = torch.tensor([[[80, 120]]] * 3, dtype=torch.uint8)
        plain = Sample(image, torch.zeros(0, 1, 2).byte(), torch.zeros(0).long())
        flat = Color(brightness=0, contrast=0.9, saturation=0)(plain, rng(1)).image.float()
        assert abs(float(flat.mean()) - 100) < 1
        assert float(flat[0, 0, 1] - flat[0, 0, 0]) != 40
        red = Sample(torch.tensor([150, 100, 50], dtype=torch.uint8)[:, None, None], plain.masks[..., :1], plain.labels)
        changed = Color(brightness=0, contrast=0, saturation=0.9)(red, rng(1)).image.flatten().tolist()
        assert changed[1] == 100
        assert changed[0] - 100 == 100 - changed[2] != 50

    def test_values_do_not_wrap(self):
        extremes = Sample(noisy().image // 255 * 255, noisy().masks, noisy().labels)
        for seed in range(10):
            changed = Color(brightness=0.9, contrast=0.9, saturation=0.9)(extremes, rng(seed)).image
            assert (changed[:, extremes.image.sum(0) == 0].float().mean() < 128).all()


class TestResize:
    def test_same_size_is_nothing(self):
        sample = noisy()
        assert resize(sample, sample.size) is sample

    @pytest.mark.parametrize("factor", [2, 3])
    def test_masks_by_whole_factors(self, factor):
        sample = noisy()
        larger = resize(sample, (48 * factor, 60 * factor))
        assert torch.equal(larger.masks, sample.masks.repeat_interleave(factor, 1).repeat_interleave(factor, 2))
        assert torch.equal(resize(Sample(larger.image, larger.masks, larger.labels), (48, 60)).masks, sample.masks)

    def test_smaller_images_are_averages(self):
        stripes = torch.tensor([0, 0, 0, 200], dtype=torch.uint8).repeat(16).expand(3, 64, 64)
        small = resize(Sample(stripes, torch.zeros(0, 64, 64).byte(), torch.zeros(0).long()), (16, 16)).image
        assert (small[:, :, 2:-2].float() - 50).abs().max() <= 15

    @pytest.mark.parametrize("size", [(20, 32), (131, 7), (97, 211), (48, 60)])
    @pytest.mark.parametrize("share", [0.3, 0.8, 1.0])
    def test_cutting_at_once_is_cutting_afterwards(self, size, share):
        sample = noisy()
        window = random_window(size, (max(1, int(size[0] * share)), max(1, int(size[1] * share))), rng(1))
        at_once, afterwards = resize_and_crop(sample, size, window), resize(sample, size)
        assert torch.equal(at_once.image, afterwards.image[:, *window])
        assert torch.equal(at_once.masks, afterwards.masks[:, *window])

    @pytest.mark.parametrize("size", [(20, 32), (48, 8), (71, 64)])  # widths at which no pixel lies between two
    def test_mirroring_before_and_after_is_the_same(self, size):
        sample = noisy()
        mirrored = resize(Sample(sample.image.flip(2), sample.masks.flip(2), sample.labels), size)
        assert torch.equal(mirrored.masks.flip(2), resize(sample, size).masks)
        assert (mirrored.image.flip(2).int() - resize(sample, size).image.int()).abs().max() <= 1


class TestAugment:
    def test_no_steps_only_drops_the_empty(self):
        sample = painted()
        sample.masks[0] = 0
        kept = augment(sample, [], rng())
        assert kept.labels.tolist() == [3]
        assert torch.equal(kept.masks[0], sample.masks[1])
        assert kept.image is sample.image

    def test_steps_are_applied_in_order(self):
        steps = [Crop(range=(0.5, 0.7)), ShortSide(range=(30, 50), longest=99), Flip(p=0.5)]
        generator, expected = rng(3), painted()
        for step in steps:
            expected = step(expected, generator)
        assert equal(augment(painted(), steps, rng(3)), expected.without_empty())


INF, NAN = float("inf"), float("nan")
WRONG = [
    (ShortSide, {"range": (50, 40)}),
    (ShortSide, {"range": (0, 40)}),
    (ShortSide, {"range": (-5, 40)}),
    (ShortSide, {"range": (40.5, 50)}),
    (ShortSide, {"range": (40, 50, 60)}),
    (ShortSide, {"range": 40}),
    (ShortSide, {"longest": 0}),
    (Flip, {"p": 1.1}),
    (Flip, {"p": -0.1}),
    (Flip, {"p": NAN}),
    (Flip, {"axis": "diagonal"}),
    (Transpose, {"p": 2}),
    (Crop, {"range": (0.9, 0.5)}),
    (Crop, {"range": (0, 0.5)}),
    (Crop, {"range": (0.5, 1.5)}),
    (Crop, {"range": (NAN, 1)}),
    (Crop, {"p": 1.5}),
    (ScaleJitter, {"range": (2, 1)}),
    (ScaleJitter, {"range": (0, 1)}),
    (ScaleJitter, {"range": (-1, 1)}),
    (ScaleJitter, {"range": (0.5, INF)}),
    (ScaleJitter, {"range": (0.5, NAN)}),
    (ScaleJitter, {"size": 0}),
    (Color, {"brightness": 1}),
    (Color, {"contrast": -0.1}),
    (Color, {"saturation": NAN}),
    (Flip, {"probability": 0.5}),
    (Flip, {"op": "crop"}),
]


class TestSettings:
    @pytest.mark.parametrize(("kind", "settings"), WRONG, ids=lambda value: str(getattr(value, "__name__", value)))
    def test_wrong_ones_are_refused(self, kind, settings):
        with pytest.raises(ValidationError):
            kind(**settings)

    def test_unknown_names_are_refused(self):
        with pytest.raises(ValidationError, match="rotate"):
            TypeAdapter(AnyAugmentation).validate_python({"op": "rotate"})

    def test_they_cannot_be_changed_later(self):
        with pytest.raises(ValidationError, match="frozen"):
            Flip().p = 1
