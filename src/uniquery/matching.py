"""Rules that assign predictions to ground truth. None of them carries a gradient.

Letters: B images, L locations, K instances of one image, R predictions, P points.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from uniquery.masks.geometry import mask_centroids
from uniquery.structures import Assignment, Targets

_MAX_COST = 1e6  # replaces a cost that is not finite
_INSTANCES_AT_ONCE = 64  # bounds the (L, K) tables on images with hundreds of instances


def box_distances(locations: Tensor, boxes: Tensor) -> Tensor:
    """(..., 4): how far left, top, right and bottom of a box's edges lie from a location."""
    return torch.cat([locations - boxes[..., :2], boxes[..., 2:] - locations], dim=-1)


@torch.no_grad()
def assign_points(
    locations: Tensor, strides: Tensor, size_ranges: Tensor, targets: Targets, radius: float = 1.5
) -> Tensor:
    """FCOS's point-in-instance rule with center sampling around the mask centroid, as in CondInst.

    A location may own an instance if it lies within `radius` strides of the mask's centroid and inside its box, and
    if the largest of its distances to the box's edges falls into the size range of its level, both ends included.
    Where several instances compete, the smallest box wins.

    Args:
        locations: (L, 2) x, y in input pixels.
        strides: (L,) stride of each location's level.
        size_ranges: (L, 2) smallest and largest distance of each location's level.
        targets: the image's instances.
        radius: radius of center sampling in strides.

    Returns:
        (L,) index of the owned instance, −1 for none.
    """
    owner = torch.full((len(locations),), -1, dtype=torch.int64, device=locations.device)
    smallest = torch.full((len(locations),), torch.inf, device=locations.device)
    areas = (targets.boxes[:, 2:] - targets.boxes[:, :2]).prod(1)
    half_side = (radius * strides)[:, None, None]  # (L, 1, 1): half the side of the sampling region
    points = locations[:, None]  # (L, 1, 2)
    low, high = size_ranges[:, :1], size_ranges[:, 1:]
    for start in range(0, len(targets), _INSTANCES_AT_ONCE):
        chunk = targets[start : start + _INSTANCES_AT_ONCE]
        centers = mask_centroids(chunk.masks)
        near = torch.cat(
            [
                torch.maximum(centers - half_side, chunk.boxes[:, :2]),
                torch.minimum(centers + half_side, chunk.boxes[:, 2:]),
            ],
            dim=-1,
        )  # (L, k, 4): the sampling region, inside the box
        is_near = box_distances(points, near).amin(-1) > 0
        furthest = box_distances(points, chunk.boxes).amax(-1)
        is_fit = (furthest >= low) & (furthest <= high)
        area = torch.where(is_near & is_fit, areas[start : start + len(chunk)], torch.inf)
        least, index = area.min(1)
        owner = torch.where(least < smallest, index + start, owner)
        smallest = torch.minimum(smallest, least)
    return owner


def random_subset(count: int, limit: int, device: torch.device) -> Tensor:
    """(count,) bool: all true, or `limit` of them at random if there are more; draws from torch's global generator.

    >>> random_subset(5, 2, torch.device("cpu")).sum()
    tensor(2)
    """
    if count <= limit:
        return torch.ones(count, dtype=torch.bool, device=device)
    chosen = torch.randperm(count, device=device)[:limit]
    return torch.zeros(count, dtype=torch.bool, device=device).index_fill_(0, chosen, True)


@torch.no_grad()
def ignored_locations(locations: Tensor, assignment: Assignment, targets: Sequence[Targets]) -> Tensor:
    """(B, L) bool: which locations lie on invalid pixels and own no instance, so that no class is right for them.

    Args:
        locations: (L, 2) x, y in input pixels; those beyond the image are moved to its edge.
        assignment: `query` is the index of a location.
        targets: ground truth of each image.
    """
    ignored = torch.zeros(len(targets), len(locations), dtype=torch.bool, device=locations.device)
    for row, target in zip(ignored, targets, strict=True):
        if target.valid is not None:
            height, width = target.valid.shape
            x, y = (axis.long().clamp(0, size - 1) for axis, size in zip(locations.T, (width, height), strict=True))
            row.copy_(~target.valid[y, x])
    ignored[assignment.image, assignment.query] = False
    return ignored


def mask_costs(logits: Tensor, targets: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(R, K) cross-entropy, the mean over points, and (R, K) dice loss, of every prediction with every instance.

    With softplus(x) − softplus(−x) = x, the cross-entropy of a pair is Σ softplus(x) − Σ x t: one matrix product.

    Args:
        logits: (R, P).
        targets: (K, P) in 0..1.
        valid: (P,) bool, the points that count; None means all.
    """
    softplus, probabilities = F.softplus(logits), logits.sigmoid()
    count: Tensor | int = logits.shape[1]
    if valid is not None:
        softplus, probabilities, targets = softplus * valid, probabilities * valid, targets * valid
        count = valid.sum().clamp(min=1)
    cross_entropy = (softplus.sum(1)[:, None] - logits @ targets.T) / count
    overlap = probabilities @ targets.T
    dice = 1 - (2 * overlap + 1) / (probabilities.sum(1)[:, None] + targets.sum(1) + 1)
    return cross_entropy, dice


def hungarian_match(costs: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of the min(R, K) pairs of (R, K) costs whose sum is the least, rows in order.

    A cost that is not finite counts as a very high one: matching never fails, and the losses show the divergence.

    >>> hungarian_match(np.array([[1.0, 9.0], [0.0, 1.0], [np.nan, 0.5]]))
    (array([1, 2]), array([0, 1]))
    """
    rows, columns = linear_sum_assignment(np.nan_to_num(costs, nan=_MAX_COST, posinf=_MAX_COST, neginf=-_MAX_COST))
    return rows, columns


def match_all(costs: npt.NDArray[np.floating]) -> Tensor:
    """(2, L, min(R, K)): rows and columns of the cheapest pairs of each of (L, R, K) tables."""
    return torch.from_numpy(np.stack([np.stack(hungarian_match(table)) for table in costs], axis=1)).long()
