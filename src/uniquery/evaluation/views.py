"""How well a model's features and predictions follow a transformation g of one image.

Letters: N predictions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from uniquery.querying import Transform
from uniquery.querying.equivariance import feature_equivariance
from uniquery.structures import Instances, PixelMap


def relative_feature_error(view: PixelMap, original: PixelMap, size: tuple[int, int], g: Transform) -> float:
    """Mean squared distance of f(g(I)) and g(f(I)), relative to the variance of g(f(I)) over the image.

    Args:
        view: f(g(I)).
        original: f(I).
        size: (height, width) of the image inside the padding.
        g: the transformation.
    """
    zero = replace(view, embeddings=view.embeddings * 0)
    variance = feature_equivariance(zero, _centered(original, *size), [g]).clamp(min=1e-12)
    return (feature_equivariance(view, original, [g]) / variance).item()


def _centered(pixel_map: PixelMap, height: int, width: int) -> PixelMap:
    """The map minus the mean of each channel over the first height × width pixels, which hold the image."""
    image = pixel_map.embeddings[:, :, : height // pixel_map.stride, : width // pixel_map.stride]
    return replace(pixel_map, embeddings=pixel_map.embeddings - image.mean((2, 3), keepdim=True))


def view_mask_errors(before: Instances, after: Instances, g: Transform) -> list[float]:
    """1 − best IoU, within the class, of each instance of which the view shows at least a pixel."""
    iou, _, visible = best_ious(before, after, g)
    return (1 - iou)[visible].tolist()


def best_ious(before: Instances, after: Instances, g: Transform) -> tuple[Tensor, Tensor, Tensor]:
    """How well the prediction on g(I) fits g of the prediction on I.

    Args:
        before: N predictions on I.
        after: predictions on g(I).
        g: the transformation.

    Returns:
        (N,) the best IoU with a prediction of the same class; (N,) which one that is, −1 for none; and (N,) bool,
        whether the view shows at least a pixel of the instance.
    """
    count = len(before)
    if not count:
        return torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    expected = g.on_masks(before.masks).flatten(1).float()
    visible = expected.any(1)
    if not len(after):
        return torch.zeros(count), torch.full((count,), -1), visible
    predicted = (after.masks & g.valid()).flatten(1).float()
    overlap = expected @ predicted.T  # (before, after)
    union = expected.sum(1)[:, None] + predicted.sum(1) - overlap
    best = ((overlap / union.clamp(min=1)) * (before.labels[:, None] == after.labels)).max(1)
    return best.values, torch.where(best.values > 0, best.indices, -1), visible
