"""Drawing changes what it should, nothing else, at any size."""

import base64
import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from uniquery.masks import rle
from uniquery.report.drawings import LabeledMask, data_uri, downscale, grid, label_map, overlay, png_bytes
from uniquery.report.palette import color


def drawn(size, top, left, height, width, label="thing", score=None):
    mask = np.zeros(size, np.uint8)
    mask[top : top + height, left : left + width] = 1
    return LabeledMask(rle.encode(mask), label, score)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class TestOverlay:
    def test_nothing_to_draw_returns_an_equal_copy(self):
        image = noise(20, 30)
        result = overlay(image, [])
        assert (result == image).all()
        assert result is not image

    def test_changes_only_under_the_masks(self):
        image = np.full((80, 100, 3), 128, np.uint8)
        y, x = np.mgrid[:80, :100]
        ring = (np.hypot(y - 30, x - 30) < 22) & (np.hypot(y - 30, x - 30) > 12)
        instances = [LabeledMask(rle.encode(ring), "ring"), drawn((80, 100), 40, 40, 35, 50)]
        changed = (overlay(image, instances, text=False) != image).any(axis=2)
        expected = sum(rle.decode(one.rle).astype(int) for one in instances) > 0
        assert (changed == expected).all()
        assert (image == 128).all()

    def test_text_adds_only_one_label_box_near_the_mask(self):
        image = np.full((200, 300, 3), 128, np.uint8)
        one = drawn((200, 300), 80, 100, 60, 90, "dog", 0.87)
        outside = (overlay(image, [one]) != overlay(image, [one], text=False)).any(axis=2)
        rows, columns = outside.any(axis=1).nonzero()[0], outside.any(axis=0).nonzero()[0]
        assert 5 < len(rows) < 30
        assert 60 <= rows[0] <= rows[-1] < 80
        assert 100 <= columns[0] <= columns[-1] < 190

    def test_outline_is_opaque_and_inside_is_translucent(self):
        image = np.zeros((60, 60, 3), np.uint8)
        result = overlay(image, [drawn((60, 60), 10, 10, 40, 40)], text=False)
        assert tuple(result[10, 30]) == color(0)
        assert (result[30, 30] < result[10, 30]).any()
        assert (result[30, 30] > 0).any()

    def test_best_score_lies_on_top(self):
        size = (40, 40)
        instances = [drawn(size, 0, 0, 40, 40, score=0.9), drawn(size, 10, 10, 20, 20, score=0.2)]
        edge_of_the_worse = overlay(np.zeros((*size, 3), np.uint8), instances, text=False)[10, 20]
        assert tuple(edge_of_the_worse) != color(1)

    def test_tiny_instances_and_crowds_get_no_text(self):
        image = np.full((200, 200, 3), 128, np.uint8)
        tiny = [drawn((200, 200), 50, 50, 4, 4)]
        crowd = [drawn((200, 200), 4 * i, 0, 4, 200) for i in range(45)]
        for instances in (tiny, crowd):
            assert (overlay(image, instances) == overlay(image, instances, text=False)).all()

    def test_labels_do_not_cover_each_other(self):
        image = np.full((240, 320, 3), 128, np.uint8)
        same_place = [drawn((240, 320), 100, 100, 60, 60, f"name {i}", 0.9 - i / 100) for i in range(3)]
        alone = overlay(image, same_place[:1])
        together = overlay(image, same_place)
        label_of_the_best = (alone != overlay(image, same_place[:1], text=False)).any(axis=2)
        assert (together[label_of_the_best] == alone[label_of_the_best]).all()

    @pytest.mark.parametrize("size", [(1, 1), (1, 50), (7, 3)])
    def test_very_small_images(self, size):
        whole = drawn(size, 0, 0, *size, label="a name longer than the image", score=0.5)
        assert overlay(np.zeros((*size, 3), np.uint8), [whole]).shape == (*size, 3)

    def test_large_image_has_a_thicker_outline(self):
        size = (2400, 3200)
        result = overlay(np.zeros((*size, 3), np.uint8), [drawn(size, 400, 400, 1600, 2000, "large")], text=False)
        thickness = (result[400:500, 1000] == color(0)).all(axis=1).sum()
        assert 5 <= thickness <= 12

    @pytest.mark.parametrize("label", ["", "椅子", "line\nbreak", "é" * 100])
    @pytest.mark.parametrize("score", [None, 0.0, 1.0, float("nan")])
    def test_any_label_and_score_can_be_written(self, label, score):
        overlay(np.zeros((100, 100, 3), np.uint8), [drawn((100, 100), 10, 10, 60, 60, label, score)])

    def test_empty_mask_draws_nothing(self):
        image = noise(50, 50)
        assert (overlay(image, [drawn((50, 50), 0, 0, 0, 0)]) == image).all()

    def test_wrong_sizes_are_refused(self):
        with pytest.raises(ValueError, match="does not fit"):
            overlay(np.zeros((10, 10, 3), np.uint8), [drawn((10, 11), 0, 0, 2, 2)])
        with pytest.raises(ValueError, match="uint8"):
            overlay(np.zeros((10, 10), np.uint8), [])


