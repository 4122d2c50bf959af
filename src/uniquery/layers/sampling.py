"""Values at points between the cells of a map: bilinear, zero outside.

Letters: P points, D channels, K masks, L layers of R queries. Points are (P, 2) x, y as shares of the map's width and
height.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def bilinear_corners(points: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(P, 4) the cells around each point, row by row, and (P, 4) their weights, 0 for those outside of the map.

    >>> bilinear_corners(torch.tensor([[0.5, 0.5], [0.0, 0.5]]), (1, 2))[1].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]]
    """
    height, width = shape
    (x, weight_x), (y, weight_y) = _neighbors(points[:, 0], width), _neighbors(points[:, 1], height)
    index = y[:, :, None] * width + x[:, None]  # (P, 2, 2)
    return index.flatten(1), (weight_y[:, :, None] * weight_x[:, None]).flatten(1)


def _neighbors(position: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(P, 2) the cells before and after each point along one axis, clamped to the map, and their weights."""
    coordinate = position * size - 0.5
    before = coordinate.floor()
    fraction = coordinate - before
    cells = torch.stack([before, before + 1], dim=1)
    weights = torch.stack([1 - fraction, fraction], dim=1).masked_fill((cells < 0) | (cells > size - 1), 0)
    return cells.clamp(0, size - 1).long(), weights


def sample_map(features: Tensor, points: Tensor) -> Tensor:
    """(P, D) values of a (D, h, w) map at points; differentiable in the map.

    One sum over rows of a table: on a CPU several times as fast as `F.grid_sample`, which loops over channels.
    """
    table = features.to(torch.promote_types(features.dtype, torch.float32)).flatten(1).T.contiguous()  # (h · w, D)
    index, weights = bilinear_corners(points, (features.shape[1], features.shape[2]))
    return F.embedding_bag(index, table, mode="sum", per_sample_weights=weights.to(table.dtype))


def sample_products(queries: Tensor, features: Tensor, points: Tensor) -> Iterator[Tensor]:
    """(R, P) of each layer: the products of (L, R, D) queries and a (D, h, w) map, at points, in float32 or wider.

    Sampling commutes with the product; whichever has fewer channels is sampled, the products or the map.
    """
    layers, rows, channels = queries.shape
    dtype = torch.promote_types(features.dtype, torch.float32)
    no_autocast = partial(torch.autocast, features.device.type, enabled=False)
    queries, features = queries.to(dtype), features.to(dtype)
    if layers * rows < channels:
        with no_autocast():
            products = (queries.flatten(0, 1) @ features.flatten(1)).unflatten(1, features.shape[1:])
        yield from sample_map(products, points).T.unflatten(0, (layers, rows))
        return
    table = sample_map(features, points).T  # (D, P)
    for layer_queries in queries:
        with no_autocast():
            product = layer_queries @ table
        yield product


def sample_masks(masks: Tensor, points: Tensor) -> Tensor:
    """(K, P) values in 0..1 of (K, H, W) bool masks at points, without a copy of the masks in another type."""
    index, weights = bilinear_corners(points, (masks.shape[1], masks.shape[2]))
    pixels = masks.flatten(1)
    values = points.new_zeros(len(masks), len(points))
    for cells, weight in zip(index.T, weights.T, strict=True):
        values.addcmul_(pixels.index_select(1, cells), weight)
    return values


def valid_at(valid: Tensor, points: Tensor) -> Tensor:
    """(P,) bool: whether all pixels of (H, W) `valid` that a point is interpolated from are valid."""
    index, _ = bilinear_corners(points, (valid.shape[0], valid.shape[1]))
    return valid.flatten()[index].all(1)
