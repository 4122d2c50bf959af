"""Every kind of error by hand, and all of them against the definitions on dense masks."""

import numpy as np
import pytest

from helpers.naive_errors import naive_boundary_iou, naive_errors
from uniquery.errors import DataError
from uniquery.evaluation.error_summary import ALL, results_by_image, summarize_errors, truth_by_image
from uniquery.evaluation.errors import INSTANCE_KINDS, PREDICTION_KINDS, boundary_iou, image_errors
from uniquery.evaluation.instance_traits import TRAITS, instance_traits
from uniquery.masks import rle

SIZE = 48


def box(x, y, width, height):
    mask = np.zeros((SIZE, SIZE), bool)
    mask[y : y + height, x : x + width] = True
    return mask


def encoded(side):
    return [(label, rle.encode(mask)) for label, mask in side]


def kinds(instances, predicted, **options):
    if "crowds" in options:
        options["crowds"] = encoded(options["crowds"])
    errors = image_errors(encoded(instances), encoded(predicted), **options)
    return [one.kind for one in errors.instances], [one.kind for one in errors.predictions]


LEFT, RIGHT = box(4, 4, 16, 16), box(20, 4, 16, 16)
FAR = box(4, 30, 10, 10)


@pytest.mark.parametrize(
    ("instances", "predicted", "expected"),
    [
        ([(0, LEFT)], [(0, LEFT)], (["correct"], ["correct"])),
        ([(0, LEFT)], [], (["missed"], [])),
        ([], [(0, LEFT)], ([], ["background"])),
        ([(0, LEFT)], [(0, FAR)], (["missed"], ["background"])),
        ([(0, LEFT)], [(1, LEFT)], (["wrong class"], ["wrong class"])),
        ([(0, LEFT)], [(0, LEFT), (1, LEFT)], (["correct"], ["correct", "wrong class"])),
        ([(0, LEFT)], [(0, LEFT), (0, LEFT)], (["correct"], ["correct", "duplicate"])),
        ([(0, LEFT)], [(0, LEFT), (0, box(6, 6, 3, 3))], (["correct"], ["correct", "duplicate"])),
        # One mask over both, of which IoU with the larger is above one half.
        ([(0, LEFT), (0, box(20, 4, 10, 16))], [(0, box(4, 4, 26, 16))], (["leaked", "merged"], ["leaked"])),
        # One mask over both and more, which finds neither.
        ([(0, LEFT), (0, RIGHT)], [(0, box(2, 0, 36, 24))], (["merged", "merged"], ["merged"])),
        # Two of another class are not merged by it.
        ([(1, LEFT), (0, RIGHT)], [(0, box(2, 0, 36, 24))], (["missed", "leaked"], ["leaked"])),
        ([(0, LEFT)], [(0, box(4, 4, 7, 16)), (0, box(13, 4, 7, 16))], (["split"], ["split", "split"])),
        # Pieces that cover less than a half, and a piece alone.
        ([(0, LEFT)], [(0, box(4, 4, 3, 16)), (0, box(17, 4, 3, 16))], (["poor mask"], ["poor mask"] * 2)),
        ([(0, LEFT)], [(0, box(4, 4, 6, 16))], (["poor mask"], ["poor mask"])),
        ([(0, LEFT), (1, RIGHT)], [(0, box(4, 4, 20, 16)), (1, RIGHT)], (["leaked", "correct"], ["leaked", "correct"])),
        # A tenth is the limit: 2 of 18 columns are more, 1 of 17 is less.
        ([(0, LEFT), (1, RIGHT)], [(0, box(4, 4, 18, 16))], (["leaked", "missed"], ["leaked"])),
        ([(0, LEFT), (1, RIGHT)], [(0, box(4, 4, 17, 16))], (["correct", "missed"], ["correct"])),
        # What both instances cover is the found one's own.
        ([(0, LEFT), (1, box(12, 4, 8, 16))], [(0, LEFT)], (["correct", "missed"], ["correct"])),
    ],
)
def test_by_hand(instances, predicted, expected):
    assert kinds(instances, predicted) == expected
    assert naive_errors(instances, predicted) == expected


