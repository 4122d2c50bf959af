"""Predictions of one image at several mask thresholds, so that the slider acts in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from uniquery.evaluation.inference import image_outputs
from uniquery.model import Model
from uniquery.structures import Instances

MASK_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LEAST_SCORE = 0.05
"""Predictions below it are not sent: there are many, and nobody looks at them."""


@torch.inference_mode()
def predict_at_thresholds(model: Model, image: npt.NDArray[np.uint8]) -> list[Instances]:
    """The instances of an (H, W, 3) image at each of `MASK_THRESHOLDS`, from one forward."""
    size = model.info.test_size
    outputs = image_outputs(model.segmenter, image, size.short, size.longest)
    found = [
        model.segmenter.predict(outputs, [(image.shape[0], image.shape[1])], mask_threshold=threshold)[0]
        for threshold in MASK_THRESHOLDS
    ]
    return [instances[instances.scores >= LEAST_SCORE] for instances in found]


def packed(instances: Instances, labels: Sequence[int | None]) -> list[list[Any]]:
    """[label, score, run lengths] of each instance, best first; without those whose label has none on the page."""
    rows = zip(instances.labels.tolist(), instances.scores.tolist(), instances.rles, strict=True)
    return [
        [labels[label], round(score, 4), mask["counts"]] for label, score, mask in rows if labels[label] is not None
    ]


def default_threshold(model: Model) -> float:
    """The mask threshold of `MASK_THRESHOLDS` that is nearest to the one that the model uses."""
    own = model.thresholds.mask if model.thresholds else getattr(model.info.model, "mask_threshold", 0.5)
    return min(MASK_THRESHOLDS, key=lambda threshold: abs(threshold - own))
