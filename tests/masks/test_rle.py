"""Run lengths against pycocotools, and segmentations that are not what they should be."""

import re
import time
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as reference

from helpers.coco_files import ring, runs
from uniquery.masks import rle

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools


def random_masks(count: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    masks = [rng.random(tuple(rng.integers(1, 40, 2))) < rng.random() for _ in range(count)]
    extremes = [np.zeros((5, 7)), np.ones((5, 7)), np.ones((1, 1)), np.zeros((1, 1)), np.eye(300), ring(24, 32)]
    return [mask.astype(np.uint8) for mask in (*masks, *extremes)]


def annotation_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """What COCO's own `annToMask` does."""
    if isinstance(segmentation, list):
        return reference.decode(reference.merge(reference.frPyObjects(segmentation, height, width)))
    if isinstance(segmentation["counts"], list):
        return reference.decode(reference.frPyObjects(segmentation, height, width))
    return reference.decode(segmentation)


class TestRoundTrip:
    @pytest.mark.parametrize("mask", random_masks())
    def test_encode_and_decode(self, mask):
        encoded = rle.encode(mask)
        assert encoded == {
            "size": list(mask.shape),
            "counts": reference.encode(np.asfortranarray(mask))["counts"].decode(),
        }
        assert np.array_equal(rle.decode(encoded), mask)
        assert rle.decode(encoded).dtype == np.uint8

    @pytest.mark.parametrize("mask", random_masks())
    def test_area_and_box(self, mask):
        encoded = rle.encode(mask)
        assert rle.area(encoded) == mask.sum()
        assert rle.bounding_box(encoded) == tuple(reference.toBbox(reference.encode(np.asfortranarray(mask))))

    def test_any_memory_layout_and_type(self):
        mask = ring(24, 32)
        for same in (mask.astype(bool), np.asfortranarray(mask), np.repeat(mask, 2, 0)[::2], mask.astype(np.int64)):
            assert rle.encode(same) == rle.encode(mask)


class TestFromSegmentation:
    @pytest.mark.parametrize("seed", range(60))
    def test_polygons_are_those_of_coco(self, seed):
        rng = np.random.default_rng(seed)
        height, width = (int(side) for side in rng.integers(1, 60, 2))
        spread = float(rng.choice([40, 40, 150]))  # some reach outside
        parts = int(rng.integers(1, 4))
        polygons = [(rng.random(2 * int(rng.integers(3, 9))) * spread - spread / 4).tolist() for _ in range(parts)]
        ours = rle.from_segmentation(polygons, height, width)
        assert ours["size"] == [height, width]
        assert np.array_equal(rle.decode(ours), annotation_mask(polygons, height, width))

    def test_parts_are_united_not_subtracted(self):
        outer, inner = [0, 0, 10, 0, 10, 10, 0, 10], [2, 2, 5, 2, 5, 5, 2, 5]
        assert rle.from_segmentation([outer, inner], 12, 12) == rle.from_segmentation([outer], 12, 12)
        both = rle.from_segmentation([inner, [20, 20, 25, 20, 25, 25]], 30, 30)
        assert rle.area(both) == sum(
            rle.area(rle.from_polygons([p], 30, 30)) for p in (inner, [20, 20, 25, 20, 25, 25])
        )

    @pytest.mark.parametrize("mask", random_masks(10))
    def test_run_lengths_compressed_or_not(self, mask):
        for segmentation in (rle.encode(mask), {"size": list(mask.shape), "counts": runs(mask)}):
            ours = rle.from_segmentation(segmentation, *mask.shape)
            assert ours == rle.encode(mask)
            assert np.array_equal(rle.decode(ours), annotation_mask(segmentation, *mask.shape))

    def test_run_lengths_keep_holes(self):
        mask = ring(24, 32)
        decoded = rle.decode(rle.from_segmentation({"size": [24, 32], "counts": runs(mask)}, 24, 32))
        assert decoded[5, 7] == 0
        assert decoded[3, 7] == decoded[9, 7] == decoded[5, 4] == decoded[5, 12] == 1

    @pytest.mark.parametrize("counts", [[2, 0, 1, 2, 0, 1], [0, 0, 0, 6], [6, 0, 0], [0, 2, 4, 0]])
    def test_runs_of_nothing(self, counts):
        segmentation = {"size": [2, 3], "counts": counts}
        ours = rle.from_segmentation(segmentation, 2, 3)
        assert np.array_equal(rle.decode(ours), annotation_mask(segmentation, 2, 3))
        assert rle.area(ours) == rle.decode(ours).sum()

    def test_a_polygon_without_area_is_empty_not_wrong(self):
        assert rle.area(rle.from_segmentation([[5, 5, 5, 5, 5, 5]], 10, 10)) == 0

    @pytest.mark.parametrize("far", [1e6, 1e12, 1e300, -1e300, 10**30])
    def test_coordinates_from_far_away_cost_nothing(self, far):
        start = time.process_time()
        mask = rle.decode(rle.from_segmentation([[5, 5, far, 5, far, far]], 50, 50))
        assert time.process_time() - start < 1
        near = 1000 if far > 0 else -1000
        assert np.array_equal(mask, annotation_mask([[5, 5, near, 5, near, near]], 50, 50))


WRONG = {
    "nothing": (None, "missing"),
    "text": ("0", "of type str"),
    "number": (3, "of type int"),
    "no polygon": ([], "no polygon"),
    "a flat list": ([1, 2, 3, 4, 5, 6], "not a list of numbers"),
    "an empty polygon": ([[]], "0 points"),
    "two points": ([[1, 2, 3, 4]], "2 points"),
    "second polygon with two points": ([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]], "2 points"),
    "five numbers": ([[1, 2, 3, 4, 5]], "2.5 points"),
    "odd": ([[1, 2, 3, 4, 5, 6, 7]], "odd number of coordinates (7)"),
    "nan": ([[1, 2, 3, 4, 5, float("nan")]], "not a finite number"),
    "infinite": ([[1, 2, 3, 4, 5, float("-inf")]], "not a finite number"),
    "beyond floats": ([[1, 2, 3, 4, 5, 10**400]], "not a finite number"),
    "beyond floats, below": ([[1, 2, 3, 4, 5, -(10**400)]], "not a finite number"),
    "bool": ([[1, 2, 3, 4, 5, True]], "not a finite number"),
    "text inside": ([[1, 2, 3, 4, 5, "6"]], "not a finite number"),
    "points": ([[[1, 2], [3, 4], [5, 6]]], "not a finite number"),
    "no size": ({"counts": [25]}, "lack 'size'"),
    "no counts": ({"size": [5, 5]}, "or 'counts'"),
    "empty": ({}, "lack"),
    "other size": ({"size": [4, 5], "counts": [20]}, "for [4, 5] but the image is [5, 5]"),
    "size is a number": ({"size": 25, "counts": [25]}, "for 25"),
    "size is text": ({"size": "55", "counts": [25]}, "for '55'"),
    "size is a table": ({"size": {"h": 5, "w": 5}, "counts": [25]}, "image is [5, 5]"),
    "size is long": ({"size": [5] * 10**5, "counts": [25]}, "image is [5, 5]"),
    "too few": ({"size": [5, 5], "counts": [10, 10]}, "add up to 20 pixels but the image has 25"),
    "too many": ({"size": [5, 5], "counts": [10, 16]}, "add up to 26 pixels"),
    "none": ({"size": [5, 5], "counts": []}, "add up to 0 pixels"),
    "far too many": ({"size": [5, 5], "counts": [2**32 + 25]}, "add up to"),
    "negative": ({"size": [5, 5], "counts": [30, -10, 5]}, "whole numbers"),
    "fractions": ({"size": [5, 5], "counts": [12.5, 12.5]}, "whole numbers"),
    "truths": ({"size": [5, 5], "counts": [True, 24]}, "whole numbers"),
    "nested": ({"size": [5, 5], "counts": [[25]]}, "whole numbers"),
    "a number for counts": ({"size": [5, 5], "counts": 25}, "whole numbers"),
    "a table for counts": ({"size": [5, 5], "counts": {"a": 25}}, "whole numbers"),
    "compressed, empty": ({"size": [5, 5], "counts": ""}, "add up to 0 pixels"),
    "compressed, too many": ({"size": [5, 5], "counts": "j0"}, "add up to 26 pixels"),
    "compressed, two runs too many": ({"size": [5, 5], "counts": "i05"}, "add up to 30 pixels"),
    "compressed, cut off": ({"size": [5, 5], "counts": "i"}, "cut off"),
    "compressed, negative": ({"size": [5, 5], "counts": "OZ1"}, "whole numbers"),
    "compressed, foreign": ({"size": [5, 5], "counts": "i 0"}, "not COCO's"),
    "compressed, not ascii": ({"size": [5, 5], "counts": "\u00e9" * 2}, "not COCO's"),
    "compressed, beyond bytes": ({"size": [5, 5], "counts": "\u20ac"}, "not COCO's"),
    "compressed, half a character": ({"size": [5, 5], "counts": "\ud83d"}, "not COCO's"),
    "compressed, endless digit": ({"size": [5, 5], "counts": "o" * 10**6 + "0"}, "not COCO's"),
    "compressed, 64 bits": ({"size": [5, 5], "counts": "i" + "P" * 13 + "0"}, "not COCO's"),
}