class TestLabelMap:
    def test_best_score_wins_whatever_the_order(self):
        size = (4, 6)
        worse, better = drawn(size, 0, 0, 4, 4, score=0.4), drawn(size, 0, 2, 4, 4, score=0.8)
        assert label_map([worse, better], size)[0].tolist() == [1, 1, 2, 2, 2, 2]
        assert label_map([better, worse], size)[0].tolist() == [2, 2, 1, 1, 1, 1]

    def test_without_scores_the_smaller_wins(self):
        size = (4, 4)
        assert label_map([drawn(size, 1, 1, 1, 1), drawn(size, 0, 0, 4, 4)], size)[1, 1] == 1

    def test_survives_a_png_with_more_than_255_instances(self):
        size = (1, 300)
        labels = label_map([drawn(size, 0, i, 1, 1) for i in range(300)], size)
        read = np.asarray(Image.open(io.BytesIO(png_bytes(labels))))
        assert labels.dtype == np.uint16
        assert read.tolist() == [list(range(1, 301))]


def test_first_colors_are_far_apart():
    pairs = combinations([color(i) for i in range(12)], 2)
    assert min(np.abs(np.subtract(a, b)).max() for a, b in pairs) >= 60
    assert len({color(i) for i in range(48)}) == 48


def test_scaling_down_keeps_masks_in_place_and_tiny_ones_alive():
    size = (400, 800)
    image, (large, dot) = downscale(noise(*size), [drawn(size, 100, 200, 200, 400), drawn(size, 7, 9, 1, 1)], 100)
    assert image.shape == (50, 100, 3)
    x, y, width, height = rle.bounding_box(large.rle)
    assert (x, width) == (25, 50)
    assert y in (12, 13)
    assert height in (24, 25, 26)
    assert rle.area(dot.rle) >= 1


def test_grid_keeps_every_pixel_of_every_image():
    images = [noise(30, 40, 1), noise(20, 50, 2), noise(10, 10, 3)]
    sheet = grid(images, 2, ["one", "two", "three"])
    windows = np.lib.stride_tricks.sliding_window_view(sheet, (10, 10, 3))
    assert (windows == images[2]).all(axis=(-1, -2, -3)).any()
    assert sheet.shape[1] >= 100


def test_grid_refuses_what_it_cannot_lay_out():
    with pytest.raises(ValueError, match="at least one"):
        grid([], 2)
    with pytest.raises(ValueError, match="2 titles for 1"):
        grid([noise(3, 3)], 1, ["a", "b"])


def test_data_uri_is_scaled_down():
    uri = data_uri(noise(500, 1000), longest=100)
    picture = Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))))
    assert picture.size == (100, 50)
