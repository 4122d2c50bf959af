"""Batches: which samples, from which process, padded how; the same whatever the number of workers."""

from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from helpers.coco_files import assert_one_sentence, pixels, sound, write_json, write_set
from uniquery.data.augment import Color, Crop, Flip, Sample, ScaleJitter, ShortSide, image_only
from uniquery.data.batch import (
    Batch,
    EvaluationSamples,
    LoadedSample,
    TrainingSamples,
    collate,
    mask_boxes,
    raise_errors,
)
from uniquery.data.coco import CocoData
from uniquery.data.sampling import StepBatchSampler
from uniquery.errors import DataError
from uniquery.structures import SIZE_DIVISIBILITY

STEPS = [Flip(), Crop(range=(0.5, 1.0)), ShortSide(range=(20, 50), longest=80), Color()]


@pytest.fixture
def data(tmp_path) -> CocoData:
    return CocoData(*write_set(tmp_path))


def item(height: int, width: int, instances: int = 2, image_id: int = 5) -> LoadedSample:
    rng = np.random.default_rng([height, width])
    image = torch.from_numpy(rng.integers(1, 256, (3, height, width), dtype=np.uint8))
    masks = torch.from_numpy((rng.random((instances, height, width)) < 0.1).astype(np.uint8))
    masks[:, -1, -1] = 1  # the last pixel is the first to suffer from wrong padding
    return LoadedSample(Sample(image, masks, torch.arange(instances)), image_id, (height * 2, width * 2))


def same(a: Batch, b: Batch) -> bool:
    targets = zip(a.targets, b.targets, strict=True)
    return (
        torch.equal(a.images.pixels, b.images.pixels)
        and a.images.sizes == b.images.sizes
        and a.original_sizes == b.original_sizes
        and all(
            s.image_id == t.image_id
            and all(torch.equal(getattr(s, n), getattr(t, n)) for n in ("labels", "boxes", "masks"))
            for s, t in targets
        )
    )


def drawn(data: CocoData, workers: int, steps: int = 8, first: int = 0) -> list[Batch]:
    sampler = StepBatchSampler(len(data), 3, 0, first_step=first, last_step=steps)
    loader: DataLoader = DataLoader(
        TrainingSamples(data, STEPS, seed=1), batch_sampler=sampler, num_workers=workers, collate_fn=collate
    )
    return list(raise_errors(loader))


class TestEndlessBatches:
    def keys(self, images: int, batch: int, steps: int, **more) -> list[list[tuple[int, int]]]:
        return list(StepBatchSampler(images, batch, 0, last_step=steps, **more))

    def test_each_epoch_is_a_permutation(self):
        flat = [key for batch in self.keys(7, 3, 14) for key in batch]
        assert [epoch for epoch, _ in flat] == sorted(epoch for epoch, _ in flat)
        orders = [[index for e, index in flat if e == epoch] for epoch in range(6)]
        assert all(sorted(order) == list(range(7)) for order in orders)
        assert len({tuple(order) for order in orders}) == 6

    def test_batches_cross_epochs_and_are_all_full(self):
        batches = self.keys(7, 3, 14)
        assert {len(batch) for batch in batches} == {3}
        assert [epoch for epoch, _ in batches[2]] == [0, 1, 1]

    def test_batches_larger_than_the_data(self):
        (batch,) = self.keys(2, 7, 1)
        assert [epoch for epoch, _ in batch] == [0, 0, 1, 1, 2, 2, 3]

    def test_one_image(self):
        assert self.keys(1, 2, 2) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]

    @pytest.mark.parametrize("start", [0, 1, 5, 13, 14])
    def test_starting_late_is_skipping(self, start):
        assert self.keys(7, 3, 14, first_step=start) == self.keys(7, 3, 14)[start:]

    def test_starting_late_needs_no_replay(self):
        sampler = StepBatchSampler(5, 2, 0, first_step=10**9, last_step=10**9 + 1)
        assert len(list(sampler)) == 1

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_processes_share_the_sequence(self, ranks):
        parts = [self.keys(7, 2, 8, rank=rank, ranks=ranks) for rank in range(ranks)]
        whole = self.keys(7, 2 * ranks, 8)
        assert [[*chain(*batches)] for batches in zip(*parts, strict=True)] == whole

    def test_length_and_repetition(self):
        sampler = StepBatchSampler(7, 3, 0, first_step=2, last_step=9)
        assert len(sampler) == len(list(sampler)) == 7
        assert list(sampler) == list(sampler)

    def test_the_seed_decides(self):
        first, second = (list(StepBatchSampler(20, 4, seed, last_step=5)) for seed in (0, 1))
        assert first != second
        assert first == list(StepBatchSampler(20, 4, 0, last_step=5))


