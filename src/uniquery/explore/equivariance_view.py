"""The prediction on g(I) beside g of the prediction on I, for one image and a transformation of the user's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from uniquery.data.coco import CocoData
from uniquery.errors import UserError
from uniquery.evaluation.diagnose import CONFIDENT
from uniquery.evaluation.views import best_ious, relative_feature_error
from uniquery.explore.response_maps import model_batch
from uniquery.explore.runs import ExploredRun
from uniquery.masks import rle
from uniquery.model import Model
from uniquery.querying import Transform
from uniquery.querying.equivariance import view_of
from uniquery.structures import SIZE_DIVISIBILITY


@dataclass(frozen=True)
class Choice:
    """What the sliders say.

    Attributes:
        flip: whether the image is flipped left to right.
        crop: share of each side that is kept, around the center.
        angle: degrees counter-clockwise.
        scale: factor; above 1 enlarges.
    """

    flip: bool = False
    crop: float = 1.0
    angle: float = 0.0
    scale: float = 1.0

    def transform(self, height: int, width: int) -> Transform:
        """The element g for an image of this size; crop windows lie on the grid of 32 pixels.

        Raises:
            UserError: a value is out of its range, or the image is too small.
        """
        limits = {"crop": (self.crop, 0.1, 1.0), "angle": (self.angle, -180.0, 180.0), "scale": (self.scale, 0.25, 4.0)}
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise UserError(f"{name} must be in {low:g} to {high:g}, not {value:g}.")
        (top, rows), (left, columns) = self._side(height), self._side(width)
        return Transform(top, left, rows, columns, self.flip, self.angle, self.scale)

    def _side(self, side: int) -> tuple[int, int]:
        """Start and length of the window of one side."""
        whole = side // SIZE_DIVISIBILITY
        if not whole:
            raise UserError(
                f"A side of {side} pixels is too small for a view: at least {SIZE_DIVISIBILITY} are needed."
            )
        cells = max(1, round(whole * self.crop))
        return (whole - cells) // 2 * SIZE_DIVISIBILITY, cells * SIZE_DIVISIBILITY


@torch.inference_mode()
def compare_views(run: ExploredRun, data: CocoData, index: int, choice: Choice) -> dict[str, Any]:
    """Both predictions with their IoU, and the distance of the features, ready for json.

    Raises:
        UserError: the image cannot be read or is too small.
    """
    with run.lock:
        model = run.model()
        batch, _ = model_batch(model, data, index)
        g = choice.transform(*batch.images.sizes[0])
        outputs = model.segmenter(batch.images)
        views, _ = view_of(batch.images, batch.targets, [g])
        view_outputs = model.segmenter(views)
        (before,) = model.segmenter.predict(outputs, batch.images.sizes)
        (after,) = model.segmenter.predict(view_outputs, [(g.height, g.width)])
        feature_error = relative_feature_error(view_outputs.pixels, outputs.pixels, batch.images.sizes[0], g)
    before, after = (one[one.scores >= CONFIDENT] for one in (before, after))
    ious, partners, visible = best_ious(before, after, g)
    kept = visible.nonzero().flatten()
    moved = g.on_masks(before[kept].masks) if len(kept) else before.masks[:0]
    return {
        "height": g.height,
        "width": g.width,
        "moved": _rows(before[kept], [rle.encode(mask.numpy()) for mask in moved], model),
        "view": _rows(after, list(after.rles), model),
        "ious": [round(iou, 4) for iou in ious[kept].tolist()],
        "partners": partners[kept].tolist(),
        "mean_iou": ious[kept].mean().item() if len(kept) else None,
        "feature_error": feature_error,
    }


def view_picture(run: ExploredRun, data: CocoData, index: int, choice: Choice) -> npt.NDArray[np.uint8]:
    """g(I) as the model gets it, (H, W, 3).

    Raises:
        UserError: the image cannot be read or is too small.
    """
    batch, _ = model_batch(run.model(), data, index, [])
    g = choice.transform(*batch.images.sizes[0])
    pixels = g.on_map(batch.images.pixels[0].cpu().float())
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def _rows(instances: Any, masks: list[rle.Rle], model: Model) -> list[list[Any]]:
    """[class name, score, run lengths] of each."""
    names = [model.classes[label] for label in instances.labels.tolist()]
    scores = [round(score, 4) for score in instances.scores.tolist()]
    return [[name, score, mask["counts"]] for name, score, mask in zip(names, scores, masks, strict=True)]
