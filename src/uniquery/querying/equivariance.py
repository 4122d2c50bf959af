"""L_equi (Eq. 6–8): queries and features must follow geometric transformations.

Letters: B images, Q queries, D channels, h × w the map, H × W the padded input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from uniquery.masks.geometry import mask_areas, mask_boxes
from uniquery.parallel import loss_normalizer
from uniquery.querying.transforms import RandomTransform, Transform
from uniquery.structures import Images, PixelMap, Queries, Targets

MIN_VISIBLE = 0.1  # share of an instance that a view must still show


class EquivarianceSettings(RandomTransform):
    """L_equi (Eq. 6–8): the random policy G, and how its views are used. The defaults are the paper's."""

    weight: float = Field(3.0, ge=0, description="λ; 0 with paired views is plain augmentation (Eq. 7)")
    views: Literal["paired", "extra"] = Field(
        "paired", description="paired: half of the batch are views, with the base loss too; extra: for L_equi only"
    )
    target: Literal["masks", "features"] = Field("masks", description="masks: Eq. 8; features: Eq. 6")

    @model_validator(mode="after")
    def _extra_views_have_a_loss(self) -> Self:
        if self.views == "extra" and not self.weight:
            raise ValueError("weight 0 leaves extra views without a loss: use paired views, or leave equivariance out")
        return self


def view_of(
    images: Images, targets: Sequence[Targets], transforms: Sequence[Transform], mirrored: Tensor | None = None
) -> tuple[Images, list[Targets]]:
    """g(I) and g(M), padded to the largest view; instances that are almost invisible in g(I) are dropped.

    `mirrored` is (C,) the label that each class has where g flips; None: the same.
    """
    height, width = _largest(transforms)
    pixels = images.pixels.new_zeros(*images.pixels.shape[:2], height, width)
    view_targets = []
    for i, (g, target) in enumerate(zip(transforms, targets, strict=True)):
        pixels[i, :, : g.height, : g.width] = g.on_map(images.pixels[i])
        masks = g.on_masks(target.masks)
        before, after = mask_areas(target.masks), mask_areas(masks)
        shown = target if mirrored is None or not g.flip else target.with_labels(mirrored)
        visible = replace(shown, masks=masks)[(after > 0) & (after >= MIN_VISIBLE * g.scale**2 * before)]
        padding = (0, width - g.width, 0, height - g.height)
        masks, valid = F.pad(visible.masks, padding), _valid_in_view(target, g)
        valid = None if valid is None else F.pad(valid, padding, value=True)
        view_targets.append(replace(visible, masks=masks, boxes=mask_boxes(masks), valid=valid))
    return Images(pixels, tuple((g.height, g.width) for g in transforms)), view_targets


def _valid_in_view(target: Targets, g: Transform) -> Tensor | None:
    """(height, width) of the view, bool: inside the window and valid in the source; None means everywhere."""
    if target.valid is None:
        return None if g.is_exact else g.valid(device=target.masks.device)
    return g.on_masks(target.valid[None])[0] & g.valid(device=target.valid.device)


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
        mask_loss: (logits, queries, targets) → scalar; `Segmenter.mask_loss`, or your own.
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
            view_queries: matched queries of the views; `image` is the index of the view.
            view_targets: g(M).
            original: f(I).
            transforms: one g per image.
        """
        logits = self.decode(view_queries, warped(original, transforms))
        inside = [_inside_window(target, g) for target, g in zip(view_targets, transforms, strict=True)]
        return self.mask_loss(logits, view_queries, inside)


def _inside_window(target: Targets, g: Transform) -> Targets:
    """The same targets, with pixels outside of g(f(I)) marked as invalid too."""
    height, width = target.masks.shape[1:]
    if g.is_exact and (g.height, g.width) == (height, width):
        return target
    inside = F.pad(g.valid(device=target.masks.device), (0, width - g.width, 0, height - g.height))
    return replace(target, valid=inside if target.valid is None else inside & target.valid)


def feature_equivariance(view: PixelMap, original: PixelMap, transforms: Sequence[Transform]) -> Tensor:
    """Eq. 6: mean squared difference of f(g(I)) and g(f(I)) over valid pixels; gradients on both sides."""
    dtype = torch.promote_types(view.embeddings.dtype, torch.float32)
    total = view.embeddings.new_zeros((), dtype=dtype)
    count = torch.zeros_like(total)
    for view_embeddings, embeddings, g in zip(view.embeddings, original.embeddings, transforms, strict=True):
        moved = g.on_map(embeddings, view.stride).to(dtype)
        unpadded = view_embeddings[:, : moved.shape[1], : moved.shape[2]].to(dtype)
        valid = g.valid(view.stride, moved.device)
        total = total + ((unpadded - moved).square() * valid).sum()
        count = count + len(moved) * valid.sum()
    return total / loss_normalizer(count)
