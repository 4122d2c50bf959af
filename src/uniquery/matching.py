"""Rules that assign predictions to ground truth. None of them carries a gradient.

Letters: L locations, K instances of one image.
"""

import torch
from torch import Tensor

from uniquery.structures import Targets, mask_centroids

_INSTANCES_AT_ONCE = 64  # bounds the (L, K) tables on images with hundreds of instances


def box_distances(locations: Tensor, boxes: Tensor) -> Tensor:
    """(..., 4): how far left, top, right and bottom of a box's edges lie from a location."""
    return torch.cat([locations - boxes[..., :2], boxes[..., 2:] - locations], dim=-1)


@torch.no_grad()
def assign_points(
    locations: Tensor, strides: Tensor, size_ranges: Tensor, targets: Targets, radius: float = 1.5
) -> Tensor:
    """FCOS's point-in-instance rule with centre sampling around the mask centroid, as in CondInst.

    A location may own an instance if it lies within `radius` strides of the mask's centroid and inside its box, and
    if the largest of its distances to the box's edges falls into the size range of its level, both ends included.
    Where several instances compete, the smallest box wins.

    Args:
        locations: (L, 2) x, y in input pixels.
        strides: (L,) of each location's level.
        size_ranges: (L, 2) smallest and largest distance of each location's level.
        targets: the image's instances.
        radius: of centre sampling, in strides.

    Returns:
        (L,) index of the owned instance, −1 for none.
    """
    owner = torch.full((len(locations),), -1, dtype=torch.int64, device=locations.device)
    smallest = torch.full((len(locations),), torch.inf, device=locations.device)
    areas = (targets.boxes[:, 2:] - targets.boxes[:, :2]).prod(1)
    reach = (radius * strides)[:, None, None]  # (L, 1, 1)
    points = locations[:, None]  # (L, 1, 2)
    low, high = size_ranges[:, :1], size_ranges[:, 1:]
    for start in range(0, len(targets), _INSTANCES_AT_ONCE):
        part = targets[start : start + _INSTANCES_AT_ONCE]
        centres = mask_centroids(part.masks)
        near = torch.cat(
            [
                torch.maximum(centres - reach, part.boxes[:, :2]),
                torch.minimum(centres + reach, part.boxes[:, 2:]),
            ],
            dim=-1,
        )  # (L, k, 4): the sampling region, inside the box
        is_near = box_distances(points, near).amin(-1) > 0
        furthest = box_distances(points, part.boxes).amax(-1)
        is_fit = (furthest >= low) & (furthest <= high)
        area = torch.where(is_near & is_fit, areas[start : start + len(part)], torch.inf)
        least, index = area.min(1)
        owner = torch.where(least < smallest, index + start, owner)
        smallest = torch.minimum(smallest, least)
    return owner