class TestTrainingSamples:
    def test_a_sample_follows_from_seed_epoch_and_image(self, data):
        items = TrainingSamples(data, STEPS, seed=1)
        batches = {key: collate([items[key]]) for key in ((0, 0), (0, 1), (1, 0))}
        assert all(same(batch, collate([items[key]])) for key, batch in batches.items())
        assert not same(batches[0, 0], batches[1, 0])
        assert not same(batches[0, 0], collate([TrainingSamples(data, STEPS, seed=2)[0, 0]]))

    def test_without_steps_it_is_the_image(self, data):
        one = TrainingSamples(data, [], seed=0)[0, 0]
        assert one.image_id == 7
        assert one.original_size == one.sample.size == (24, 32)
        assert np.array_equal(one.sample.image.permute(1, 2, 0), pixels("a.png", 24, 32))
        assert torch.equal(one.sample.masks, data.load(0).masks)
        assert one.sample.labels.tolist() == data.load(0).labels.tolist()

    def test_the_original_size_is_before_augmentation(self, data):
        one = TrainingSamples(data, [ScaleJitter(size=40)], seed=0)[0, 0]
        assert one.sample.size == (40, 40)
        assert one.original_size == (24, 32)


class TestWorkers:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_their_number_does_not_matter(self, data, workers):
        alone, together = drawn(data, 0), drawn(data, workers)
        assert len(alone) == len(together) == 8
        assert all(same(a, b) for a, b in zip(alone, together, strict=True))

    def test_nor_where_the_run_was_resumed(self, data):
        assert all(same(a, b) for a, b in zip(drawn(data, 0)[5:], drawn(data, 0, first=5), strict=True))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_evaluation_reads_each_image_once_in_order(self, data, workers):
        loader: DataLoader = DataLoader(EvaluationSamples(data, 40, 60), 2, num_workers=workers, collate_fn=collate)
        batches = list(raise_errors(loader))
        assert [t.image_id for batch in batches for t in batch.targets] == [7, 0, 11, 3]
        assert [size for batch in batches for size in batch.original_sizes] == [(24, 32), (30, 20), (16, 18), (24, 32)]
        assert [size for batch in batches for size in batch.images.sizes] == [(40, 53), (60, 40), (40, 45), (40, 53)]
        assert all(len(t) == 0 for batch in batches for t in batch.targets)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_broken_file_is_one_sentence_from_any_process(self, data, workers):
        (data.image_root / "sub" / "b.jpg").write_bytes(b"broken")
        for items in (TrainingSamples(data, STEPS, 0), EvaluationSamples(data, 40, 60)):
            keys = [[(0, i)] if isinstance(items, TrainingSamples) else [i] for i in range(4)]
            loader: DataLoader = DataLoader(items, batch_sampler=keys, num_workers=workers, collate_fn=collate)
            batches = raise_errors(loader)
            assert len(list(islice(batches, 1))) == 1
            with pytest.raises(DataError, match=r"b\.jpg") as caught:
                next(batches)
            assert_one_sentence(caught.value)