class TestWrong:
    @pytest.mark.parametrize(("segmentation", "says"), WRONG.values(), ids=WRONG.keys())
    def test_is_told_as_part_of_a_sentence(self, segmentation, says):
        start = time.process_time()
        with pytest.raises(ValueError, match=re.escape(says)) as caught:
            rle.from_segmentation(segmentation, 5, 5)
        assert time.process_time() - start < 1
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)
        assert not str(caught.value).endswith(".")

    @pytest.mark.parametrize("segmentation", [[[1, 2, 3, 4, 5, 9]], {"size": [10**9, 10**9], "counts": [10**18]}])
    def test_absurd_images_are_refused_unallocated(self, segmentation):
        with pytest.raises(ValueError, match="too large"):
            rle.from_segmentation(segmentation, 10**9, 10**9)

    def test_random_text_is_decoded_exactly_or_refused(self):
        """Whatever is accepted has the right number of pixels and is read alike by pycocotools."""
        rng = np.random.default_rng(0)
        accepted = 0
        for _ in range(3000):
            text = "".join(chr(c) for c in rng.integers(48, 112, int(rng.integers(1, 4))))
            try:
                ours = rle.from_segmentation({"size": [3, 4], "counts": text}, 3, 4)
            except ValueError:
                continue
            accepted += 1
            assert np.array_equal(rle.decode(ours), reference.decode({"size": [3, 4], "counts": text}))
        assert accepted > 20

    def test_every_cut_of_a_mask_is_refused(self):
        whole = rle.encode(ring(24, 32))
        for end in range(len(whole["counts"])):
            with pytest.raises(ValueError, match="its"):
                rle.from_segmentation({**whole, "counts": whole["counts"][:end]}, 24, 32)
