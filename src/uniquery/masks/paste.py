"""From masks on a map to run-length masks at the size of the caller's image.

Letters: N predictions, h × w the map of a mask, H × W its output size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uniquery.masks import rle


def resize_matrix(matrix: Tensor, size: int) -> Tensor:
    """(n, m) → (n, size): the rows of a matrix, resized linearly without aligned corners."""
    return F.interpolate(matrix[:, None], size=size, mode="linear", align_corners=False)[:, 0]


def encode_masks(probabilities: Tensor, rows: Tensor, columns: Tensor, threshold: float) -> list[rle.Rle]:
    """Resizes, thresholds and encodes masks one by one, so that only one is ever held at full size.

    Resizing is linear and separable: `rows.T @ p @ columns`. A pixel can only be above the threshold if a cell that it
    is interpolated from is, so each mask is computed only inside the window of such pixels. It is computed transposed,
    as run lengths go down the columns.

    Args:
        probabilities: (N, h, w).
        rows: (h, H) resizing matrix, its columns non-negative with sum 1.
        columns: (w, W) resizing matrix.
        threshold: pixels above it belong to the mask.

    Returns:
        N compressed run-length masks of size (H, W).
    """
    masks = []
    for window, patch in resized_patches(probabilities, rows, columns, threshold):
        canvas = np.zeros((columns.shape[1], rows.shape[1]), dtype=np.uint8)  # (W, H)
        canvas[window] = (patch > threshold).numpy()
        masks.append(rle.encode(canvas.T))
    return masks


def resized_patches(
    maps: Tensor, rows: Tensor, columns: Tensor, threshold: float
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Each map, resized and transposed, inside the window of pixels that read a cell above the threshold.

    Yields:
        the window as slices of x and y, and the values inside it.
    """
    rows, columns = rows.float(), columns.float()
    reads_row, reads_column = rows > 0, columns > 0  # (h, H), (w, W)
    for cells in maps.float().cpu():
        above = cells > threshold
        pixels_y, pixels_x = _window(reads_row[above.any(1)].any(0)), _window(reads_column[above.any(0)].any(0))
        cells_y, cells_x = _window(reads_row[:, pixels_y].any(1)), _window(reads_column[:, pixels_x].any(1))
        yield (pixels_x, pixels_y), columns[cells_x, pixels_x].T @ cells[cells_y, cells_x].T @ rows[cells_y, pixels_y]


def _window(flags: Tensor) -> slice:
    """The smallest slice that holds every true flag."""
    indices = flags.nonzero().flatten()
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)


def rle_boxes(rles: Sequence[rle.Rle]) -> Tensor:
    """(N, 4) x0 y0 x1 y1 around run-length masks, the far edge exclusive; of zero size around an empty one."""
    boxes = torch.tensor([rle.bounding_box(mask) for mask in rles], dtype=torch.float32).view(-1, 4)
    return torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)


def scale_boxes(boxes: Tensor, from_size: tuple[int, int], to_size: tuple[int, int]) -> Tensor:
    """Boxes of an image of one (height, width) on the same image at another, clipped to it."""
    (from_h, from_w), (to_h, to_w) = from_size, to_size
    factor = boxes.new_tensor([to_w / from_w, to_h / from_h] * 2)
    limit = boxes.new_tensor([to_w, to_h] * 2)
    return torch.minimum((boxes * factor).clamp(min=0), limit)


def resize_matrices(
    cells: tuple[int, int], stride: int, valid: tuple[int, int], size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """(h, H) and (w, W): from cells to input pixels, cut to the valid image, and on to the output; bilinear twice."""
    rows, columns = (
        resize_matrix(resize_matrix(torch.eye(n), n * stride)[:, :inside], length)
        for n, inside, length in zip(cells, valid, size, strict=True)
    )
    return rows, columns


def encode_scored_masks(
    logits: Tensor, rows: Tensor, columns: Tensor, threshold: float
) -> tuple[list[rle.Rle], Tensor]:
    """Resizes, thresholds and encodes masks one by one, and scores them: the mean probability inside of each.

    Args:
        logits: (N, h, w).
        rows: (h, H) resizing matrix, its columns non-negative with sum 1.
        columns: (w, W) resizing matrix.
        threshold: pixels whose resized logit is above it belong to the mask.

    Returns:
        N compressed run-length masks of size (H, W), and (N,) scores, 0 for an empty mask.
    """
    masks, scores = [], []
    for window, patch in resized_patches(logits, rows, columns, threshold):
        inside = patch > threshold
        canvas = np.zeros((columns.shape[1], rows.shape[1]), dtype=np.uint8)  # (W, H): run lengths go down the columns
        canvas[window] = inside.numpy()
        masks.append(rle.encode(canvas.T))
        scores.append((patch.sigmoid() * inside).sum() / inside.sum().clamp(min=1))
    return masks, torch.stack(scores) if scores else torch.zeros(0)
