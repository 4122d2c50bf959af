"""A trained model as Python users have it: load it, predict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from uniquery.data.augment import TestSize
from uniquery.data.dataset import Category, is_panoptic
from uniquery.data.image_input import ImageInput, as_rgb_array
from uniquery.data.windows import WindowedImage, open_windows
from uniquery.errors import ConfigError
from uniquery.evaluation.inference import Progress, image_outputs, predict_image
from uniquery.evaluation.tiles import Tiling, predict_tiles
from uniquery.masks.panoptic import PanopticSegments
from uniquery.parallel import choose_device
from uniquery.querying.contract import Segmenter
from uniquery.structures import Instances
from uniquery.weights.model_file import SCORE_THRESHOLD, ModelInfo, Thresholds, load_model

"""The smallest score of a model without thresholds of its own."""


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A trained segmenter with its classes and its test size.

    Attributes:
        segmenter: the `nn.Module`, in eval mode.
        info: its settings, categories and test size, from the model file.
    """

    segmenter: Segmenter[Any, Any, Any]
    info: ModelInfo

    @property
    def categories(self) -> tuple[Category, ...]:
        """COCO id and name of each class, by label."""
        return self.info.categories

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class, by label."""
        return tuple(category.name for category in self.categories)

    @property
    def thresholds(self) -> Thresholds | None:
        """The thresholds that `uniquery eval --choose-thresholds` stored in the model file; None if it was not run."""
        return self.info.thresholds

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.segmenter.parameters()).device

    def __repr__(self) -> str:
        return f"Model({self.info.model.name}, {len(self.classes)} classes, {self.device})"

    @overload
    def predict(
        self,
        image: ImageInput,
        *,
        score_threshold: float | None = ...,
        mask_threshold: float | None = ...,
        short: int | None = ...,
    ) -> Instances: ...

    @overload
    def predict(
        self,
        image: list[Any] | tuple[ImageInput, ...],  # lists are invariant: list[Path] is no list[ImageInput]
        *,
        score_threshold: float | None = ...,
        mask_threshold: float | None = ...,
        short: int | None = ...,
    ) -> list[Instances]: ...

    def predict(
        self,
        image: ImageInput | list[Any] | tuple[ImageInput, ...],
        *,
        score_threshold: float | None = None,
        mask_threshold: float | None = None,
        short: int | None = None,
    ) -> Instances | list[Instances]:
        """The instances of an image, best first; masks and boxes have the size of the image.

        Args:
            image: a path, a PIL image, an (H, W, 3) or (H, W) uint8 array or a (3, H, W) uint8 tensor in RGB;
                or a list or tuple of them.
            score_threshold: the smallest score; by default that of each class in `thresholds`, else 0.5.
            mask_threshold: the smallest probability of a mask's pixel; by default that of `thresholds`, else the
                segmenter's own.
            short: the short side in pixels to which the image is resized, by default that of the model's test size;
                the limit of the long side changes by the same factor.

        Returns:
            The instances of one image, or a list of them for a list.

        Raises:
            DataError: an image cannot be read, or has another shape or dtype.
            ConfigError: `short` is less than 1, or a threshold is not in 0 to 1.
        """
        if isinstance(image, list | tuple):
            return [
                self.predict(one, score_threshold=score_threshold, mask_threshold=mask_threshold, short=short)
                for one in image
            ]
        for name, threshold in (("score_threshold", score_threshold), ("mask_threshold", mask_threshold)):
            if threshold is not None and not 0 <= threshold <= 1:
                raise ConfigError(f"{name} is a probability from 0 to 1, not {threshold:g}.")
        pixels, size, chosen = as_rgb_array(image, self.info.bit_depth), self._test_size(short), self.thresholds
        if mask_threshold is None and chosen is not None:
            mask_threshold = chosen.mask
        instances = predict_image(self.segmenter, pixels, size.short, size.longest, mask_threshold=mask_threshold)
        least = self._least_scores(score_threshold).to(instances.labels.device)
        kept = instances[instances.scores >= least[instances.labels]]
        if is_panoptic(self.categories):  # stuff has no instances
            is_thing = torch.tensor([bool(category.is_thing) for category in self.categories])
            kept = kept[is_thing[kept.labels]]
        return replace(kept, classes=self.classes, category_ids=tuple(category.id for category in self.categories))

    def predict_tiles(
        self,
        image: ImageInput,
        tiling: Tiling,
        *,
        score_threshold: float | None = None,
        mask_threshold: float | None = None,
        short: int | None = None,
        progress: Progress = lambda *_: None,
    ) -> Instances:
        """The instances of an image of any size, predicted tile by tile, and joined where they cross a seam.

        Args:
            image: as for `predict`; a file may have more pixels than there.
            tiling: how the image is cut; each tile is resized like an image of its size.
            score_threshold: as for `predict`.
            mask_threshold: as for `predict`.
            short: as for `predict`: the short side in pixels to which a tile is resized.
            progress: called with how many tiles are done, and how many there are.

        Raises:
            DataError: as for `predict`.
            ConfigError: as for `predict`.
        """

        def predict(tile: npt.NDArray[np.uint8]) -> Instances:
            return self.predict(tile, score_threshold=score_threshold, mask_threshold=mask_threshold, short=short)

        if isinstance(image, str | Path):
            with open_windows(Path(image), self.info.bit_depth) as windows:
                return predict_tiles(predict, windows, tiling, progress)
        pixels = Image.fromarray(as_rgb_array(image, self.info.bit_depth))
        return predict_tiles(predict, WindowedImage(pixels), tiling, progress)

    def predict_panoptic(
        self,
        image: ImageInput,
        *,
        object_threshold: float | None = None,
        overlap_threshold: float | None = None,
        short: int | None = None,
    ) -> PanopticSegments:
        """The things and the stuff of an image: every pixel belongs to one segment, or to none.

        Args:
            image: as for `predict`.
            object_threshold: least class score of a segment, by default the model's own.
            overlap_threshold: least share of its own area that a mask must keep, by default the model's own.
            short: as for `predict`.

        Raises:
            DataError: the image cannot be read, or has another shape or dtype.
            ConfigError: the model was not trained on panoptic data, or a setting is out of its range.
        """
        if not is_panoptic(self.categories):
            raise ConfigError("The model was trained on instances and knows no stuff: train it on panoptic data.")
        for name, value in (("object_threshold", object_threshold), ("overlap_threshold", overlap_threshold)):
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is a share from 0 to 1, not {value}.")
        pixels, size = as_rgb_array(image, self.info.bit_depth), self._test_size(short)
        outputs = image_outputs(self.segmenter, pixels, size.short, size.longest)
        (segments,) = self.segmenter.predict_panoptic(
            outputs,
            [(pixels.shape[0], pixels.shape[1])],
            [bool(category.is_thing) for category in self.categories],
            object_threshold=object_threshold,
            overlap_threshold=overlap_threshold,
        )
        return segments

    def _least_scores(self, score_threshold: float | None) -> Tensor:
        """(K,) the smallest score of each class."""
        if score_threshold is None and self.thresholds is not None:
            return torch.tensor(self.thresholds.scores)
        return torch.full((len(self.categories),), SCORE_THRESHOLD if score_threshold is None else score_threshold)

    def _test_size(self, short: int | None) -> TestSize:
        """The model's own test size, or one that is larger or smaller by a factor."""
        size = self.info.test_size
        if short is None:
            return size
        if short < 1:
            raise ConfigError(f"short is the short side of an image in pixels, at least 1, not {short}.")
        return TestSize(short=short, longest=max(1, round(size.longest * short / size.short)))


def load(path: str | Path, *, device: str = "auto") -> Model:
    """A trained model, ready to predict.

    Args:
        path: a run folder (its best model), a checkpoint folder, a model file, or `hf://user/name` on the Hugging Face
            Hub. `hf://user/name@revision` is a commit, a tag or a branch of it.
        device: a torch device; `auto` takes a GPU if there is one.

    Raises:
        CheckpointError: there is no model, or it cannot be read.
        ConfigError: the device is not usable.
    """
    return Model(*load_model(path, choose_device(device)))
