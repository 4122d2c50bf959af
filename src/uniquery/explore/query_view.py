"""The response of one query: on its own image, on the most responsive other images, and as numbers.

Letters: P pixels, h × w the map, H × W the input.
"""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uniquery.data.batch import Batch
from uniquery.errors import UserError
from uniquery.explore.response_maps import ResponseMap, ResponseMaps, model_batch
from uniquery.masks.rle import Rle
from uniquery.model import Model
from uniquery.querying.sampling import instance_cells
from uniquery.structures import PixelMap, Queries

OTHERS = 24
BINS = 20
KEPT_IMAGES = 2
"""How many images per run keep their forward pass: instances of one image are clicked one after another."""

Instance = tuple[int, Rle]
"""Label of the data set, and mask."""


@dataclass(frozen=True)
class OwnImage:
    """The image of the query, and what the model computed from it.

    Attributes:
        index: of the image.
        model_version: of the run.
        batch: the image and its ground truth.
        positions: which instance of the ground truth each target is.
        outputs: of the forward.
        queries: those that own a target.
    """

    index: int
    model_version: int
    batch: Batch
    positions: list[int]
    outputs: Any
    queries: Queries


@dataclass(frozen=True)
class Asked:
    """A query and the mask that it is matched to.

    Attributes:
        query: one.
        mask: (1, H, W) at the model's size.
        label: of the mask, a label of the model.
    """

    query: Queries
    mask: Tensor
    label: int


class QueryView:
    """Finds the query of a mask in one run, and asks all maps of that run.

    Args:
        maps: of the run.
    """

    def __init__(self, maps: ResponseMaps) -> None:
        self.maps, self.data = maps, maps.data
        self._kept: deque[OwnImage] = deque(maxlen=KEPT_IMAGES)

    @torch.inference_mode()
    def prepare(self, index: int) -> OwnImage:
        """The forward and the matched queries of an image; kept for the instances that are asked about next.

        Raises:
            UserError: the image cannot be read, or the run has no model.
        """
        with self.maps.run.lock:
            model, version = self.maps.run.model(), self.maps.run.model_version
            for own in self._kept:
                if (own.index, own.model_version) == (index, version):
                    return own
            batch, positions = model_batch(model, self.data, index)
            outputs = model.segmenter(batch.images)
            own = OwnImage(index, version, batch, positions, outputs, _matched(model, outputs, batch))
            self._kept.append(own)
            return own

    def of_truth(self, index: int, position: int) -> dict[str, Any]:
        """The response of the query that is matched to an instance of the ground truth, as in training; for json.

        Raises:
            UserError: the model does not know the class, the mask is too small, or no query is matched.
        """
        instances = self.data.instances(index)
        own = self.prepare(index)
        if position in own.positions:
            target = own.positions.index(position)
            queries = own.queries[own.queries.target == target]
            if len(queries):  # with many instances, a segmenter that caps its queries may leave this one out
                return self._respond(own, self._best(own, queries, own.batch, target))
        return self.of_mask(index, instances[position])

    @torch.inference_mode()
    def of_mask(self, index: int, clicked: Instance) -> dict[str, Any]:
        """The response of the query that is matched to a mask, if it were the only instance; ready for json.

        Raises:
            UserError: the model does not know the class, the mask is too small, or no query is matched.
        """
        own, run = self.prepare(index), self.maps.run
        with run.lock:
            batch, positions = model_batch(run.model(), self.data, index, [clicked])
            if not positions:
                raise UserError(
                    f"{run.name} has no query for it: its model does not know the class "
                    f"{self.data.classes[clicked[0]]}, or the mask is too small at the model's size."
                )
            queries = _matched(run.model(), own.outputs, batch)
        if not len(queries):
            raise UserError(f"{run.name} has no query that is matched to this mask.")
        return self._respond(own, self._best(own, queries, batch, 0))

    @torch.inference_mode()
    def _best(self, own: OwnImage, queries: Any, batch: Batch, target: int) -> Asked:
        """The query whose response fits its target best."""
        mask = batch.targets[0].masks[target : target + 1]
        fit = _dice(self.maps.run.model(), queries, own.outputs.pixels, mask)
        return Asked(queries[fit.argmax()[None]], mask, int(batch.targets[0].labels[target]))

    @torch.inference_mode()
    def _respond(self, own: OwnImage, asked: Asked) -> dict[str, Any]:
        image_id = int(self.data.image_ids[own.index])
        pixel_map: PixelMap = own.outputs.pixels
        with self.maps.run.lock:
            model = self.maps.run.model()
            searched = [one for one in self.maps.all() if one.image_id != image_id]
            own_map = _probabilities(model, asked.query, pixel_map.of_image(0))
            found = [(one, _probabilities(model, asked.query, one.pixels(model.device))) for one in searched]
        inside = [_inside(response.view(one.embeddings.shape[1:]), one.size, one.stride) for one, response in found]
        order = sorted(range(len(found)), key=lambda i: -inside[i].mean().item())[:OTHERS]
        ready, total = self.maps.progress
        size, stride = own.batch.images.sizes[0], pixel_map.stride
        own_inside = _inside(own_map.view(pixel_map.embeddings.shape[-2:]), size, stride)
        return {
            "own": _packed(image_id, own_inside, size, stride),
            "others": [_packed(found[i][0].image_id, inside[i], found[i][0].size, found[i][0].stride) for i in order],
            "searched": len(found),
            "preparing": max(0, total - ready),
            "numbers": _numbers(asked, stride, own_map, found),
        }


