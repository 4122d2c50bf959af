"""What went wrong in an image: each instance and each prediction gets one kind, by numbers from their masks alone.

The definitions are in docs/errors.md. Images are independent of each other, and masks stay run lengths.

Letters: P predictions, G instances of the ground truth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hotcoco import mask as coco_mask
from scipy.ndimage import minimum_filter1d

from uniquery.masks import rle
from uniquery.masks.rle import Rle

MATCH_IOU = 0.5
"""The least IoU of a prediction with the instance of its class that it finds."""
POOR_IOU = 0.1
"""The least IoU of a prediction that belongs to an instance, though its mask is poor."""
MOST = 0.5
"""The least share of a mask that counts as most of it."""
SOME = 0.1
"""The least share of a mask that counts: of an instance for a piece, of a prediction for what leaks."""
BOUNDARY_WIDTH = 0.02
"""The width of an outline, as a share of the diagonal of the image; as for boundary AP."""

INSTANCE_KINDS = {
    "correct": "a prediction of its class with IoU ≥ 0.5",
    "leaked": "found, or found poorly, by a mask of which ≥ 10 % lies on other instances",
    "wrong class": "a prediction of another class with IoU ≥ 0.5",
    "merged": "≥ 50 % covered by a mask that also covers ≥ 50 % of another instance of the class",
    "split": "two or more pieces that lie in it and together cover ≥ 50 %",
    "poor mask": "the best prediction of its class has an IoU of 0.1 to 0.5",
    "missed": "none of these",
}
"""What can happen to an instance, and what it means; see docs/errors.md."""
PREDICTION_KINDS = {
    "correct": "IoU ≥ 0.5 with an instance of its class that no better prediction has found",
    "leaked": "≥ 10 % of it lies on other instances than the one it finds",
    "merged": "covers ≥ 50 % of two or more instances of its class",
    "duplicate": "≥ 50 % of it lies on an instance of its class that another prediction has found",
    "wrong class": "IoU ≥ 0.5 with an instance of another class",
    "split": "one of several pieces of an instance",
    "poor mask": "IoU of 0.1 to 0.5 with an instance of its class",
    "background": "none of these: no such instance is there",
    "ignored": "in a crowd region, or of a class that the image is not labeled for",
}
"""What a prediction can be, and what it means; see docs/errors.md."""

LabeledRle = tuple[int, Rle]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class InstanceOutcome:
    """What happened to an instance.

    Attributes:
        kind: one of `INSTANCE_KINDS`.
        prediction: index of the prediction that found it, or was responsible; None where there is none.
        boundary_iou: IoU of the outlines, if it was found.
    """

    kind: str
    prediction: int | None = None
    boundary_iou: float | None = None


@dataclass(frozen=True)
class PredictionOutcome:
    """What a prediction is.

    Attributes:
        kind: one of `PREDICTION_KINDS`.
        instance: index of the instance that it belongs to; None where there is none.
    """

    kind: str
    instance: int | None = None


@dataclass(frozen=True)
class ImageErrors:
    """The outcome of each instance and of each prediction of an image, in the order in which they were given."""

    instances: tuple[InstanceOutcome, ...]
    predictions: tuple[PredictionOutcome, ...]


def image_errors(
    instances: Sequence[LabeledRle],
    predicted: Sequence[LabeledRle],
    *,
    crowds: Sequence[LabeledRle] = (),
    labeled_classes: Collection[int] | None = None,
) -> ImageErrors:
    """The kind of each instance and of each prediction of one image.

    Args:
        instances: label and run-length mask of the ground truth, without crowd regions.
        predicted: label and run-length mask, best score first, without those below the score threshold.
        crowds: label and mask of regions where predictions of that class do not count.
        labeled_classes: the classes that the image is labeled for; all by default.

    >>> left = np.repeat([[1, 0]], 8, axis=1)
    >>> right, both = 1 - left, np.ones_like(left)
    >>> errors = image_errors([(0, rle.encode(left)), (0, rle.encode(right))], [(0, rle.encode(both))])
    >>> [outcome.kind for outcome in errors.instances]
    ['leaked', 'merged']
    """
    pairs = _Pairs(instances, predicted)
    matches = match_one_to_one(np.where(pairs.same_class, pairs.iou, 0.0))
    is_ignored = _are_ignored(predicted, crowds, labeled_classes) & (matches < 0)
    predictions: list[PredictionOutcome | None] = [
        _found(pairs, p, int(g)) if g >= 0 else _redundant(pairs, p, matches, bool(is_ignored[p]))
        for p, g in enumerate(matches)
    ]
    pieces = _pieces(pairs, matches, [p for p, outcome in enumerate(predictions) if outcome is None])
    outcomes = [
        outcome or (PredictionOutcome("split", pieces[p]) if p in pieces else _remaining(pairs, p))
        for p, outcome in enumerate(predictions)
    ]
    return ImageErrors(tuple(_instance(pairs, g, outcomes, matches) for g in range(len(instances))), tuple(outcomes))


def match_one_to_one(iou: Array, least: float = MATCH_IOU) -> npt.NDArray[np.int64]:
    """(P,) which instance each prediction finds, −1 for none: by COCO's rule, from (P, G) IoU, best score first.

    >>> match_one_to_one(np.array([[0.6, 0.7], [0.0, 0.9], [0.5, 0.0]])).tolist()
    [1, -1, 0]
    """
    matches = np.full(len(iou), -1)
    free = np.ones(iou.shape[1], dtype=bool)
    for p in np.flatnonzero((iou >= least).any(1)) if iou.size else ():
        best = int(np.argmax(np.where(free, iou[p], -1.0)))
        if free[best] and iou[p, best] >= least:
            matches[p], free[best] = best, False
    return matches


class _Pairs:
    """How predictions and instances overlap; every matrix is (P, G)."""

    def __init__(self, instances: Sequence[LabeledRle], predicted: Sequence[LabeledRle]) -> None:
        self.instances, self.predicted = [mask for _, mask in instances], [mask for _, mask in predicted]
        labels = [np.array([label for label, _ in side], dtype=np.int64) for side in (predicted, instances)]
        self.same_class = labels[0][:, None] == labels[1]
        areas = [np.array([max(rle.area(mask), 1) for mask in side]) for side in (self.predicted, self.instances)]
        self.inside = shares_inside(self.predicted, self.instances)  # share of the prediction on the instance
        overlap = np.rint(self.inside * areas[0][:, None])
        self.cover = overlap / areas[1]  # share of the instance under the prediction
        self.iou = overlap / (areas[0][:, None] + areas[1] - overlap)

    def leak(self, p: int, g: int) -> float:
        """The share of a prediction that lies on instances other than g, and not on g itself."""
        others = [mask for h, mask in enumerate(self.instances) if h != g and self.inside[p, h] > 0]
        if not others:
            return 0.0
        outside = coco_mask.merge([self.predicted[p], coco_mask.merge(others)], intersect=True)
        shared = coco_mask.merge([outside, self.instances[g]], intersect=True)
        return (rle.area(outside) - rle.area(shared)) / rle.area(self.predicted[p])

    def merges(self, p: int) -> npt.NDArray[np.bool_]:
        """(G,) the instances that a prediction merges: two or more of its class, or none."""
        covered = self.same_class[p] & (self.cover[p] >= MOST)
        return covered if covered.sum() > 1 else np.zeros_like(covered)


def shares_inside(masks: Sequence[Rle], regions: Sequence[Rle]) -> Array:
    """(M, R) share of each mask that lies in each region; 0 for an empty mask."""
    if not masks or not regions:
        return np.zeros((len(masks), len(regions)))
    shares: Array = np.nan_to_num(np.asarray(coco_mask.iou(list(masks), list(regions), [1] * len(regions))))
    return shares


def _are_ignored(
    predicted: Sequence[LabeledRle], crowds: Sequence[LabeledRle], labeled_classes: Collection[int] | None
) -> npt.NDArray[np.bool_]:
    """(P,) predictions that do not count if they find no instance."""
    inside = shares_inside([mask for _, mask in predicted], [mask for _, mask in crowds])
    return np.array(
        [
            (labeled_classes is not None and label not in labeled_classes)
            or any(share >= MATCH_IOU and crowd == label for share, (crowd, _) in zip(inside[p], crowds, strict=True))
            for p, (label, _) in enumerate(predicted)
        ],
        dtype=bool,
    )


def _found(pairs: _Pairs, p: int, g: int) -> PredictionOutcome:
    return PredictionOutcome("leaked" if pairs.leak(p, g) >= SOME else "correct", g)


def _redundant(pairs: _Pairs, p: int, matches: npt.NDArray[np.int64], is_ignored: bool) -> PredictionOutcome | None:
    """The kind of a prediction that finds no instance; None if it may yet be a piece of one or its poor mask."""
    if is_ignored:
        return PredictionOutcome("ignored")
    if not pairs.iou.shape[1]:
        return PredictionOutcome("background")
    own = pairs.same_class[p]
    if pairs.merges(p).any():
        return PredictionOutcome("merged", int(np.argmax(np.where(own, pairs.iou[p], -1.0))))
    on_found = np.where(own & np.isin(np.arange(len(own)), matches), pairs.inside[p], 0.0)
    if on_found.max() >= MOST:
        return PredictionOutcome("duplicate", int(on_found.argmax()))
    others = np.where(own, 0.0, pairs.iou[p])
    if others.max() >= MATCH_IOU:
        return PredictionOutcome("wrong class", int(others.argmax()))
    return None


def _pieces(pairs: _Pairs, matches: npt.NDArray[np.int64], candidates: Sequence[int]) -> dict[int, int]:
    """Prediction → the instance that it is a piece of."""
    pieces: dict[int, int] = {}
    for g in sorted(set(range(len(pairs.instances))) - set(matches.tolist())):
        inside = [
            p
            for p in candidates
            if pairs.same_class[p, g] and pairs.inside[p, g] >= MOST and pairs.cover[p, g] >= SOME and p not in pieces
        ]
        if len(inside) > 1:
            union = coco_mask.merge([pairs.predicted[p] for p in inside])
            if shares_inside([pairs.instances[g]], [union])[0, 0] >= MOST:
                pieces |= dict.fromkeys(inside, g)
    return pieces


def _remaining(pairs: _Pairs, p: int) -> PredictionOutcome:
    """A poor mask, possibly one that leaks, or nothing of its class."""
    own = np.where(pairs.same_class[p], pairs.iou[p], 0.0)
    best = int(own.argmax())
    if own[best] < POOR_IOU:
        return PredictionOutcome("background")
    return PredictionOutcome("leaked" if pairs.leak(p, best) >= SOME else "poor mask", best)


def _instance(
    pairs: _Pairs, g: int, predictions: Sequence[PredictionOutcome], matches: npt.NDArray[np.int64]
) -> InstanceOutcome:
    found = np.flatnonzero(matches == g)
    if found.size:
        p = int(found[0])
        return InstanceOutcome(predictions[p].kind, p, boundary_iou(pairs.instances[g], pairs.predicted[p]))
    counted = [p for p, outcome in enumerate(predictions) if outcome.kind != "ignored"]
    is_of_kind: dict[str, Callable[[int], bool]] = {
        "wrong class": lambda p: (
            predictions[p].kind == "wrong class" and not pairs.same_class[p, g] and pairs.iou[p, g] >= MATCH_IOU
        ),
        "merged": lambda p: bool(pairs.merges(p)[g]),
        "split": lambda p: predictions[p] == PredictionOutcome("split", g),
        "leaked": lambda p: predictions[p] == PredictionOutcome("leaked", g),
        "poor mask": lambda p: predictions[p] == PredictionOutcome("poor mask", g),
    }
    for kind, is_it in is_of_kind.items():
        responsible = next((p for p in counted if is_it(p)), None)
        if responsible is not None:
            return InstanceOutcome(kind, responsible)
    return InstanceOutcome("missed")


def boundary_iou(first: Rle, second: Rle) -> float:
    """IoU of the outlines of two masks: of their pixels that are within 2 % of the image's diagonal from the outside.

    >>> square = rle.encode(np.pad(np.ones((4, 4), np.uint8), 2))
    >>> boundary_iou(square, square)
    1.0
    """
    width = max(1, round(BOUNDARY_WIDTH * float(np.hypot(*first["size"]))))
    boxes = np.array([rle.bounding_box(mask) for mask in (first, second)], dtype=int)
    x, y = boxes[:, :2].min(0)
    right, bottom = (boxes[:, :2] + boxes[:, 2:]).max(0)
    outlines = [_outline(rle.decode(mask)[y:bottom, x:right], width) for mask in (first, second)]
    union = int((outlines[0] | outlines[1]).sum())
    return int((outlines[0] & outlines[1]).sum()) / union if union else 1.0


def _outline(mask: rle.Bitmap, width: int) -> npt.NDArray[np.bool_]:
    """The pixels of a mask that are at most `width` pixels from its outside, which is also beyond the edges."""
    eroded = minimum_filter1d(mask, 2 * width + 1, axis=0, mode="constant", cval=0)
    eroded = minimum_filter1d(eroded, 2 * width + 1, axis=1, mode="constant", cval=0)
    outline: npt.NDArray[np.bool_] = mask > eroded
    return outline
