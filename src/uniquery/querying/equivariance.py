"""L_equi (Eq. 6–8): queries and features must follow geometric transformations.

Letters: B images, Q queries, D channels, h × w the map, H × W the padded input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from uniquery.masks.geometry import mask_areas, mask_boxes
from uniquery.parallel import normalizer
from uniquery.querying.transforms import Transform
from uniquery.structures import Images, PixelMap, Queries, Targets

MIN_VISIBLE = 0.1  # share of an instance that a view must still show


def view_of(
    images: Images, targets: Sequence[Targets], transforms: Sequence[Transform]
) -> tuple[Images, list[Targets]]:
    """g(I) and g(M), padded to the largest view; instances that g leaves almost invisible are dropped."""
    height, width = _largest(transforms)
    pixels = images.pixels.new_zeros(*images.pixels.shape[:2], height, width)
    moved = []
    for i, (g, target) in enumerate(zip(transforms, targets, strict=True)):
        pixels[i, :, : g.height, : g.width] = g.on_map(images.pixels[i])
        masks = g.on_masks(target.masks)
        before, after = mask_areas(target.masks), mask_areas(masks)
        seen = replace(target, masks=masks)[(after > 0) & (after >= MIN_VISIBLE * g.scale**2 * before)]
        padding = (0, width - g.width, 0, height - g.height)
        masks = F.pad(seen.masks, padding)
        valid = None if g.is_exact else F.pad(g.valid(device=masks.device), padding, value=True)
        moved.append(replace(seen, masks=masks, boxes=mask_boxes(masks), valid=valid))
    return Images(pixels, tuple((g.height, g.width) for g in transforms)), moved


def warped(pixel_map: PixelMap, transforms: Sequence[Transform]) -> PixelMap:
    """g(f(I)), padded like f(g(I))."""
    height, width = (side // pixel_map.stride for side in _largest(transforms))
    maps = []
    for embeddings, g in zip(pixel_map.embeddings, transforms, strict=True):
        moved = g.on_map(embeddings, pixel_map.stride)
        maps.append(F.pad(moved, (0, width - moved.shape[2], 0, height - moved.shape[1])))
    return PixelMap(torch.stack(maps), pixel_map.stride)


def _largest(transforms: Sequence[Transform]) -> tuple[int, int]:
    return max(g.height for g in transforms), max(g.width for g in transforms)


@dataclass(frozen=True)
class EquivarianceLoss:
    """Eq. 8: the queries of g(I), applied to g(f(I)), must give g(M), by the segmenter's own mask loss.

    Attributes:
        decode: ⟨q, I⟩ as (Q, h, w) logits of queries on a map; `Segmenter.decode`, or your own.
        mask_loss: of the logits, given the queries and the targets; `Segmenter.mask_loss`, or your own.
    """

    decode: Callable[[Any, PixelMap], Tensor]
    mask_loss: Callable[[Tensor, Any, Sequence[Targets]], Tensor]

    def __call__(
        self,
        view_queries: Queries,
        view_targets: Sequence[Targets],
        original: PixelMap,
        transforms: Sequence[Transform],
    ) -> Tensor:
        """The loss; gradients reach the queries of the view and the features of the original.

        Args:
            view_queries: of g(I); `image` counts views, and each owns an instance.
            view_targets: g(M).
            original: f(I).
            transforms: g of each image.
        """
        logits = self.decode(view_queries, warped(original, transforms))
        inside = [_inside_window(target, g) for target, g in zip(view_targets, transforms, strict=True)]
        return self.mask_loss(logits, view_queries, inside)


def _inside_window(target: Targets, g: Transform) -> Targets:
    """The same targets, known only where g(f(I)) is: not in the padding around it."""
    height, width = target.masks.shape[1:]
    if g.is_exact and (g.height, g.width) == (height, width):
        return target
    valid = F.pad(g.valid(device=target.masks.device), (0, width - g.width, 0, height - g.height))
    return replace(target, valid=valid)


def feature_equivariance(view: PixelMap, original: PixelMap, transforms: Sequence[Transform]) -> Tensor:
    """Eq. 6: mean squared difference of f(g(I)) and g(f(I)) over valid pixels; gradients on both sides."""
    dtype = torch.promote_types(view.embeddings.dtype, torch.float32)
    total = view.embeddings.new_zeros((), dtype=dtype)
    count = torch.zeros_like(total)
    for seen, embeddings, g in zip(view.embeddings, original.embeddings, transforms, strict=True):
        moved = g.on_map(embeddings, view.stride).to(dtype)
        here = seen[:, : moved.shape[1], : moved.shape[2]].to(dtype)
        valid = g.valid(view.stride, seen.device)
        total = total + ((here - moved).square() * valid).sum()
        count = count + len(seen) * valid.sum()
    return total / normalizer(count)
