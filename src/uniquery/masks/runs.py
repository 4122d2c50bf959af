"""Masks of very large images: small windows and run lengths, never a bitmap of the whole image.

A run is (start, end), the end exclusive, of pixels counted down the columns, as COCO counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hotcoco import mask as coco_mask

from uniquery.masks.rle import Rle

Runs = npt.NDArray[np.int64]
"""(n, 2) start and end of each run."""


def runs_of_window(bitmap: npt.NDArray[Any], x: int, y: int, height: int) -> Runs:
    """The runs of a bitmap whose corner is at x, y of an image of some height.

    >>> runs_of_window(np.array([[1, 0], [1, 1]]), x=1, y=0, height=4).tolist()
    [[4, 6], [9, 10]]
    """
    columns = np.zeros((bitmap.shape[1], bitmap.shape[0] + 2), dtype=np.int8)
    columns[:, 1:-1] = bitmap.T != 0
    change = np.diff(columns, axis=1)  # (width, height + 1)
    column, row = np.nonzero(change == 1)
    _, end = np.nonzero(change == -1)  # in the same order: each run of a column ends before the next one starts
    first = (column + x) * height + y
    return np.stack([first + row, first + end], axis=1)


def union(parts: Sequence[Runs]) -> Runs:
    """The runs of all pixels that are in any part.

    >>> union([np.array([[0, 2], [5, 6]]), np.array([[1, 3], [3, 4]])]).tolist()
    [[0, 4], [5, 6]]
    """
    runs = np.concatenate(parts)
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    if not len(runs):
        return runs
    reached = np.maximum.accumulate(runs[:, 1])
    is_first = np.concatenate([[True], runs[1:, 0] > reached[:-1]])
    last = np.concatenate([np.flatnonzero(is_first)[1:] - 1, [len(runs) - 1]])
    return np.stack([runs[is_first, 0], reached[last]], axis=1)


def encode_runs(runs: Runs, size: tuple[int, int]) -> Rle:
    """The compressed run lengths of an image of (height, width), from runs as `union` gives them."""
    edges = np.concatenate([[0], runs.ravel(), [size[0] * size[1]]])
    lengths = np.diff(edges).tolist()
    if lengths[-1] == 0 and len(lengths) > 1:  # the mask reaches the last pixel
        lengths.pop()
    encoded = coco_mask.frPyObjects({"size": list(size), "counts": lengths}, *size)
    counts = encoded["counts"]
    return {"size": list(size), "counts": counts.decode() if isinstance(counts, bytes) else counts}
