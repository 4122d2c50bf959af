"""Which pixels of an image enter the memory.

Letters: K instances, H × W the padded input, h × w the map, C = h · w its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uniquery.masks.geometry import mask_centroids
from uniquery.querying.keyed_random import Generators, of_each_image
from uniquery.querying.memory import StoredPixels
from uniquery.structures import PixelMap, Targets

Sampler = Callable[[Tensor, torch.Generator | None], tuple[Tensor, Tensor]]


def owned_cells(masks: Tensor, stride: int) -> Tensor:
    """(K, C) bool: the cells whose center lies in an instance.

    An instance too small to own one gets the cell under its center of mass, so that none goes unseen.
    """
    cells = masks[:, stride // 2 :: stride, stride // 2 :: stride]  # (K, h, w)
    height, width = cells.shape[1:]
    owned = cells.flatten(1).clone()
    lost = (~owned.any(1) & masks.flatten(1).any(1)).nonzero().flatten()
    if len(lost):
        column, row = (mask_centroids(masks[lost]) / stride).long().unbind(1)
        owned[lost, row.clamp(max=height - 1) * width + column.clamp(max=width - 1)] = True
    return owned


def instance_balanced(count: int = 50) -> Sampler:
    """`count` cells of each instance without replacement, or all it has."""
    _check(count)

    def sample(owned: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        luck = _random_priority(owned, generator)
        best = luck.topk(min(count, owned.shape[1]), dim=1)
        instance, rank = (best.values >= 0).nonzero(as_tuple=True)
        return instance, best.indices[instance, rank]

    return sample


def sparse(count: int = 500) -> Sampler:
    """`count` instance cells of each image without replacement, or all it has."""
    _check(count)

    def sample(owned: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        best = _random_priority(owned, generator).flatten().topk(min(count, owned.numel()))
        pairs = best.indices[best.values >= 0]
        return pairs // owned.shape[1], pairs % owned.shape[1]

    return sample


def dense() -> Sampler:
    """All instance cells."""

    def sample(owned: Tensor, _: torch.Generator | None) -> tuple[Tensor, Tensor]:
        instance, cell = owned.nonzero(as_tuple=True)
        return instance, cell

    return sample


def _random_priority(owned: Tensor, generator: torch.Generator | None) -> Tensor:
    """A random number for each owned cell, −1 for the others: the largest are the sample."""
    luck = torch.rand(owned.shape, generator=generator, device=generator.device if generator else owned.device)
    return luck.to(owned.device).masked_fill(~owned, -1)


def _check(count: int) -> None:
    if count < 1:
        raise ValueError(f"the number of sampled pixels is {count} and must be at least 1")


@torch.no_grad()
def sample_pixels(
    pixel_map: PixelMap, targets: Sequence[Targets], sampler: Sampler, generator: Generators = None
) -> StoredPixels:
    """The sampled instance pixels of a batch, detached. Padding and crowd regions own no cell, so they never enter.

    Raises:
        ValueError: the masks have not the size of the map times its stride.
    """
    parts = []
    extent = tuple(pixel_map.stride * side for side in pixel_map.embeddings.shape[-2:])
    locations = pixel_map.locations()
    generators = of_each_image(generator, len(targets))
    for embeddings, target, generator in zip(pixel_map.embeddings.detach(), targets, generators, strict=True):
        if target.masks.shape[1:] != extent:
            raise ValueError(
                f"the masks of image {target.image_id} are {tuple(target.masks.shape[1:])}, its map at stride "
                f"{pixel_map.stride} spans {extent}: pad images and masks to a multiple of the stride"
            )
        instance, cell = sampler(owned_cells(target.masks, pixel_map.stride), generator)
        image_ids = torch.full_like(cell, target.image_id)
        things = torch.ones_like(cell, dtype=torch.bool) if target.things is None else target.things[instance]
        pixels = embeddings.flatten(1)[:, cell].T.float()
        parts.append(StoredPixels(pixels, locations[cell], image_ids, target.labels[instance], things))
    return StoredPixels.cat(parts)
