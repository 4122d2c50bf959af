"""What the method is about, measured on any data set.

Do queries respond to instances of other images? If an image is transformed by g, do predictions and features change
by g too?

Letters: Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from uniquery.data.augment import TestSize, resize, resized_size
from uniquery.data.batch import Batch, LoadedSample, collate
from uniquery.data.dataset import Dataset
from uniquery.evaluation.coco import Metrics
from uniquery.evaluation.views import relative_feature_error, view_mask_errors
from uniquery.querying import PixelSampling, Segmenter, Transform, sample_pixels
from uniquery.querying.equivariance import view_of
from uniquery.querying.memory import InstancePixels
from uniquery.querying.sampling import instance_cells
from uniquery.structures import SIZE_DIVISIBILITY, Instances, PixelMap, Queries, Targets

PIXELS_PER_INSTANCE = 10
BINS = 2000  # number of histogram bins for responses: percentiles are exact to 0.0005
CONFIDENT = 0.5  # smallest score of an instance whose equivariance is measured
_GROUPS = ("inside", "outside", "same_class", "other_class")


def _crop_side(side: int) -> int:
    """Three quarters of a side, on the grid of crop windows."""
    return max(SIZE_DIVISIBILITY, side * 3 // 4 // SIZE_DIVISIBILITY * SIZE_DIVISIBILITY)


TRANSFORMS: dict[str, Callable[[int, int], Transform]] = {
    "flip": lambda h, w: Transform(0, 0, h, w, flip=True),
    "crop": lambda h, w: Transform(0, 0, _crop_side(h), _crop_side(w)),
    "rotate 30°": lambda h, w: Transform(0, 0, h, w, angle=30.0),
    "scale 0.7": lambda h, w: Transform(0, 0, h, w, scale=0.7),
}


@dataclass(frozen=True)
class Response:
    """The response of queries to instance pixels of other images, over some (query, pixel) pairs.

    Attributes:
        pairs: how many pairs.
        instances: how many instances own the queries of these pairs.
        mean: mean probability; None without a pair.
        above_half: share of pairs above 0.5; None without a pair.
    """

    pairs: int
    instances: int
    mean: float | None
    above_half: float | None


@dataclass(frozen=True)
class CrossScene:
    """How strongly matched queries respond, as probabilities.

    Attributes:
        queries: how many matched queries were measured.
        instances: how many instances their pixels come from.
        own: mean response on the pixels of the own instance.
        mean: mean response on instance pixels of other images.
        p99: 99th percentile of the response on instance pixels of other images.
        above_half: share of (query, pixel of another image) pairs above 0.5.
        inside: pixels at a place that the query's own instance covers in its own image.
        outside: pixels at other places.
        same_class: pixels of instances of the class of the query's own instance.
        other_class: pixels of instances of other classes.
    """

    queries: int
    instances: int
    own: float
    mean: float
    p99: float
    above_half: float
    inside: Response
    outside: Response
    same_class: Response
    other_class: Response


@dataclass(frozen=True)
class EquivarianceError:
    """How far predictions and features are from following a transformation.

    Attributes:
        mask_error: 1 − IoU between the prediction on g(I) and g of the prediction on I, over confident instances;
            None without any.
        feature_error: mean squared distance of f(g(I)) and g(f(I)), relative to the variance of g(f(I)) over the image.
        instances: how many predicted instances the mask error rests on.
        images: how many images the feature error rests on.
    """

    mask_error: float | None
    feature_error: float
    instances: int
    images: int


@dataclass(frozen=True)
class ProbedImage:
    """One image and what the model computed from it.

    Attributes:
        batch: the image and its ground truth.
        pixel_map: f(I).
        queries: those that own an instance.
        own_response: (Q,) mean response of each query on its own instance.
        instance_pixels: sampled inside instances.
        instances: confident predictions, at the size the model got.
    """

    batch: Batch
    pixel_map: PixelMap
    queries: Queries
    own_response: Tensor
    instance_pixels: InstancePixels
    instances: Instances


@dataclass(frozen=True)
class Diagnosis:
    """All that is measured.

    Attributes:
        images: those that were measured.
        cross_scene: None if no query is matched, or there is no other image.
        equivariance: error by the name of the transformation; None if nothing could be compared.
        sweep: mask metrics by mask threshold, if they were measured.
    """

    images: Sequence[ProbedImage]
    cross_scene: CrossScene | None
    equivariance: Mapping[str, EquivarianceError | None]
    sweep: Mapping[float, Metrics] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The numbers, ready for json."""
        numbers: dict[str, Any] = {
            "images": len(self.images),
            "cross_scene": asdict(self.cross_scene) if self.cross_scene else None,
            "equivariance": {name: asdict(error) if error else None for name, error in self.equivariance.items()},
        }
        if self.sweep is not None:
            numbers["sweep"] = {str(threshold): metrics.values for threshold, metrics in self.sweep.items()}
        return numbers


