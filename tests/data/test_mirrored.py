"""Classes that flips turn into one another: found by name, warned about, and swapped in samples and views."""

import json
from dataclasses import replace

import pytest
import torch

from helpers.coco_files import assert_one_sentence
from helpers.samples import painted, rng
from helpers.small_runs import small_config
from helpers.small_segmenters import drawn
from uniquery.data.augment import CopyPaste, Flip, Sample, Transpose, augment
from uniquery.data.dataset import Category
from uniquery.data.mirrored import mirrored_labels, similar_pairs
from uniquery.errors import DataError
from uniquery.querying.equivariance import view_of
from uniquery.querying.transforms import Transform
from uniquery.training import loop
from uniquery.training.batches import load_splits, training_batches
from uniquery.training.config import load_config
from uniquery.training.run import build_run

SWAP = torch.tensor([0, 1, 2, 5, 4, 3])  # `painted` has the labels 5 and 3


@pytest.mark.parametrize(
    ("classes", "pairs"),
    [
        (["left_mirror", "right_mirror"], 1),
        (["Right Hand", "cat", "Left Hand"], 1),
        (["leftHand", "rightHand", "handLeft", "handRight"], 2),
        (["arm-L", "arm-R", "leg-L"], 1),
        (["left 1", "right 2"], 0),
        (["bright", "bleft", "theft", "fright"], 0),
        (["left", "cat"], 0),
        ([], 0),
    ],
)
def test_pairs_are_found_by_name(classes, pairs):
    assert len(similar_pairs(classes)) == pairs


class TestLabels:
    def test_nothing_to_swap(self):
        assert mirrored_labels([Category(1, "a"), Category(2, "b")], []) is None

    def test_stuff_and_things(self):
        categories = [
            Category(i, name, is_thing=i < 3) for i, name in enumerate(("left", "right", "arm", "sea", "sky"))
        ]
        pairs = [("left", "right"), ("sky", "sea")]
        assert mirrored_labels(categories, pairs).tolist() == [1, 0, 2, 4, 3]
        for pair in (("sky", "arm"), ("arm", "sky")):
            with pytest.raises(DataError, match="'arm' is a thing and 'sky' is stuff") as caught:
                mirrored_labels(categories, [("left", "right"), pair])
            assert_one_sentence(caught.value)

    @pytest.mark.parametrize(
        ("pairs", "word"),
        [
            ([("lef", "right")], "Did you mean 'left'"),
            ([("left", "left")], "2 times"),
            ([("left", "right")] * 2, "2 times"),
        ],
    )
    def test_pairs_that_cannot_be(self, pairs, word):
        with pytest.raises(DataError, match=word) as caught:
            mirrored_labels([Category(1, "left"), Category(2, "right")], pairs)
        assert_one_sentence(caught.value)


class TestSamples:
    @pytest.mark.parametrize("mirror", [Flip(p=1), Flip(p=1, axis="vertical"), Transpose(p=1)])
    def test_a_mirror_image_swaps(self, mirror):
        before = painted()
        after = augment(before, [mirror], rng(), None, SWAP)
        assert before.labels.tolist() == [5, 3]
        assert after.labels.tolist() == [3, 5]
        assert augment(before, [mirror], rng()).labels.tolist() == [5, 3]
        assert augment(before, [mirror, Flip(p=1)], rng(), None, SWAP).labels.tolist() == [5, 3]  # a rotation

    @pytest.mark.parametrize("mirror", [Flip(p=0), Transpose(p=0)])
    def test_without_a_flip_nothing_is_swapped(self, mirror):
        assert augment(painted(), [mirror], rng(), None, SWAP).labels.tolist() == [5, 3]

    def test_labels_follow_each_flip(self):
        """The instance painted red is left of the other in the original: label 5 there, 3 where it was flipped."""
        swapped = 0
        for seed in range(20):
            after: Sample = augment(painted(), [Flip(p=0.5)], rng(seed), None, SWAP)
            is_flipped = bool(after.image[0].float().mean(0)[30:].sum() > after.image[0].float().mean(0)[:30].sum())
            assert after.labels.tolist() == ([3, 5] if is_flipped else [5, 3])
            swapped += is_flipped
        assert 4 < swapped < 16

    def test_pasted_instances_too(self):
        base = Sample(painted().image, painted().masks[:0], painted().labels[:0])
        after = augment(base, [Flip(p=1), CopyPaste(p=1)], rng(), lambda _: painted(), SWAP)
        assert set(after.labels.tolist()) <= {3, 5}
        kept = {
            tuple(mask.nonzero()[0].tolist()): int(label) for mask, label in zip(after.masks, after.labels, strict=True)
        }
        flipped = painted().masks.flip(2)
        first = {tuple(flipped[i].nonzero()[0].tolist()): label for i, label in enumerate((3, 5))}
        assert kept.items() <= first.items()
        assert kept


