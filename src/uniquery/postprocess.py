"""From raw predictions to instances: suppression, and masks at the size of the caller's image.

Letters: N predictions, h × w the map of a mask, H × W its output size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uniquery import rle


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """(N, M) intersection over union of x0 y0 x1 y1 boxes."""
    overlap = (torch.minimum(a[:, None, 2:], b[:, 2:]) - torch.maximum(a[:, None, :2], b[:, :2])).clamp(min=0).prod(-1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(-1), (b[:, 2:] - b[:, :2]).prod(-1)
    return overlap / (area_a[:, None] + area_b - overlap)


def nms(boxes: Tensor, scores: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Class-wise greedy non-maximum suppression: indices of the kept boxes, best first.

    Greedy suppression is the fixed point of "kept unless a better kept box of its class overlaps it too much".
    Iterating that to convergence takes as many rounds as the longest chain of suppressions, with no loop over boxes.

    >>> boxes = torch.tensor([[0.0, 0, 10, 10], [0, 1, 10, 11], [0, 2, 10, 12]])
    >>> nms(boxes, torch.tensor([0.5, 0.9, 0.8]), torch.zeros(3), 0.8)
    tensor([1])
    """
    order = scores.argsort(descending=True, stable=True)
    boxes, labels = boxes[order], labels[order]
    rivals = (labels[:, None] == labels).triu(diagonal=1)  # [i, j]: i is better than j
    for start in range(0, len(boxes), 512):
        rivals[start : start + 512] &= box_iou(boxes[start : start + 512], boxes) > threshold
    kept = torch.ones_like(order, dtype=torch.bool)
    while True:
        suppressed = (rivals & kept[:, None]).any(0)
        if torch.equal(kept, ~suppressed):
            return order[kept]
        kept = ~suppressed


def matrix_nms(masks: Tensor, scores: Tensor, labels: Tensor, sigma: float) -> Tensor:
    """Soft suppression in one step (SOLOv2): scores decay with the overlap with better masks of their class.

    A better mask j multiplies the score of i by exp(−σ IoU(j, i)²) / exp(−σ IoU(j)²), where IoU(j) is the largest
    overlap of j with a mask better than itself: what is likely to go should not take others along. The smallest
    factor counts.

    Args:
        masks: (N, h, w) bool, not empty, best first.
        scores: (N,) falling.
        labels: (N,) masks of different classes do not meet.
        sigma: how sharply overlap lowers a score.

    Returns:
        (N,) scores, no larger than before.

    >>> masks = torch.tensor([[[1, 1]], [[1, 1]], [[0, 1]]]).bool()
    >>> matrix_nms(masks, torch.ones(3), torch.tensor([0, 0, 1]), sigma=2.0)
    tensor([1.0000, 0.1353, 1.0000])
    """
    if not len(masks):
        return scores
    flat = masks.flatten(1).float()
    overlap, area = flat @ flat.T, flat.sum(1)
    iou = overlap / (area[:, None] + area - overlap)
    rivals = (labels[:, None] == labels).triu(diagonal=1)  # [j, i]: j is better than i
    iou = torch.where(rivals, iou, 0)
    suffered = iou.amax(0)  # (N,) largest overlap with a better one
    decay = torch.exp(-sigma * (iou.square() - suffered.square()[:, None])).amin(0)
    return scores * decay


def resize_matrix(matrix: Tensor, size: int) -> Tensor:
    """(n, m) → (n, size): follows a linear map along one axis by bilinear resizing without aligned corners."""
    return F.interpolate(matrix[:, None], size=size, mode="linear", align_corners=False)[:, 0]


def encode_masks(probabilities: Tensor, rows: Tensor, columns: Tensor, threshold: float) -> list[rle.Rle]:
    """Resizes, thresholds and encodes masks one by one, so that only one is ever held at full size.

    Resizing is linear and separable: `rows.T @ p @ columns`. A pixel can only pass the threshold where a cell it is
    made of does, so each mask is computed only inside the window that its cells can reach. It is computed transposed,
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
    """Each map, resized and transposed, inside the window of the output that cells above the threshold can reach."""
    rows, columns = rows.float(), columns.float()
    reach_rows, reach_columns = rows > 0, columns > 0
    for one in maps.float().cpu():
        above = one > threshold
        window_y, window_x = _window(reach_rows[above.any(1)].any(0)), _window(reach_columns[above.any(0)].any(0))
        cells_y, cells_x = _window(reach_rows[:, window_y].any(1)), _window(reach_columns[:, window_x].any(1))
        yield (window_x, window_y), columns[cells_x, window_x].T @ one[cells_y, cells_x].T @ rows[cells_y, window_y]


def _window(flags: Tensor) -> slice:
    """The smallest slice that holds every true flag."""
    indices = flags.nonzero().flatten()
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)


def rle_boxes(rles: Sequence[rle.Rle]) -> Tensor:
    """(N, 4) x0 y0 x1 y1 around run-length masks, the far edge exclusive; without extent around an empty one."""
    boxes = torch.tensor([rle.bounding_box(one) for one in rles], dtype=torch.float32).view(-1, 4)
    return torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)


def scale_boxes(boxes: Tensor, from_size: tuple[int, int], to_size: tuple[int, int]) -> Tensor:
    """Boxes of an image of one (height, width) on the same image at another, clipped to it."""
    (from_h, from_w), (to_h, to_w) = from_size, to_size
    factor = boxes.new_tensor([to_w / from_w, to_h / from_h] * 2)
    limit = boxes.new_tensor([to_w, to_h] * 2)
    return torch.minimum((boxes * factor).clamp(min=0), limit)


def resized_size(height: int, width: int, short: int, longest: int) -> tuple[int, int]:
    """The size with the given short side, unless the long side would pass its limit.

    >>> resized_size(480, 640, short=800, longest=1333)
    (800, 1067)
    """
    scale = min(short / min(height, width), longest / max(height, width))
    return max(1, math.floor(height * scale + 0.5)), max(1, math.floor(width * scale + 0.5))
