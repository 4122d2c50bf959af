"""Predictions of one image at any mask threshold: one forward, and for each threshold what comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from uniquery.evaluation.inference import image_outputs
from uniquery.model import Model
from uniquery.structures import Instances

MASK_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""What the slider offers."""
LEAST_SCORE = 0.05
"""Predictions below it are not sent: there are many, and nobody looks at them."""


@dataclass(frozen=True)
class Forward:
    """The forward of a model on one image.

    Attributes:
        model: the model.
        size: (height, width) of the image.
        outputs: of the segmenter.
    """

    model: Model
    size: tuple[int, int]
    outputs: Any
    _found: dict[float | None, Instances] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, image: npt.NDArray[np.uint8]) -> Forward:
        """The forward on an (H, W, 3) image."""
        test_size = model.info.test_size
        outputs = image_outputs(model.segmenter, image, test_size.short, test_size.longest)
        return cls(model, (image.shape[0], image.shape[1]), outputs)

    @torch.inference_mode()
    def at(self, mask_threshold: float | None) -> Instances:
        """The instances at a mask threshold; None: the one that the model uses."""
        if mask_threshold not in self._found:
            chosen = self.model.thresholds
            threshold = chosen.mask if mask_threshold is None and chosen else mask_threshold
            (instances,) = self.model.segmenter.predict(self.outputs, [self.size], mask_threshold=threshold)
            self._found[mask_threshold] = instances[instances.scores >= LEAST_SCORE]
        return self._found[mask_threshold]


def packed(instances: Instances, labels: Sequence[int | None]) -> list[list[Any]]:
    """[label, score, run lengths] of each instance, best first; without those whose label has none on the page."""
    rows = zip(instances.labels.tolist(), instances.scores.tolist(), instances.rles, strict=True)
    return [
        [labels[label], round(score, 4), mask["counts"]] for label, score, mask in rows if labels[label] is not None
    ]