class TestCollate:
    @pytest.mark.parametrize(
        ("sizes", "padded"),
        [
            ([(32, 64)], (32, 64)),
            ([(33, 64)], (64, 64)),
            ([(1, 1)], (32, 32)),
            ([(20, 70), (40, 30)], (64, 96)),
            ([(31, 32), (32, 31), (7, 7)], (32, 32)),
        ],
    )
    def test_padding(self, sizes, padded):
        items = [item(*size) for size in sizes]
        batch = collate(items)
        assert SIZE_DIVISIBILITY == 32
        assert batch.images.pixels.shape == (len(sizes), 3, *padded)
        assert batch.images.pixels.dtype == torch.uint8
        assert batch.images.sizes == tuple(sizes)
        assert batch.original_sizes == [(2 * h, 2 * w) for h, w in sizes]
        assert len(batch.images) == len(batch.targets) == len(sizes)
        for i, (height, width) in enumerate(sizes):
            expected = torch.zeros(3, *padded, dtype=torch.uint8)
            expected[:, :height, :width] = items[i].sample.image
            assert torch.equal(batch.images.pixels[i], expected)
            masks = torch.zeros(2, *padded, dtype=torch.bool)
            masks[:, :height, :width] = items[i].sample.masks.bool()
            assert torch.equal(batch.targets[i].masks, masks)
            assert batch.targets[i].masks.dtype == torch.bool

    def test_targets(self):
        (target,) = collate([item(20, 24, instances=3, image_id=77)]).targets
        assert target.image_id == 77
        assert target.labels.tolist() == [0, 1, 2]
        assert target.boxes.shape == (3, 4)
        assert target.boxes[:, 2:].tolist() == [[24, 20]] * 3
        assert target.valid is None

    def test_images_without_instances(self):
        batch = collate([item(20, 24, instances=0), item(10, 10, instances=1)])
        assert batch.targets[0].masks.shape == (0, 32, 32)
        assert batch.targets[0].boxes.shape == (0, 4)
        assert batch.targets[0].labels.dtype == torch.int64
        assert len(batch.targets[1]) == 1

    def test_the_first_error_stands_for_the_batch(self):
        first, second = DataError("first"), DataError("second")
        assert collate([item(5, 5), first, second]) is first
        with pytest.raises(DataError, match="first"):
            list(raise_errors([collate([item(5, 5)]), first]))

    def test_moves_as_a_whole(self):
        batch = collate([item(20, 24)])
        moved = batch.to(torch.device("meta"))
        assert moved.images.pixels.is_meta
        assert moved.targets[0].masks.is_meta
        assert moved.images.sizes == batch.images.sizes
        assert moved.original_sizes == batch.original_sizes


class TestMaskBoxes:
    def naive(self, masks: torch.Tensor) -> list[list[float]]:
        boxes = []
        for mask in masks:
            points = [(x, y) for y in range(mask.shape[0]) for x in range(mask.shape[1]) if mask[y, x]]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            boxes.append([float(min(xs)), float(min(ys)), max(xs) + 1.0, max(ys) + 1.0])
        return boxes

    @pytest.mark.parametrize("seed", range(5))
    def test_as_the_naive_version(self, seed):
        generator = torch.Generator().manual_seed(seed)
        height, width = torch.randint(1, 14, (2,), generator=generator).tolist()
        masks = torch.rand(20, height, width, generator=generator) < 0.05
        masks[torch.arange(20), torch.randint(height, (20,), generator=generator), 0] = True
        masks = masks.flip(2) if seed % 2 else masks
        boxes = mask_boxes(masks)
        assert boxes.dtype == torch.float32
        assert boxes.tolist() == self.naive(masks)

    def test_limits(self):
        assert mask_boxes(torch.ones(1, 3, 5).bool()).tolist() == [[0, 0, 5, 3]]
        assert mask_boxes(torch.ones(1, 1, 1).bool()).tolist() == [[0, 0, 1, 1]]
        assert mask_boxes(torch.zeros(0, 3, 5).bool()).shape == (0, 4)


class TestLoading:
    def test_image_only(self):
        sample = image_only(pixels("x", 5, 7))
        assert sample.size == (5, 7)
        assert sample.masks.shape == (0, 5, 7)
        assert sample.labels.dtype == torch.int64
        assert np.array_equal(sample.image.permute(1, 2, 0), pixels("x", 5, 7))

    def test_load_sample_without_annotations(self, tmp_path):
        content = {**sound(), "annotations": []}
        _, images = write_set(tmp_path, content)
        data = CocoData(write_json(tmp_path, content), images)
        assert [len(data.load(i).masks) for i in range(4)] == [0, 0, 0, 0]
        assert all(len(t) == 0 for batch in drawn(data, 0) for t in batch.targets)