def test_a_flipped_view_has_swapped_labels():
    images, targets = drawn(((64, 64), (64, 64)), (2, 2))
    mirrored = torch.arange(3)
    mirrored[targets[0].labels[0]], other = (targets[0].labels[0] + 1) % 3, (targets[0].labels[0] + 1) % 3
    mirrored[other] = targets[0].labels[0]
    transforms = [Transform(0, 0, 64, 64, flip=True), Transform(0, 0, 64, 64)]
    _, views = view_of(images, targets, transforms, mirrored)
    assert torch.equal(views[0].labels, mirrored[targets[0].labels])
    assert torch.equal(views[1].labels, targets[1].labels)
    _, plain = view_of(images, targets, transforms)
    assert torch.equal(plain[0].labels, targets[0].labels)


def test_a_flipped_view_has_swapped_class_lists():
    images, targets = drawn(((64, 64), (64, 64)), (2, 2))
    targets = [
        replace(target, negative_classes=torch.tensor([1, 2]), not_exhaustive_classes=torch.tensor([0]))
        for target in targets
    ]
    transforms = [Transform(0, 0, 64, 64, flip=True), Transform(0, 0, 64, 64)]
    _, (flipped, same) = view_of(images, targets, transforms, torch.tensor([1, 0, 2]))
    assert flipped.negative_classes.tolist() == [0, 2]
    assert flipped.not_exhaustive_classes.tolist() == [1]
    assert same.negative_classes.tolist() == [1, 2]
    assert same.not_exhaustive_classes.tolist() == [0]


class TestTraining:
    @pytest.fixture
    def config_file(self, scenes, tmp_path):
        """The scenes with two of their classes renamed."""
        file = small_config(tmp_path, scenes)
        for split in ("train", "val"):
            raw = json.loads(scenes.annotations(split).read_text())
            for row, name in zip(raw["categories"], ("left_mirror", "right_mirror"), strict=False):
                row["name"] = name
            (tmp_path / f"{split}.json").write_text(json.dumps(raw))
        return file

    def config(self, config_file, *changes):
        splits = [(f"data.{s}.annotations", str(config_file.with_name(f"{s}.json"))) for s in ("train", "val")]
        return load_config(config_file, [*splits, "train.steps=1", *changes])

    PAIRS = "data.flip_pairs=[[left_mirror, right_mirror]]"

    @pytest.mark.parametrize(
        ("changes", "flips"),
        [
            ([], "data.augment"),
            (["data.augment=[]", "querying.equivariance={}"], "querying.equivariance.flip"),
            (["data.augment=[]"], None),
            (["data.augment=[{op: flip, p: 0}]", "querying.equivariance={flip: 0}"], None),
            ([PAIRS], None),
        ],
    )
    def test_the_warning_names_the_classes(self, config_file, capsys, changes, flips):
        loop.train(self.config(config_file, *changes))
        text = " ".join(capsys.readouterr().out.split())
        assert ("warning: flips" in text) == (flips is not None)
        if flips:
            assert f"warning: flips ({flips}) may turn these classes into one another" in text
            assert (
                "left_mirror and right_mirror. If so, swap them with data.flip_pairs=[[left_mirror, right_mirror]]"
                in text
            )

    def test_batches_and_views_have_swapped_labels(self, config_file):
        flips = "data.augment=[{op: flip, p: 1}]"
        labels = {}
        for name, changes in {"plain": [], "swapped": [self.PAIRS]}.items():
            config = self.config(config_file, flips, "querying.equivariance={flip: 1, crop: null}", *changes)
            data, _ = load_splits(config)
            run = build_run(config, data)
            (batch,) = training_batches(run, data, workers=0)
            labels[name] = torch.cat([t.labels for t in batch.targets])
            assert (run.objective.mirrored is None) == (name == "plain")
        assert torch.equal(labels["swapped"], torch.tensor([1, 0, 2])[labels["plain"]])
        assert not torch.equal(labels["swapped"], labels["plain"])

    def test_it_trains_with_both(self, config_file):
        config = self.config(config_file, self.PAIRS, "querying.equivariance={}", "querying.inter={}")
        assert (loop.train(config) / "last").is_dir()

    def test_an_unknown_class(self, config_file):
        with pytest.raises(DataError, match="Did you mean 'left_mirror'"):
            loop.train(self.config(config_file, "data.flip_pairs=[[leftmirror, right_mirror]]"))