def diagnose(model: Segmenter[Any, Any, Any], data: Dataset, size: TestSize, images: int = 32) -> Diagnosis:
    """Measures a model on some images, spread over a data set; `sweep` is left out.

    Args:
        model: what is measured.
        data: annotated images, which need not be those of training.
        size: how images are resized.
        images: how many images are used, at most.
    """
    indices = range(0, len(data), max(1, len(data) // images))[:images]
    probed = probe_images(model, data, size.short, size.longest, indices)
    errors = {name: equivariance_error(model, probed, make) for name, make in TRANSFORMS.items()}
    return Diagnosis(probed, cross_scene_response(model, probed), errors)


@torch.inference_mode()
def probe_images(
    model: Segmenter[Any, Any, Any], data: Dataset, short: int, longest: int, indices: Sequence[int]
) -> list[ProbedImage]:
    """Runs the model on images with their ground truth; keeps matched queries and sampled instance pixels."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # a segmenter that limits its queries may select them at random
    probed = []
    for index in indices:
        sample = data.load(index)
        resized = resize(sample, resized_size(*sample.size, short, longest)).without_empty()
        batch = collate([LoadedSample(resized, int(data.image_ids[index]), sample.size)])
        assert isinstance(batch, Batch)
        batch = batch.to(device)
        outputs = model(batch.images)
        queries = model.queries(outputs, model.assign(outputs, batch.targets))
        queries = queries[queries.target >= 0]
        own_response = _own_response(model, queries, outputs.pixels, batch.targets[0])
        pixels = sample_pixels(outputs.pixels, batch.targets, PixelSampling(count=PIXELS_PER_INSTANCE), generator)
        (instances,) = model.predict(outputs, batch.images.sizes)
        confident = instances[instances.scores >= CONFIDENT]
        probed.append(ProbedImage(batch, outputs.pixels, queries, own_response, pixels, confident))
    return probed


def _own_response(model: Segmenter[Any, Any, Any], queries: Any, pixels: Any, target: Targets) -> Tensor:
    """(Q,) mean probability of each query on the cells of the instance that it owns."""
    probabilities = model.decode(queries, pixels).sigmoid().flatten(1)
    owned = instance_cells(target.masks, pixels.stride)[queries.target]
    return (probabilities * owned).sum(1) / owned.sum(1).clamp(min=1)


@torch.inference_mode()
def cross_scene_response(model: Segmenter[Any, Any, Any], images: Sequence[ProbedImage]) -> CrossScene | None:
    """The matched queries of every image on the instance pixels of all others; None if there is nothing to compare."""
    histogram = torch.zeros(BINS, dtype=torch.float64)
    groups = {name: torch.zeros(3, dtype=torch.float64) for name in ("all", *_GROUPS)}  # pairs, sum, above 0.5
    owners: dict[str, set[tuple[int, int]]] = {name: set() for name in groups}  # (image, instance)
    for index, image in enumerate(images):
        for other in images:
            if other is not image and len(image.queries) and len(other.instance_pixels):
                response = model.similarity(image.queries, other.instance_pixels).sigmoid().float().cpu()
                histogram += torch.histc(response, BINS, 0.0, 1.0)
                for name, members in _members(image, other.instance_pixels).items():
                    chosen = response[members]
                    groups[name] += torch.stack([members.sum(), chosen.sum(), (chosen > 0.5).sum()]).double()
                    asking = image.queries.target.cpu()[members.any(1)]
                    owners[name] |= {(index, target) for target in asking.tolist()}
    pairs = int(groups["all"][0])
    if not pairs:
        return None
    own = torch.cat([image.own_response for image in images])
    responses = {name: _response(sums, len(owners[name])) for name, sums in groups.items()}
    overall = responses.pop("all")
    assert overall.mean is not None
    assert overall.above_half is not None
    return CrossScene(
        queries=len(own),
        instances=sum(len(image.batch.targets[0]) for image in images),
        own=own.mean().item(),
        mean=overall.mean,
        p99=(histogram.cumsum(0) >= 0.99 * pairs).float().argmax().item() / BINS,
        above_half=overall.above_half,
        **responses,
    )


def _members(image: ProbedImage, pixels: InstancePixels) -> dict[str, Tensor]:
    """(Q, P) bool: which pairs of the queries of an image and the pixels of another belong to each group."""
    target, queries = image.batch.targets[0], image.queries
    inside = _covered(target.masks[queries.target], pixels.locations).cpu()
    same = (target.labels[queries.target][:, None] == pixels.labels).cpu()
    return {
        "all": torch.ones_like(inside),
        "inside": inside,
        "outside": ~inside,
        "same_class": same,
        "other_class": ~same,
    }


def _covered(masks: Tensor, locations: Tensor) -> Tensor:
    """(Q, P) bool: whether each (H, W) mask covers each x, y; nothing is covered outside of the masks."""
    height, width = masks.shape[-2:]
    x, y = locations.long().unbind(1)
    is_in_frame = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return masks[:, y.clamp(0, height - 1), x.clamp(0, width - 1)] & is_in_frame


def _response(sums: Tensor, instances: int) -> Response:
    pairs, total, above = sums.tolist()
    return Response(int(pairs), instances, total / pairs if pairs else None, above / pairs if pairs else None)


@torch.inference_mode()
def equivariance_error(
    model: Segmenter[Any, Any, Any], images: Sequence[ProbedImage], make_transform: Callable[[int, int], Transform]
) -> EquivarianceError | None:
    """One transformation, over all images; None if no image is large enough."""
    mask_errors, feature_errors = [], []
    for image in images:
        height, width = (side // SIZE_DIVISIBILITY * SIZE_DIVISIBILITY for side in image.batch.images.sizes[0])
        if not height or not width:
            continue
        g = make_transform(height, width)
        views, _ = view_of(image.batch.images, image.batch.targets, [g])
        outputs = model(views)
        feature_errors.append(relative_feature_error(outputs.pixels, image.pixel_map, (height, width), g))
        (instances,) = model.predict(outputs, [(g.height, g.width)])
        mask_errors += view_mask_errors(image.instances, instances, g)
    if not feature_errors:
        return None
    return EquivarianceError(
        sum(mask_errors) / len(mask_errors) if mask_errors else None,
        sum(feature_errors) / len(feature_errors),
        instances=len(mask_errors),
        images=len(feature_errors),
    )
