"""Repeat factors and the epochs they give: by hand, on average, from any step, with any number of processes."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from helpers.coco_files import assert_one_sentence, changed_set
from helpers.small_runs import small_config, small_scenes
from uniquery.data.coco import CocoData
from uniquery.data.sampling import (
    PermutedImages,
    RepeatedImages,
    RepeatFactor,
    StepBatchSampler,
    images_per_epoch,
    repeat_factors,
)
from uniquery.errors import ConfigError
from uniquery.training.batches import training_batches
from uniquery.training.config import load_config
from uniquery.training.run import build_run

FACTORS = np.array([1.0, 2.5, 1.0, 1.3, 3.9, 1.0, 1.0])


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return small_scenes(tmp_path_factory.mktemp("sampling"))


class TestFactors:
    def test_by_hand(self, tmp_path):
        """Image 7 has cell and debris, image 0 dust and cell; crowd regions do not count, nor do images without any."""
        data = changed_set(tmp_path, lambda c: None)
        shares = {"cell": 2 / 4, "debris": 1 / 4, "dust": 1 / 4}
        for threshold in (0.1, 0.3, 0.8):
            root = {name: max(1.0, math.sqrt(threshold / share)) for name, share in shares.items()}
            expected = [max(root["cell"], root["debris"]), max(root["cell"], root["dust"]), 1, 1]
            sampling = RepeatFactor(threshold=threshold)
            np.testing.assert_allclose(repeat_factors(data, sampling), expected)
            assert images_per_epoch(data, sampling) == pytest.approx(sum(expected))
        assert repeat_factors(data, None) is None
        assert images_per_epoch(data, None) == 4

    def test_against_loops_over_the_instances(self, scenes):
        data = CocoData(scenes.annotations("train"), scenes.images("train"))
        present = [{label for label, _ in data.instances(index)} for index in range(len(data))]
        counts = Counter(label for labels in present for label in labels)
        expected = [max([1.0, *(math.sqrt(0.9 * len(data) / counts[label]) for label in ls)]) for ls in present]
        np.testing.assert_allclose(repeat_factors(data, RepeatFactor(threshold=0.9)), expected)


class TestEpochs:
    def test_each_image_as_often_as_its_factor_on_average(self):
        epochs, total = RepeatedImages(FACTORS, seed=3), np.zeros(len(FACTORS))
        for epoch in range(2000):
            counts = np.bincount(epochs.images(epoch)[0], minlength=len(FACTORS))
            assert np.all((counts == np.floor(FACTORS)) | (counts == np.floor(FACTORS) + 1))
            total += counts
        np.testing.assert_allclose(total / 2000, FACTORS, atol=0.03)
        assert np.all(total[FACTORS == 1] == 2000)

    def test_the_first_epoch_is_rounded_by_the_seed(self):
        counts = [np.bincount(RepeatedImages(FACTORS, seed).images(0)[0], minlength=7) for seed in range(2000)]
        np.testing.assert_allclose(np.mean(counts, axis=0), FACTORS, atol=0.04)

    @pytest.mark.parametrize(
        "epochs", [RepeatedImages(FACTORS, 0), RepeatedImages(np.ones(4), 0), PermutedImages(4, 0)]
    )
    def test_lengths_are_known_without_drawing(self, epochs):
        start = 0
        for epoch in range(50):
            assert epochs.start(epoch) == start
            images, repeats = epochs.images(epoch)
            assert all(epochs.epoch_of(start + offset) == epoch for offset in range(len(images)))
            seen: Counter[int] = Counter()
            for image, repeat in zip(images.tolist(), repeats.tolist(), strict=True):
                assert repeat == seen[image]
                seen[image] += 1
            start += len(images)

    def test_factors_of_one_give_permutations(self):
        images, repeats = RepeatedImages(np.ones(9), 5).images(3)
        assert sorted(images.tolist()) == list(range(9))
        assert not repeats.any()

    def test_epochs_and_seeds_differ(self):
        orders = {tuple(RepeatedImages(FACTORS, seed).images(epoch)[0].tolist()) for seed in (0, 1) for epoch in (0, 1)}
        assert len(orders) == 4


class TestSteps:
    def keys(self, batch_size, **options):
        return list(StepBatchSampler(len(FACTORS), batch_size, 4, factors=FACTORS, **options))

    def test_from_any_step(self):
        whole = self.keys(3, last_step=40)
        assert self.keys(3, first_step=17, last_step=40) == whole[17:]

    def test_far_away_at_once(self):
        ((first, *_),) = self.keys(3, first_step=10**12, last_step=10**12 + 1)
        assert first[0] > 10**11

    def test_any_number_of_processes_sees_the_same_images(self):
        alone = self.keys(4, last_step=20)
        ranks = [self.keys(2, last_step=20, rank=rank, ranks=2) for rank in (0, 1)]
        assert [a + b for a, b in zip(*ranks, strict=True)] == alone

    def test_every_key_is_different(self):
        keys = [key for batch in self.keys(5, last_step=60) for key in batch]
        assert len(set(keys)) == len(keys)
        assert {len(key) for key in keys} == {2, 3}


class TestTraining:
    CHANGES = ("data.sampling.name=repeat_factor", "data.sampling.threshold=1.0")

    def batches(self, scenes, folder, steps):
        config = load_config(small_config(folder, scenes), [*self.CHANGES, "train.steps=12"])
        data = CocoData(scenes.annotations("train"), scenes.images("train"))
        run = build_run(config, data)
        return list(training_batches(run, data, steps=steps))

    def test_a_resumed_run_sees_the_same_batches(self, scenes, tmp_path):
        whole, rest = (self.batches(scenes, tmp_path, steps) for steps in ((0, 12), (7, 12)))
        for a, b in zip(whole[7:], rest, strict=True):
            assert [t.image_id for t in a.targets] == [t.image_id for t in b.targets]
            assert torch.equal(a.images.pixels, b.images.pixels)

    def test_repeated_images_are_augmented_anew(self, scenes, tmp_path):
        seen: dict[int, list[torch.Tensor]] = {}
        for batch in self.batches(scenes, tmp_path, (0, 12)):
            for target, pixels in zip(batch.targets, batch.images.pixels, strict=True):
                seen.setdefault(target.image_id, []).append(pixels)
        for pictures in seen.values():
            assert len(pictures) > 1
            assert not any(torch.equal(a, b) for i, a in enumerate(pictures) for b in pictures[:i])

    def test_epochs_count_repeated_images(self, scenes, tmp_path):
        data = CocoData(scenes.annotations("train"), scenes.images("train"))
        train = ("train", {"epochs": 3, "batch_size": 2})
        plain, repeated = (
            build_run(load_config(small_config(tmp_path, scenes), [train, *changes]), data).steps
            for changes in ((), self.CHANGES)
        )
        assert plain == 9
        assert repeated == round(3 * images_per_epoch(data, RepeatFactor(threshold=1.0)) / 2) > plain

    @pytest.mark.parametrize("threshold", [0, -0.1, 1.5, "often"])
    def test_a_threshold_out_of_range(self, scenes, tmp_path, threshold):
        sampling = ("data.sampling", {"name": "repeat_factor", "threshold": threshold})
        with pytest.raises(ConfigError, match=r"1 mistake:\n") as caught:
            load_config(small_config(tmp_path, scenes), [sampling])
        sentence = str(caught.value).splitlines()[1].strip()
        assert sentence.startswith("data.sampling.threshold: Input should be")
        assert_one_sentence(sentence)

    def test_a_name_alone(self, scenes, tmp_path):
        config = load_config(small_config(tmp_path, scenes), ["data.sampling=repeat_factor"])
        assert config.data.sampling == RepeatFactor(threshold=0.001)
