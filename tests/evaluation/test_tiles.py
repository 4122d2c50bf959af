"""Tiles: every pixel has one core, and joined instances are those of the whole image."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.small_segmenters import small
from uniquery.data.windows import WindowedImage
from uniquery.errors import ConfigError
from uniquery.evaluation.agreement import disagreement, match_instances
from uniquery.evaluation.tiles import Tiling, cut, predict_tiles, seam_error
from uniquery.masks import rle
from uniquery.masks.paste import rle_boxes
from uniquery.model import Model
from uniquery.structures import Instances

from helpers.exported import info_of  # isort: skip


def instances_of(masks, labels=None, scores=None) -> Instances:
    rles = [rle.encode(mask) for mask in masks]
    count = len(rles)
    return Instances(
        torch.tensor(scores or [0.9 - 0.01 * i for i in range(count)]),
        torch.tensor(labels or [0] * count, dtype=torch.int64),
        rle_boxes(rles),
        rles,
        tuple(masks[0].shape) if count else (1, 1),
    )


def find_gray(array) -> Instances:
    """A perfect segmenter: each gray value above 0 is an instance; its class is whether the value is odd."""
    gray = array[..., 0]
    values = [int(value) for value in np.unique(gray) if value]
    found = instances_of([gray == value for value in values] or [gray > 0], [value % 2 for value in values] or [0])
    return found if values else found[:0]


def discs(size, count, radius, seed=0):
    """A gray image of discs that do not touch, and its discs."""
    rng = np.random.default_rng(seed)
    gray = np.zeros(size, np.uint8)
    ys, xs = np.mgrid[: size[0], : size[1]]
    value = 0
    while value < count:
        y, x, r = rng.integers(0, size[0]), rng.integers(0, size[1]), rng.integers(radius[0], radius[1])
        near = (ys - y) ** 2 + (xs - x) ** 2 <= (r + 2) ** 2
        if not gray[near].any():
            value += 1
            gray[(ys - y) ** 2 + (xs - x) ** 2 <= r**2] = value
    return np.repeat(gray[..., None], 3, axis=2)


def tiled(image, tiling, predict=find_gray):
    return predict_tiles(predict, WindowedImage(Image.fromarray(image)), tiling)


class TestCut:
    @pytest.mark.parametrize("size", [(64, 64), (100, 231), (33, 500), (1000, 64)])
    @pytest.mark.parametrize("shift", [0, 25])
    def test_cores_cover_each_pixel_once_and_lie_in_their_tiles(self, size, shift):
        tiling, seen = Tiling(64, 0.2, shift), np.zeros(size, int)
        for tile in cut(size, tiling):
            (x0, y0, x1, y1), (a, b, c, d) = tile.box, tile.core
            assert x0 <= a < c <= x1 <= size[1]
            assert y0 <= b < d <= y1 <= size[0]
            assert max(x1 - x0, y1 - y0) <= 64
            seen[b:d, a:c] += 1
        assert (seen == 1).all()

    def test_tiles_overlap_at_least_as_asked(self):
        starts = Tiling(100, 0.3).starts(1234)
        assert starts[-1] == 1134
        assert max(np.diff(starts)) <= 70

    @pytest.mark.parametrize(("side", "overlap"), [(16, 0.2), (64, 0.0), (64, 0.6)])
    def test_values_out_of_range(self, side, overlap):
        with pytest.raises(ConfigError):
            Tiling(side, overlap)


class TestJoining:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("side", [64, 96])
    def test_a_perfect_segmenter_gives_the_same_with_tiles(self, seed, side):
        image = discs((230, 310), 40, (3, 14), seed)
        whole, joined = find_gray(image), tiled(image, Tiling(side, 0.3))
        assert len(joined) == len(whole) == 40
        assert disagreement(whole, joined) == 0
        torch.testing.assert_close(joined.boxes, rle_boxes(joined.rles))
        assert joined.scores.tolist() == sorted(joined.scores.tolist(), reverse=True)

    def test_an_object_across_many_tiles_is_one_instance(self):
        image = np.zeros((200, 300, 3), np.uint8)
        image[90:110, 10:290] = 7
        image[20:180, 150:160] = 7
        assert disagreement(find_gray(image), tiled(image, Tiling(64))) == 0

    def test_classes_are_not_joined(self):
        image = np.zeros((64, 100, 3), np.uint8)
        image[20:40, 30:90] = 8
        calls = []

        def disagreeing(array):
            calls.append(array)
            found = find_gray(array)
            return Instances(found.scores, found.labels + len(calls) % 2, found.boxes, found.rles, found.size)

        assert len(tiled(image, Tiling(64), disagreeing)) == 2

    def test_a_part_that_only_the_wrong_tile_sees_is_left_out(self):
        image = np.zeros((64, 100, 3), np.uint8)
        image[20:40, 48:72] = 8  # most of it beyond the core of the first tile
        calls = []

        def only_first(array):
            calls.append(array)
            return find_gray(array)[: 1 if len(calls) == 1 else 0]

        assert len(tiled(image, Tiling(64, 0.2), only_first)) == 0

    def test_a_tile_that_sees_all_of_an_instance_decides_about_its_mask(self):
        image = np.zeros((64, 100, 3), np.uint8)
        image[20:40, 44:54] = 8  # in both tiles, most of it in the core of the first
        calls = []

        def second_sees_less(array):
            calls.append(array)
            less = array.copy()
            less[: 26 if len(calls) == 2 else 0] = 0
            return find_gray(less)

        (found,) = tiled(image, Tiling(64, 0.4), second_sees_less).rles
        assert (rle.decode(found) == (image[..., 0] > 0)).all()

    def test_an_image_smaller_than_a_tile(self):
        image = discs((40, 50), 3, (3, 6))
        assert disagreement(find_gray(image), tiled(image, Tiling(64))) == 0
        assert len(tiled(np.zeros((40, 200, 3), np.uint8), Tiling(64))) == 0

    def test_seam_error_of_a_perfect_segmenter_is_zero(self):
        image = discs((230, 310), 40, (3, 10))
        assert seam_error(lambda tiling: tiled(image, tiling), Tiling(64, 0.4)) == (0.0, 40)

    def test_seam_error_counts_what_depends_on_seams(self):
        image = discs((230, 310), 40, (3, 10))

        def blind_at_the_border(array):
            hidden = array.copy()
            hidden[:16] = 0
            return find_gray(hidden)

        assert seam_error(lambda tiling: tiled(image, tiling, blind_at_the_border), Tiling(64, 0.2))[0] > 0.05


class TestAgreement:
    def test_matching_is_one_to_one_within_a_class(self):
        a, b = np.zeros((2, 8, 8), np.uint8)
        a[:4], b[:5] = 1, 1
        pairs = match_instances(instances_of([a, a]), instances_of([b, b], labels=[0, 1]))
        assert [(i, j) for i, j, _ in pairs] == [(0, 0)]
        assert pairs[0][2] == pytest.approx(0.8)

    def test_disagreement_is_one_minus_pq(self):
        a, b = np.zeros((2, 8, 8), np.uint8)
        a[:4], b[:5] = 1, 1
        ours, theirs = instances_of([a]), instances_of([b, np.eye(8, dtype=np.uint8)])
        assert disagreement(ours, theirs) == pytest.approx(1 - 0.8 / (1 + 0.5))
        assert disagreement(ours[:0], theirs[:0]) == 0
        assert disagreement(ours, theirs[:0]) == 1


def test_a_model_predicts_files_and_arrays_by_tiles(tmp_path):
    segmenter = small("condinst").eval()
    model = Model(segmenter, info_of(segmenter))
    image = discs((100, 150), 8, (5, 12))
    Image.fromarray(image).save(tmp_path / "a.png")
    options = {"score_threshold": 0.0, "short": 64}
    by_file = model.predict_tiles(tmp_path / "a.png", Tiling(64), **options)
    by_array = model.predict_tiles(image, Tiling(64), **options)
    assert by_file.size == (100, 150)
    assert by_file.classes == model.classes
    assert disagreement(by_file, by_array) == 0
    assert model.predict_tiles(image, Tiling(64), score_threshold=1.0).scores.tolist() == []
