"""What went wrong in each image: its kinds of errors and its AP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from uniquery.data.dataset import Row
from uniquery.evaluation.error_summary import ImageTruth
from uniquery.evaluation.errors import INSTANCE_KINDS, PREDICTION_KINDS
from uniquery.evaluation.image_ap import image_ap

KINDS = {
    **{kind: f"instances: {text}" for kind, text in INSTANCE_KINDS.items() if kind != "correct"},
    **{kind: f"predictions: {PREDICTION_KINDS[kind]}" for kind in ("duplicate", "background")},
}
"""The kinds that images are filtered by, and what they mean."""


@dataclass(frozen=True)
class ImageAnalysis:
    """One image of one run.

    Attributes:
        ap: mean over classes and IoU 0.5 to 0.95; None without instances.
        counts: how many errors of each of `KINDS`, in their order.
        instance_kinds: of each instance of the ground truth.
        prediction_kinds: of each prediction that counts, by its position among all predictions.
    """

    ap: float | None
    counts: tuple[int, ...]
    instance_kinds: tuple[str, ...]
    prediction_kinds: dict[int, str]


def analyze(truth: ImageTruth, predicted: Sequence[Row], least: dict[int, float], max_detections: int) -> ImageAnalysis:
    """AP of all predictions, and the errors of those that count.

    Args:
        truth: of the image; labels are category ids.
        predicted: COCO results, best first.
        least: the least score of a prediction that counts as an error, by category id.
        max_detections: how many predictions of a class AP counts.
    """
    masks = [(row["category_id"], row["segmentation"]) for row in predicted]
    ap = image_ap(
        truth.instances,
        masks,
        crowds=truth.crowds,
        labeled_classes=truth.labeled_classes,
        max_detections=max_detections,
    )
    positions = [p for p, row in enumerate(predicted) if row["score"] >= least[row["category_id"]]]
    errors = truth.errors([predicted[p] for p in positions])
    kinds = [outcome.kind for outcome in errors.predictions]
    counts = Counter(outcome.kind for outcome in errors.instances)
    counts.update(kind for kind in kinds if kind not in INSTANCE_KINDS)
    return ImageAnalysis(
        ap,
        tuple(counts[kind] for kind in KINDS),
        tuple(outcome.kind for outcome in errors.instances),
        dict(zip(positions, kinds, strict=True)),
    )