def test_crowds_and_unlabeled_classes_are_ignored():
    assert kinds([], [(0, LEFT), (1, LEFT)], crowds=[(0, box(0, 0, 48, 48))]) == ([], ["ignored", "background"])
    assert kinds([], [(0, LEFT), (1, LEFT)], labeled_classes={1}) == ([], ["ignored", "background"])
    # What finds an instance counts all the same.
    assert kinds([(0, LEFT)], [(0, LEFT)], crowds=[(0, LEFT)], labeled_classes={}) == (["correct"], ["correct"])


def test_indices_point_at_each_other():
    errors = image_errors(encoded([(0, FAR), (0, LEFT)]), encoded([(0, LEFT), (0, LEFT), (1, FAR)]))
    assert [one.prediction for one in errors.instances] == [2, 0]
    assert [one.instance for one in errors.predictions] == [1, 1, 0]
    assert [one.boundary_iou for one in errors.instances] == [None, 1.0]


def random_image(rng):
    """Rectangles near each other, and predictions that are moved, cut, joined, repeated or of another class."""

    def draw():
        x, y, width, height = rng.integers([0, 0, 3, 3], [36, 36, 18, 18]).tolist()
        return box(x, y, width, height)

    instances = [(int(rng.integers(2)), draw()) for _ in range(rng.integers(5))]
    predicted = []
    for label, mask in instances:
        for _ in range(rng.integers(3)):
            change = rng.integers(5)
            other = instances[int(rng.integers(len(instances)))][1]
            moved = np.roll(mask, rng.integers(-3, 4, 2), (0, 1))
            shape = [mask, moved, moved & draw(), mask | other, moved | draw()][change]
            predicted.append((label if rng.random() < 0.8 else 1 - label, shape))
    predicted += [(int(rng.integers(2)), draw()) for _ in range(rng.integers(2))]
    rng.shuffle(predicted)
    crowds = [(int(rng.integers(2)), draw())] if rng.random() < 0.3 else []
    return instances, predicted, crowds


def test_all_kinds_are_those_of_the_definitions():
    rng, seen = np.random.default_rng(0), [set(), set()]
    for _ in range(3000):
        instances, predicted, crowds = random_image(rng)
        found = kinds(instances, predicted, crowds=crowds)
        assert found == naive_errors(instances, predicted, crowds)
        for names, side in zip(seen, found, strict=True):
            names.update(side)
    assert seen == [set(INSTANCE_KINDS), set(PREDICTION_KINDS)]


def test_boundary_iou_is_that_of_repeated_erosion():
    rng = np.random.default_rng(1)
    for _ in range(20):
        first, second = (rng.random((2, 90, 120)) < 0.02).cumsum(1).cumsum(2) % 7 < 4
        assert boundary_iou(rle.encode(first), rle.encode(second)) == pytest.approx(naive_boundary_iou(first, second))
    assert boundary_iou(rle.encode(LEFT), rle.encode(RIGHT)) == 0
    assert boundary_iou(rle.encode(LEFT & RIGHT), rle.encode(LEFT & RIGHT)) == 1


class TestTraits:
    def groups(self, *masks):
        return [one.groups for one in instance_traits([rle.encode(mask) for mask in masks])]

    @pytest.mark.parametrize(("side", "size"), [(31, "small"), (32, "medium"), (96, "medium"), (97, "large")])
    def test_sizes_are_coco_s(self, side, size):
        assert self.groups(np.pad(np.ones((side, side), bool), 4))[0]["size"] == size

    def test_neighbors_have_boxes_that_touch(self):
        masks = [LEFT, RIGHT, box(4, 20, 4, 4), box(10, 20, 4, 4), box(44, 44, 2, 2)]
        names = [one["crowding"] for one in self.groups(*masks)]
        few, many, none = "1 or 2 neighbors", "3 or more", "no neighbor"
        assert names == [many, few, few, few, none]  # boxes meet at a corner too: RIGHT's does not reach the third

    def test_occlusion_is_the_share_of_the_outline_that_others_touch(self):
        left, right, far = instance_traits([rle.encode(mask) for mask in (LEFT, RIGHT, FAR)])
        assert left.contact == pytest.approx(16 / 68)  # around a square of 16 are 4 × 16 + 4 pixels
        assert far.contact == 0
        assert [one.groups["occlusion"] for one in (left, right, far)] == ["touched", "touched", "free"]
        assert self.groups(LEFT, RIGHT, box(4, 20, 16, 4))[0]["occlusion"] == "heavily"

    def test_at_the_edge_of_the_image_only_pixels_inside_count(self):
        (one, _) = instance_traits([rle.encode(box(0, 0, 10, SIZE)), rle.encode(box(10, 0, 4, SIZE))])
        assert one.contact == 1

    def test_holes_and_parts(self):
        ring, speck = LEFT & ~box(8, 8, 4, 4), LEFT & ~box(8, 8, 1, 1)
        open_ring = ring & ~box(8, 4, 2, 6)
        dots = LEFT | box(30, 30, 1, 1)
        diagonal = box(4, 4, 8, 8) | box(12, 12, 8, 8)
        names = [self.groups(mask)[0]["holes and parts"] for mask in (ring, speck, open_ring, dots, diagonal)]
        assert names == ["with holes", "one part", "one part", "one part", "one part"]
        (both,) = instance_traits([rle.encode(ring | RIGHT | FAR)])
        assert (both.parts, both.holes, both.groups["holes and parts"]) == (2, 1, "several parts")

    def test_an_empty_mask(self):
        (one,) = instance_traits([rle.encode(LEFT & RIGHT)])
        assert (one.area, one.parts, one.holes, one.contact) == (0, 0, 0, 0)
        assert instance_traits([]) == []


