"""Which pixels of an image enter the memory.

Letters: K instances, H × W the padded input, h × w the map, C = h · w its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from uniquery.masks.geometry import mask_centroids
from uniquery.querying.keyed_random import Generators, generator_per_image
from uniquery.querying.memory import InstancePixels
from uniquery.settings import Settings
from uniquery.structures import PixelMap, Targets

Sampler = Callable[[Tensor, torch.Generator | None], tuple[Tensor, Tensor]]
"""(K, C) owned cells, generator → instance and cell of each sampled pixel."""


class PixelSampling(Settings):
    """Which pixels of an image enter the memory."""

    name: Literal["instance_balanced", "sparse", "dense"] = Field(
        "instance_balanced",
        description="the same number of each instance, a number of each image, or every pixel of every instance",
    )
    count: int | None = Field(
        None, gt=0, description="pixels of each instance (None: 50), or of each image if sparse (None: 500)"
    )

    @model_validator(mode="after")
    def _dense_has_no_count(self) -> Self:
        if self.name == "dense" and self.count is not None:
            raise ValueError("dense sampling takes every pixel: leave count out")
        return self

    def __call__(self, owned: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Instance and cell of each sampled pixel, of (K, C) owned cells."""
        if self.name == "dense":
            return dense(owned)
        if self.name == "sparse":
            return sparse(owned, self.count or 500, generator)
        return instance_balanced(owned, self.count or 50, generator)


def instance_balanced(owned: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """`count` cells of each instance without replacement, or all of its cells if it has fewer."""
    best = _random_priority(owned, generator).topk(min(count, owned.shape[1]), dim=1)
    instance, position = (best.values >= 0).nonzero(as_tuple=True)
    return instance, best.indices[instance, position]


def sparse(owned: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """`count` instance cells of an image without replacement, or all of them if there are fewer."""
    best = _random_priority(owned, generator).flatten().topk(min(count, owned.numel()))
    pairs = best.indices[best.values >= 0]
    return pairs // owned.shape[1], pairs % owned.shape[1]


def dense(owned: Tensor) -> tuple[Tensor, Tensor]:
    """All instance cells."""
    instance, cell = owned.nonzero(as_tuple=True)
    return instance, cell


def _random_priority(owned: Tensor, generator: torch.Generator | None) -> Tensor:
    """A random number for each owned cell, −1 for the others: the largest are sampled."""
    priority = torch.rand(owned.shape, generator=generator, device=generator.device if generator else owned.device)
    return priority.to(owned.device).masked_fill(~owned, -1)


def instance_cells(masks: Tensor, stride: int, valid: Tensor | None = None) -> Tensor:
    """(K, C) bool: the cells whose center lies in an instance and in (H, W) `valid`.

    An instance too small to own a cell gets the one under its centroid, so that every instance is sampled.
    """
    centers = slice(stride // 2, None, stride)
    cells = masks[:, centers, centers]  # (K, h, w)
    height, width = cells.shape[1:]
    owned = cells.flatten(1).clone()
    small = (~owned.any(1) & masks.flatten(1).any(1)).nonzero().flatten()
    if len(small):
        column, row = (mask_centroids(masks[small]) / stride).long().unbind(1)
        owned[small, row.clamp(max=height - 1) * width + column.clamp(max=width - 1)] = True
    return owned if valid is None else owned & valid[centers, centers].flatten()


@torch.no_grad()
def sample_pixels(
    pixel_map: PixelMap, targets: Sequence[Targets], sampler: Sampler, generator: Generators = None
) -> InstancePixels:
    """The sampled instance pixels of a batch, detached; none from padding or where `Targets.valid` is false.

    Raises:
        ValueError: the masks are not as large as the map times its stride.
    """
    parts = []
    extent = tuple(pixel_map.stride * side for side in pixel_map.embeddings.shape[-2:])
    locations = pixel_map.locations()
    generators = generator_per_image(generator, len(targets))
    for embeddings, target, generator in zip(pixel_map.embeddings.detach(), targets, generators, strict=True):
        if target.masks.shape[1:] != extent:
            raise ValueError(
                f"the masks of image {target.image_id} are {tuple(target.masks.shape[1:])}, its map at stride "
                f"{pixel_map.stride} spans {extent}: pad images and masks to a multiple of the stride"
            )
        instance, cell = sampler(instance_cells(target.masks, pixel_map.stride, target.valid), generator)
        image_ids = torch.full_like(cell, target.image_id)
        things = torch.ones_like(cell, dtype=torch.bool) if target.things is None else target.things[instance]
        pixels = embeddings.flatten(1)[:, cell].T.float()
        parts.append(InstancePixels(pixels, locations[cell], image_ids, target.labels[instance], things))
    return InstancePixels.cat(parts)
