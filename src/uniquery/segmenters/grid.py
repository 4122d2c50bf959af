"""Functions for segmenters that predict on grids of cells (SOLOv2, SOTR): assignment, coordinates, peaks, scoring.

Letters: B images, G levels, each with a grid of S × S cells, L cells of all levels, C classes, K instances of an image,
N candidates of an image, h × w the mask map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from uniquery.masks.geometry import mask_centroids
from uniquery.masks.paste import encode_masks, resize_matrices, rle_boxes
from uniquery.structures import Assignment, Instances, Targets, index_in_batch

MASK_STRIDE = 4  # stride of the mask map
_MASKS_AT_ONCE = 256  # bounds the memory of scoring thousands of candidates
_SCORED_PER_CANDIDATE = 4  # pairs whose masks are predicted, for each candidate that is returned


@torch.no_grad()
def assign_cells(
    targets: Targets,
    extent: tuple[int, int],
    grids: Sequence[int],
    size_ranges: Sequence[tuple[float, float]],
    center_fraction: float,
) -> tuple[Tensor, Tensor]:
    """SOLO's rule: an instance belongs to the cells under the middle of its box, moved to the centroid of its mask.

    A level is used if √(box area) lies in its range, both ends included. Its positive cells overlap the center box: the
    instance's box, moved to the centroid and scaled by `center_fraction`; at most 3 × 3 cells.

    Args:
        targets: the K instances of an image; an empty mask belongs to no cell.
        extent: (height, width) in pixels that each grid spans.
        grids: cells along a side of each of the G levels.
        size_ranges: smallest and largest size of each level.
        center_fraction: see above.

    Returns:
        (N,) cell, counted over all levels, and (N,) instance of each pair. A cell may own several instances.
    """
    device = targets.masks.device
    sides = targets.boxes[:, 2:] - targets.boxes[:, :2]
    size = sides.prod(1).sqrt()[:, None]
    low, high = _constant(size_ranges, device).T
    size_fits = (size >= low) & (size <= high) & targets.masks.flatten(1).any(1)[:, None]  # (K, G)

    cells = _constant(grids, device)
    cell_side = _constant([1 / s for s in grids], device)[:, None]
    center, half = mask_centroids(targets.masks), 0.5 * sides * center_fraction
    width_height = _constant(extent[::-1], device)
    # On the edge of two cells, rounding decides between them: the same division as in AdelaiDet.
    middle, first, last = (
        ((point / width_height)[:, None] // cell_side).long() for point in (center, center - half, center + half)
    )
    near = middle[..., None] + torch.arange(-1, 2, device=device)  # (K, G, 2, 3)
    inside = (near >= first.clamp(min=0)[..., None]) & (near <= torch.minimum(last, cells[:, None] - 1)[..., None])
    owned = size_fits[..., None, None] & inside[:, :, 1, :, None] & inside[:, :, 0, None, :]  # (K, G, 3, 3)
    target, level, row, column = owned.nonzero(as_tuple=True)
    start = cells.square().cumsum(0) - cells.square()
    return start[level] + near[target, level, 1, row] * cells[level] + near[target, level, 0, column], target


def _constant(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for a GPU."""
    return torch.tensor(values).to(device, non_blocking=True)