class TestSummary:
    def data(self):
        images = [{"id": i, "height": SIZE, "width": SIZE} for i in (3, 7)]
        base = {"category_id": 5, "iscrowd": 0}
        annotations = [
            {"id": 1, "image_id": 3, "segmentation": rle.encode(LEFT), **base},
            {"id": 2, "image_id": 3, "segmentation": rle.encode(RIGHT), **base},
            {"id": 3, "image_id": 7, "segmentation": rle.encode(FAR), **base, "iscrowd": 1},
        ]
        categories = [{"id": 5, "name": "cell"}, {"id": 9, "name": "dust"}]
        truth = {"images": images, "categories": categories, "annotations": annotations}
        result = {"image_id": 3, "category_id": 5, "segmentation": rle.encode(LEFT), "score": 0.8}
        return truth, result

    def summary(self, truth, results, **options):
        return summarize_errors(truth_by_image(truth), results_by_image(results, truth, **options))

    def test_counts_and_shares(self):
        truth, result = self.data()
        weak = {**result, "segmentation": rle.encode(RIGHT), "score": 0.4}
        crowd = {**result, "image_id": 7, "segmentation": rle.encode(FAR)}
        summary = self.summary(truth, [weak, result, crowd])
        assert summary.predictions == {"correct": 1, "ignored": 1}
        assert summary.count() == summary.count(("size", "small")) == 2
        assert summary.count(("size", "large")) == 0
        assert summary.share("missed") == 50
        assert summary.share("missed", ("size", "large")) is None
        assert summary.mean_boundary_iou() == 100
        assert summary.mean_boundary_iou(("size", "large")) is None
        assert all(sum(summary.count((trait, g)) for g in groups) == 2 for trait, groups in TRAITS.items())
        assert self.summary(truth, [weak, result], score_thresholds={5: 0.3}).share("correct", ALL) == 100

    def test_the_best_score_comes_first(self):
        truth, result = self.data()
        near = {**result, "segmentation": rle.encode(LEFT | box(4, 20, 8, 8)), "score": 0.9}
        image = truth_by_image(truth)[3].errors(results_by_image([result, near], truth)[3])
        assert image.instances[0].boundary_iou < 1
        assert [one.kind for one in image.predictions] == ["correct", "duplicate"]

    def test_classes_that_an_lvis_image_is_not_labeled_for(self):
        truth, result = self.data()
        truth["images"][1] |= {"neg_category_ids": [9], "not_exhaustive_category_ids": []}
        truth["images"][0] |= {"neg_category_ids": [], "not_exhaustive_category_ids": [5]}
        others = [{**result, "category_id": c, "image_id": i} for i, c in ((7, 9), (3, 9))]
        extra = {**result, "segmentation": rle.encode(FAR)}
        assert self.summary(truth, [result, extra, *others]).predictions == {
            "correct": 1,
            "background": 1,
            "ignored": 2,
        }

    def test_a_wrong_result_is_named(self):
        truth, result = self.data()
        with pytest.raises(DataError, match="image id 4 is not in the ground truth"):
            results_by_image([{**result, "image_id": 4}], truth)
