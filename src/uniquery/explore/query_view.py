"""The response of one query: on its own image, on the most responsive other images, and as numbers.

Letters: P pixels, h × w the map, H × W the input.
"""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from uniquery.data.batch import Batch
from uniquery.data.coco import CocoData
from uniquery.errors import UserError
from uniquery.explore.response_maps import ResponseMap, ResponseMaps, model_batch
from uniquery.masks.rle import Rle
from uniquery.model import Model
from uniquery.querying.sampling import instance_cells
from uniquery.structures import PixelMap, Queries

OTHERS = 24
BINS = 20
KEPT_FORWARDS = 2
"""How many images per run keep their forward pass: instances of one image are clicked one after another."""

Instance = tuple[int, Rle]
"""Label of the data set, and mask."""


@dataclass(frozen=True)
class OwnImage:
    """The image of the query.

    Attributes:
        batch: the clicked mask is its first target.
        pixel_map: f(I).
        query: the one query that fits the clicked mask best.
    """

    batch: Batch
    pixel_map: PixelMap
    query: Queries


class QueryView:
    """Finds the query of a mask in one run, and asks all maps of that run.

    Args:
        maps: of the run.
        data: the images.
    """

    def __init__(self, maps: ResponseMaps, data: CocoData) -> None:
        self.maps, self.data = maps, data
        self._forwards: deque[tuple[tuple[int, int], Any]] = deque(maxlen=KEPT_FORWARDS)

    @torch.inference_mode()
    def respond(self, index: int, clicked: Instance, others: list[Instance]) -> dict[str, Any]:
        """The response of the query that fits a mask best, ready for json.

        Args:
            index: of the image.
            clicked: the mask.
            others: other instances of the image, which compete for queries.

        Raises:
            UserError: the model does not know the class, the mask is too small, or no query is matched.
        """
        start = perf_counter()
        run = self.maps.run
        with run.lock:
            model = run.model()
            own = self._own_image(model, index, clicked, others)
            image_id = int(self.data.image_ids[index])
            searched = [one for one in self.maps.all() if one.image_id != image_id]
            own_map = _probabilities(model, own.query, own.pixel_map.of_image(0))
            found = [(one, _probabilities(model, own.query, one.pixels(model.device))) for one in searched]
        inside = [_inside(response.view(one.embeddings.shape[1:]), one.size, one.stride) for one, response in found]
        order = sorted(range(len(found)), key=lambda i: -inside[i].mean().item())[:OTHERS]
        ready, total = self.maps.progress
        own_size, shape = own.batch.images.sizes[0], own.pixel_map.embeddings.shape[-2:]
        own_inside = _inside(own_map.view(shape), own_size, own.pixel_map.stride)
        return {
            "own": _packed(image_id, own_inside, own_size, own.pixel_map.stride),
            "others": [_packed(found[i][0].image_id, inside[i], found[i][0].size, found[i][0].stride) for i in order],
            "searched": len(found),
            "preparing": max(0, total - ready),
            "numbers": _numbers(own, own_map, found),
            "seconds": perf_counter() - start,
        }

    def _own_image(self, model: Model, index: int, clicked: Instance, others: list[Instance]) -> OwnImage:
        if not len(model_batch(model, self.data, index, [clicked]).targets[0]):
            raise UserError(
                f"{self.maps.run.name} has no query for it: its model does not know the class "
                f"{self.data.classes[clicked[0]]}, or the mask is too small at the model's size."
            )
        for competing in (others, []):  # with many instances, a segmenter that caps its queries may leave this one out
            batch = model_batch(model, self.data, index, [clicked, *competing])
            outputs = self._forward(model, index, batch)
            torch.manual_seed(0)  # a segmenter that limits its queries may select them at random
            queries = model.segmenter.queries(outputs, model.segmenter.assign(outputs, batch.targets))
            queries = queries[queries.target == 0]
            if len(queries):
                best = _dice(model, queries, outputs.pixels, batch.targets[0].masks).argmax()
                return OwnImage(batch, outputs.pixels, queries[best[None]])
        raise UserError(f"{self.maps.run.name} has no query that is matched to this instance.")

    def _forward(self, model: Model, index: int, batch: Batch) -> Any:
        key = index, self.maps.run.model_version
        for known, outputs in self._forwards:
            if known == key:
                return outputs
        outputs = model.segmenter(batch.images)
        self._forwards.append((key, outputs))
        return outputs


def _dice(model: Model, queries: Any, pixels: PixelMap, masks: Tensor) -> Tensor:
    """(Q,) how well the response of each query fits the first mask."""
    response = model.segmenter.decode(queries, pixels).sigmoid().flatten(1)
    cells = instance_cells(masks[:1], pixels.stride).float()
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


def _numbers(own: OwnImage, own_map: Tensor, found: list[tuple[ResponseMap, Tensor]]) -> dict[str, Any]:
    """What `uniquery diagnose` measures, for one query: mean, share above 0.5 and histogram of each group of pixels."""
    target, stride = own.batch.targets[0], own.pixel_map.stride
    cells = instance_cells(target.masks[:1], stride)[0].cpu()
    groups = {"own": own_map[cells]}
    values = _concatenated([response[one.cells] for one, response in found])
    same = _concatenated([one.labels for one, _ in found]) == target.labels[0].cpu()
    inside = _concatenated([_in_footprint(target.masks[0].cpu(), one) for one, _ in found]).bool()
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
