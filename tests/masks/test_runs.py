"""Run lengths of windows, against bitmaps of whole images."""

import numpy as np
import pytest

from uniquery.masks import rle
from uniquery.masks.runs import encode_runs, runs_of_window, union


@pytest.mark.parametrize("seed", range(8))
def test_windows_joined_by_runs_are_the_bitmap(seed):
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(3, 20, 2))
    canvas, parts = np.zeros((height, width), np.uint8), []
    for _ in range(int(rng.integers(1, 4))):
        y, x = int(rng.integers(height)), int(rng.integers(width))
        window = rng.random((int(rng.integers(1, height - y + 1)), int(rng.integers(1, width - x + 1)))) > 0.4
        canvas[y : y + window.shape[0], x : x + window.shape[1]] |= window
        parts.append(runs_of_window(window, x, y, height))
    encoded = encode_runs(union(parts), (height, width))
    assert encoded == rle.encode(canvas)


def test_nothing_and_everything():
    assert encode_runs(union([runs_of_window(np.zeros((2, 2)), 0, 0, 3)]), (3, 4)) == rle.encode(np.zeros((3, 4)))
    assert encode_runs(union([runs_of_window(np.ones((3, 4)), 0, 0, 3)]), (3, 4)) == rle.encode(np.ones((3, 4)))