def _matched(model: Model, outputs: Any, batch: Batch) -> Queries:
    """The queries that own a target."""
    torch.manual_seed(0)  # a segmenter that limits its queries may select them at random
    queries: Queries = model.segmenter.queries(outputs, model.segmenter.assign(outputs, batch.targets))
    return queries[queries.target >= 0]


def _dice(model: Model, queries: Any, pixels: PixelMap, mask: Tensor) -> Tensor:
    """(Q,) how well the response of each query fits a (1, H, W) mask."""
    response = model.segmenter.decode(queries, pixels).sigmoid().flatten(1)
    cells = instance_cells(mask, pixels.stride).float()
    return 2 * (response * cells).sum(1) / (response.sum(1) + cells.sum())


def _probabilities(model: Model, query: Any, pixels: Any) -> Tensor:
    """(P,) on the CPU."""
    return model.segmenter.similarity(query, pixels)[0].sigmoid().float().cpu()


def _inside(response: Tensor, size: tuple[int, int], stride: int) -> Tensor:
    """(h, w) the cells that hold some of the image, without padding."""
    return response[: -(-size[0] // stride), : -(-size[1] // stride)]


def _packed(image_id: int, response: Tensor, size: tuple[int, int], stride: int) -> dict[str, Any]:
    """An (h, w) map of probabilities as bytes, row by row; `rows` and `columns` of it cover the image exactly."""
    values = (response * 255).round().to(torch.uint8).contiguous()
    return {
        "image": image_id,
        "mean": response.mean().item(),
        "max": response.max().item(),
        "height": response.shape[0],
        "width": response.shape[1],
        "rows": size[0] / stride,
        "columns": size[1] / stride,
        "map": base64.b64encode(values.numpy().tobytes()).decode(),
    }


def _numbers(asked: Asked, stride: int, own_map: Tensor, found: list[tuple[ResponseMap, Tensor]]) -> dict[str, Any]:
    """What `uniquery diagnose` measures, for one query: mean, share above 0.5 and histogram of each group of pixels."""
    cells = instance_cells(asked.mask, stride)[0].cpu()
    groups = {"own": own_map[cells]}
    values = _concatenated([response[one.cells] for one, response in found])
    same = _concatenated([one.labels for one, _ in found]) == asked.label
    inside = _concatenated([_in_footprint(asked.mask[0].cpu(), one) for one, _ in found]).bool()
    groups |= {
        "others": values,
        "same class": values[same],
        "other class": values[~same],
        "inside the own footprint": values[inside],
        "outside of it": values[~inside],
    }
    return {name: _summary(group) for name, group in groups.items()}


def _concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0)


def _in_footprint(mask: Tensor, one: ResponseMap) -> Tensor:
    """(P,) whether the own (H, W) mask covers the place of each sampled pixel of another image."""
    columns = one.embeddings.shape[2]
    x, y = ((part * one.stride + one.stride // 2) for part in (one.cells % columns, one.cells // columns))
    height, width = mask.shape
    in_frame = (x < width) & (y < height)
    return mask[y.clamp(max=height - 1), x.clamp(max=width - 1)] & in_frame


def _summary(values: Tensor) -> dict[str, Any]:
    if not len(values):
        return {"pixels": 0, "mean": None, "p99": None, "above_half": None, "histogram": [0.0] * BINS}
    histogram = torch.histc(values, BINS, 0.0, 1.0) / len(values)
    return {
        "pixels": len(values),
        "mean": values.mean().item(),
        "p99": _quantile(values, 0.99),
        "above_half": (values > 0.5).float().mean().item(),
        "histogram": histogram.tolist(),
    }


def _quantile(values: Tensor, share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    rank = max(0, min(len(values) - 1, int(-(-share * len(values) // 1)) - 1))
    return float(values.kthvalue(rank + 1).values)