def cell_centers(grids: Sequence[int], extent: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """(L, 2): x, y in pixels of the center of each cell of all levels; each grid spans (height, width) `extent`.

    >>> cell_centers([1, 2], (4, 8)).tolist()
    [[4.0, 2.0], [2.0, 1.0], [6.0, 1.0], [2.0, 3.0], [6.0, 3.0]]
    """
    height, width = extent
    levels = []
    for side in grids:
        center = (torch.arange(side, device=device) + 0.5) / side
        y, x = torch.meshgrid(center * height, center * width, indexing="ij")
        levels.append(torch.stack([x.flatten(), y.flatten()], dim=1))
    return torch.cat(levels)


def positive_cells(assignment: Assignment, targets: Sequence[Targets], cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Image, cell and class of each positive cell; of several instances in a cell, the last one gives the class."""
    owner = assignment.target.new_full((len(targets) * cells,), -1)
    owner.scatter_reduce_(0, assignment.image * cells + assignment.query, assignment.target, "amax")
    image, cell = (owner.view(len(targets), cells) >= 0).nonzero(as_tuple=True)
    labels = torch.cat([t.labels for t in targets])
    return image, cell, labels[index_in_batch(targets, image, owner[image * cells + cell])]


def coordinates(features: Tensor) -> Tensor:
    """(B, 2, h, w): x and y of each cell of (B, C, h, w) features, −1 in the first and 1 in the last.

    >>> coordinates(torch.zeros(1, 4, 1, 3))[0, 0].tolist()
    [[-1.0, 0.0, 1.0]]
    """
    batch, _, height, width = features.shape
    y, x = (_from_minus_one_to_one(n, features) for n in (height, width))
    xy = torch.stack([x.expand(height, width), y[:, None].expand(height, width)])
    return xy.expand(batch, 2, height, width).contiguous(memory_format=torch.channels_last)


def _from_minus_one_to_one(count: int, like: Tensor) -> Tensor:
    """(count,) evenly spaced numbers; those of `torch.linspace` would be a constant of an exported graph."""
    if not torch.onnx.is_in_onnx_export():
        return torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)
    last = torch.full((), count - 1, dtype=like.dtype, device=like.device).clamp(min=1)
    return torch.arange(count, dtype=like.dtype, device=like.device) * (2 / last) - 1


def quarter_masks(masks: Tensor) -> Tensor:
    """(K, H, W) → (K, H / 4, W / 4) bool: bilinear resizing, with a tie counting as inside."""
    return _central_pixels(masks).sum(0) >= 2


def quarter_shares(masks: Tensor) -> Tensor:
    """(K, H, W) → (K, H / 4, W / 4) float in 0..1: bilinear resizing.

    >>> quarter_shares(torch.arange(16).view(1, 4, 4) < 6)
    tensor([[[0.2500]]])
    """
    return _central_pixels(masks).sum(0, dtype=torch.uint8) / 4


def quarter_valid(target: Targets) -> Tensor:
    """(H / 4, W / 4) bool: where all pixels that `quarter_masks` reads are valid."""
    if target.valid is None:
        height, width = target.masks.shape[-2:]
        return torch.ones(height // MASK_STRIDE, width // MASK_STRIDE, dtype=torch.bool, device=target.masks.device)
    return _central_pixels(target.valid).all(0)


def _central_pixels(masks: Tensor) -> Tensor:
    """(4, ..., H / 4, W / 4): the central 2 × 2 of each 4 × 4 block."""
    return torch.stack([masks[..., y::MASK_STRIDE, x::MASK_STRIDE] for y in (1, 2) for x in (1, 2)])


def find_peaks(scores: Tensor, grids: Sequence[int]) -> Tensor:
    """(..., L, C) bool: where no score of the class is higher in the cell above, on the left, or between these two.

    >>> find_peaks(torch.tensor([[0.2], [0.5], [0.3], [0.4]]), grids=[2]).flatten().tolist()
    [True, True, True, False]
    """
    peaks = []
    for level_scores, side in zip(scores.split([s * s for s in grids], dim=-2), grids, strict=True):
        maps = level_scores.mT.unflatten(-1, (side, side))  # (..., C, S, S)
        highest = F.max_pool2d(maps, kernel_size=2, stride=1, padding=1)[..., :-1, :-1]
        peaks.append((highest == maps).flatten(-2).mT)
    return torch.cat(peaks, dim=-2)


def score_candidates(
    class_scores: Tensor,
    grids: Sequence[int],
    strides: Sequence[int],
    predict_masks: Callable[[Tensor], Tensor],
    *,
    score_threshold: float,
    mask_threshold: float,
    max_candidates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best (cell, class) pairs of an image: peaks of the class score, times the mean probability of the mask.

    Args:
        class_scores: (L, C) in 0..1.
        grids: cells along a side of each level's grid.
        strides: stride of each level; a mask must have more cells than this number.
        predict_masks: (n,) cells → (n, h, w) probabilities.
        score_threshold: smallest class score.
        mask_threshold: above it, a cell of the map belongs to the mask.
        max_candidates: most pairs; masks are predicted for at most four times as many, by their class scores.

    Returns:
        (N,) cell, (N,) class and (N,) score, best first.
    """
    cells, labels = (find_peaks(class_scores, grids) & (class_scores > score_threshold)).nonzero(as_tuple=True)
    most = pairs_to_score(max_candidates)
    if len(cells) > most:  # many classes, or a low threshold
        best = class_scores[cells, labels].topk(most).indices.sort().values
        cells, labels = cells[best], labels[best]
    distinct, pair = cells.unique(return_inverse=True)
    area, maskness = _mask_scores(distinct, predict_masks, mask_threshold)
    stride = torch.tensor(strides[: len(grids)], device=cells.device)
    min_area = stride.repeat_interleave(torch.tensor(grids, device=cells.device).square())  # (L,)
    large = (area > min_area[distinct])[pair]
    cells, labels, pair = cells[large], labels[large], pair[large]
    scores, order = (class_scores[cells, labels] * maskness[pair]).sort(descending=True, stable=True)
    order = order[:max_candidates]
    return cells[order], labels[order], scores[:max_candidates]


def pairs_to_score(max_candidates: int) -> int:
    """Of how many pairs the masks are predicted, to find the best candidates."""
    return _SCORED_PER_CANDIDATE * max_candidates


def _mask_scores(
    cells: Tensor, predict_masks: Callable[[Tensor], Tensor], mask_threshold: float
) -> tuple[Tensor, Tensor]:
    """(N,) area of each cell's mask on the map, and (N,) mean probability inside it, some masks at a time."""
    area, inside = torch.zeros(2, len(cells), device=cells.device)
    for start in range(0, len(cells), _MASKS_AT_ONCE):
        chunk = slice(start, start + _MASKS_AT_ONCE)
        probabilities = predict_masks(cells[chunk])
        masks = probabilities > mask_threshold
        area[chunk] = masks.sum((1, 2))
        inside[chunk] = (probabilities * masks).sum((1, 2))
    return area, inside / area.clamp(min=1)


def paste_instances(
    probabilities: Tensor,
    scores: Tensor,
    labels: Tensor,
    valid_size: tuple[int, int],
    size: tuple[int, int],
    mask_threshold: float,
) -> Instances:
    """Instances at the caller's size, without those whose mask is empty there.

    Args:
        probabilities: (N, h, w) masks on the map.
        scores: (N,).
        labels: (N,).
        valid_size: (height, width) of the image inside the padding.
        size: (height, width) of the output.
        mask_threshold: above it, a pixel belongs to the mask.
    """
    shape = probabilities.shape[1], probabilities.shape[2]
    rles = encode_masks(probabilities, *resize_matrices(shape, MASK_STRIDE, valid_size, size), mask_threshold)
    boxes = rle_boxes(rles)
    instances = Instances(scores.cpu(), labels.cpu(), boxes, rles, size)
    return instances[(boxes[:, 2:] > boxes[:, :2]).all(1)]
