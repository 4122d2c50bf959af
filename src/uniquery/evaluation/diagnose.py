"""What the method is about, measured on any data set: do queries fire on other scenes, do predictions follow g?

Letters: Q queries, P pixels, K instances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from uniquery.data.augment import resize, resized_size
from uniquery.data.batch import Batch, LoadedSample, collate
from uniquery.data.coco import CocoData
from uniquery.querying import Segmenter, Transform, instance_balanced, sample_pixels
from uniquery.querying.equivariance import feature_equivariance, view_of
from uniquery.querying.memory import StoredPixels
from uniquery.querying.sampling import owned_cells
from uniquery.structures import Instances, PixelMap, Queries, Targets

PIXELS_PER_INSTANCE = 10
BINS = 2000  # of the histogram of responses: percentiles are exact to 0.0005
CONFIDENT = 0.5

FAMILIES: dict[str, Callable[[int, int], Transform]] = {
    "flip": lambda h, w: Transform(0, 0, h, w, flip=True),
    "crop": lambda h, w: Transform(0, 0, max(32, h * 3 // 4 // 32 * 32), max(32, w * 3 // 4 // 32 * 32)),
    "rotate 30°": lambda h, w: Transform(0, 0, h, w, angle=30.0),
    "scale 0.7": lambda h, w: Transform(0, 0, h, w, scale=0.7),
}


@dataclass(frozen=True)
class CrossScene:
    """How strongly matched queries fire, as probabilities.

    Attributes:
        queries: how many were measured.
        own: mean response on the pixels of the own instance.
        mean: mean response on instance pixels of other images.
        p99: its 99th percentile.
        above_half: share of (query, pixel) pairs above 0.5.
    """

    queries: int
    own: float
    mean: float
    p99: float
    above_half: float


@dataclass(frozen=True)
class Equivariant:
    """How far predictions and features are from following a transformation.

    Attributes:
        mask_error: 1 − IoU between the prediction on g(I) and g of the prediction on I, over confident instances.
        feature_error: mean squared distance of f(g(I)) and g(f(I)), relative to the mean square of g(f(I)).
    """

    mask_error: float
    feature_error: float


@dataclass(frozen=True)
class Scene:
    """One image as the model saw it, with what it made of it.

    Attributes:
        batch: the image and its ground truth.
        embeddings: f(I).
        queries: those that own an instance.
        own: (Q,) mean response of each query on its own instance.
        pixels: sampled inside instances.
        found: confident predictions, at the size the model saw.
    """

    batch: Batch
    embeddings: PixelMap
    queries: Queries
    own: Tensor
    pixels: StoredPixels
    found: Instances


@torch.inference_mode()
def read_scenes(
    model: Segmenter[Any, Any, Any], data: CocoData, short: int, longest: int, indices: Sequence[int]
) -> list[Scene]:
    """Forwards images with their ground truth, and keeps matched queries and sampled instance pixels."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # a segmenter may draw which of too many queries it takes
    scenes = []
    for index in indices:
        sample = data.load(index)
        resized = resize(sample, resized_size(*sample.size, short, longest)).without_empty()
        batch = collate([LoadedSample(resized, int(data.image_ids[index]), sample.size)])
        assert isinstance(batch, Batch)
        batch = batch.to(device)
        outputs = model(batch.images)
        queries = model.queries(outputs, model.assign(outputs, batch.targets))
        queries = queries[queries.target >= 0]
        own = _own_response(model, queries, outputs.pixels, batch.targets[0])
        pixels = sample_pixels(outputs.pixels, batch.targets, instance_balanced(PIXELS_PER_INSTANCE), generator)
        (found,) = model.predict(outputs, batch.images.sizes)
        scenes.append(Scene(batch, outputs.pixels, queries, own, pixels, found[found.scores >= CONFIDENT]))
    return scenes


def _own_response(model: Segmenter[Any, Any, Any], queries: Any, pixels: Any, target: Targets) -> Tensor:
    """(Q,) mean probability of each query on the cells of the instance that it owns."""
    probabilities = model.decode(queries, pixels).sigmoid().flatten(1)
    owned = owned_cells(target.masks, pixels.stride)[queries.target]
    return (probabilities * owned).sum(1) / owned.sum(1).clamp(min=1)


@torch.inference_mode()
def cross_scene_response(model: Segmenter[Any, Any, Any], scenes: Sequence[Scene]) -> CrossScene | None:
    """Every scene's matched queries on the instance pixels of all other scenes; None if there is nothing to compare."""
    counts = torch.zeros(BINS, dtype=torch.float64)
    total = 0.0
    for scene in scenes:
        for other in scenes:
            if other is not scene and len(scene.queries) and len(other.pixels):
                fired = model.similarity(scene.queries, other.pixels).sigmoid().float().cpu()
                counts += torch.histc(fired, BINS, 0.0, 1.0)
                total += fired.sum().item()
    pairs = counts.sum().item()
    if not pairs:
        return None
    own = torch.cat([s.own for s in scenes])
    p99 = (counts.cumsum(0) >= 0.99 * pairs).float().argmax().item() / BINS
    return CrossScene(len(own), own.mean().item(), total / pairs, p99, counts[BINS // 2 :].sum().item() / pairs)


@torch.inference_mode()
def equivariance_error(
    model: Segmenter[Any, Any, Any], scenes: Sequence[Scene], make: Callable[[int, int], Transform]
) -> Equivariant | None:
    """One transformation, over all scenes; None if no scene is large enough or nothing is found."""
    masks, features = [], []
    for scene in scenes:
        height, width = (side // 32 * 32 for side in scene.batch.images.sizes[0])
        if not height or not width:
            continue
        g = make(height, width)
        views, _ = view_of(scene.batch.images, scene.batch.targets, [g])
        seen = model(views)
        nothing = replace(seen.pixels, embeddings=seen.pixels.embeddings * 0)
        power = feature_equivariance(nothing, scene.embeddings, [g]).clamp(min=1e-12)
        features.append((feature_equivariance(seen.pixels, scene.embeddings, [g]) / power).item())
        (found,) = model.predict(seen, [(g.height, g.width)])
        masks += _mask_errors(scene.found, found, g)
    if not masks or not features:
        return None
    return Equivariant(sum(masks) / len(masks), sum(features) / len(features))


def _mask_errors(before: Instances, after: Instances, g: Transform) -> list[float]:
    """1 − best IoU, within the class, of each instance that the view still shows."""
    if not len(before):
        return []
    moved = g.on_masks(before.masks).flatten(1).float()
    found = (after.masks & g.valid()).flatten(1).float()
    overlap = moved @ found.T  # (before, after)
    union = moved.sum(1)[:, None] + found.sum(1) - overlap
    iou = (overlap / union.clamp(min=1)) * (before.labels[:, None] == after.labels)
    best = iou.amax(1) if len(after) else torch.zeros(len(before))
    return (1 - best)[moved.any(1)].tolist()
