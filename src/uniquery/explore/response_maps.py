"""The pixel maps of a run's model on many images, kept so that a query can be asked about all of them at once.

Letters: K instances, P sampled pixels, D channels, h × w the map.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from uniquery.data.augment import image_only, resize, resized_size
from uniquery.data.batch import Batch, LoadedSample, collate
from uniquery.data.coco import CocoData
from uniquery.data.dataset import Row
from uniquery.errors import DataError
from uniquery.evaluation.diagnose import PIXELS_PER_INSTANCE
from uniquery.evaluation.inference import category_ids_by_name
from uniquery.explore.runs import ExploredRun
from uniquery.masks import rle
from uniquery.masks.rle import Rle
from uniquery.model import Model
from uniquery.querying import PixelSampling
from uniquery.querying.sampling import instance_cells
from uniquery.structures import Pixels, grid_locations

CACHE_BYTES = 256 * 2**20
"""Of the maps of one run."""
MAX_IMAGES = 2000
"""How many images are searched at most: all of them take one forward each."""


@dataclass(frozen=True)
class ResponseMap:
    """The pixel embeddings of one image, and where its instances are.

    Attributes:
        image_id: of the image.
        embeddings: (D, h, w) float16.
        stride: how many input pixels one cell spans.
        size: (height, width) of the image at the model's size, without padding.
        cells: (P,) cells of instances, sampled as `uniquery diagnose` does.
        labels: (P,) the class of each, a label of the model.
    """

    image_id: int
    embeddings: Tensor
    stride: int
    size: tuple[int, int]
    cells: Tensor
    labels: Tensor

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(tensor.nbytes for tensor in (self.embeddings, self.cells, self.labels))

    def pixels(self, device: torch.device) -> Pixels:
        """All cells as a set of pixels in float32."""
        embeddings = self.embeddings.to(device).float()
        _, height, width = embeddings.shape
        return Pixels(embeddings.flatten(1).T, grid_locations(height, width, self.stride, device))


class ResponseMaps:
    """The maps of one run, computed image by image until the cache is full.

    Args:
        run: whose model computes.
        data: the images.
    """

    def __init__(self, run: ExploredRun, data: CocoData) -> None:
        self.run, self.data = run, data
        self.size = 0
        self._maps: dict[int, ResponseMap] = {}
        self._order: list[int] = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
        self._next, self._model_version = 0, -1
        self._order_lock = Lock()

    @property
    def is_full(self) -> bool:
        """Whether no more maps are kept."""
        return self.size >= CACHE_BYTES or len(self._maps) >= min(MAX_IMAGES, len(self.data))

    @property
    def progress(self) -> tuple[int, int]:
        """How many images can be searched, and how many there will be."""
        return len(self._maps), len(self._maps) if self.is_full else min(MAX_IMAGES, len(self.data))

    def all(self) -> list[ResponseMap]:
        """Those that are there, in no particular order."""
        return list(self._maps.values())

    def prefer(self, indices: Iterable[int]) -> None:
        """Images that are to be computed next, as the user looks at them."""
        wanted = set(indices)
        with self._order_lock:
            self._order[self._next :] = sorted(self._order[self._next :], key=lambda index: index not in wanted)

    def _take_next(self) -> int:
        with self._order_lock:
            self._next += 1
            return self._order[self._next - 1]

    @torch.inference_mode()
    def compute_next(self, needs_predictions: bool) -> tuple[int, list[Row]] | None:
        """Computes the next image, and its predictions as COCO results if they are needed; None if all are done.

        An image that cannot be read has neither.
        """
        with self.run.lock:
            model = self.run.model()
            if self.run.model_version != self._model_version:
                self._maps, self.size, self._next = {}, 0, 0
                self._model_version = self.run.model_version
            if self._next >= len(self._order) or (self.is_full and not needs_predictions):
                return None
            index = self._take_next()
            image_id = int(self.data.image_ids[index])
            try:
                batch, _ = model_batch(model, self.data, index)
            except DataError:
                return image_id, []
            outputs = model.segmenter(batch.images)
            if not self.is_full:
                kept = _response_map(outputs.pixels, batch, image_id)
                self._maps[image_id] = kept
                self.size += kept.nbytes
            if not needs_predictions:
                return image_id, []
            (instances,) = model.segmenter.predict(outputs, batch.original_sizes)
            return image_id, instances.to_coco(image_id, category_ids_by_name(model.classes, self.data))


def _response_map(pixel_map: Any, batch: Batch, image_id: int) -> ResponseMap:
    stride, target = pixel_map.stride, batch.targets[0]
    owned = instance_cells(target.masks, stride)
    generator = torch.Generator().manual_seed(0)
    instance, cells = PixelSampling(count=PIXELS_PER_INSTANCE)(owned.cpu(), generator)
    embeddings = pixel_map.embeddings[0].to(torch.float16).cpu()
    return ResponseMap(image_id, embeddings, stride, batch.images.sizes[0], cells, target.labels.cpu()[instance])


def model_batch(
    model: Model, data: CocoData, index: int, instances: list[tuple[int, Rle]] | None = None
) -> tuple[Batch, list[int]]:
    """An image as a model gets it, with some masks; by default its ground truth.

    Masks of classes that the model does not know are left out, and masks that are empty at the size of the model.

    Args:
        model: its classes give the labels, and its test size that of the image.
        data: the images.
        index: of the image.
        instances: label of the data set and mask.

    Returns:
        The batch, and the position among `instances` of each of its targets.

    Raises:
        DataError: the image cannot be read.
    """
    known = {name: label for label, name in enumerate(model.classes)}
    rows = data.instances(index) if instances is None else instances
    labels = [known.get(data.classes[label]) for label, _ in rows]
    kept = [position for position, label in enumerate(labels) if label is not None]
    sample = image_only(data.read(index))
    if kept:
        masks = torch.stack([torch.from_numpy(rle.decode(rows[position][1])) for position in kept])
        sample = replace(sample, masks=masks, labels=torch.tensor([labels[position] for position in kept]))
    resized = resize(sample, resized_size(*sample.size, model.info.test_size.short, model.info.test_size.longest))
    is_there = resized.masks.flatten(1).any(1).tolist()
    batch = collate([LoadedSample(resized.without_empty(), int(data.image_ids[index]), sample.size)])
    assert isinstance(batch, Batch)
    return batch.to(model.device), [position for position, there in zip(kept, is_there, strict=True) if there]
