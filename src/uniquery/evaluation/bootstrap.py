"""How far AP and differences of AP depend on the images: a paired bootstrap, with images as weights.

A sample draws as many images as there are, with replacement; an image that is drawn n times has the weight n. Matching
does not depend on the weights, so it is done once, and a sample costs a few sums over the true positives.

Letters: I images, B samples, T IoU thresholds, K categories, A areas (all, small, medium, large).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import hotcoco
import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

Array = npt.NDArray[np.float64]

_RECALLS = np.linspace(0, 1, 101)
_MOST_NUMBERS = 2_000_000  # of the largest array, to bound memory


class WeightedPrecision:
    """AP of one category in one range of areas, for any weights of the images.

    Args:
        entries: what hotcoco found for the images that have instances or detections of the category.
        images: image id → its index among the weights.
    """

    def __init__(self, entries: Sequence[Mapping[str, Any]], images: Mapping[int, int]) -> None:
        rows = [images[entry["image_id"]] for entry in entries]
        counted = [np.count_nonzero(entry["gtInDenominator"]) for entry in entries]
        self.instances = np.bincount(rows, counted, minlength=len(images))  # (I,)
        scores = np.concatenate([entry["dtScores"] for entry in entries])
        order = np.argsort(-scores, kind="stable")
        image = np.repeat(rows, [len(entry["dtScores"]) for entry in entries])[order]
        matched, ignored = (
            np.concatenate([np.asarray(entry[name], dtype=bool) for entry in entries], axis=1)[:, order]
            for name in ("dtMatched", "dtIgnore")
        )
        found = [_true_positives(image[~i], m[~i]) for m, i in zip(matched, ignored, strict=True)]
        self.ends = np.cumsum([len(images_found) for images_found, _, _ in found])[:-1]
        self.image = np.concatenate([images_found for images_found, _, _ in found])  # (R,), all thresholds together
        starts = np.concatenate([[0], self.ends])
        row = np.concatenate([start + segment for start, (_, segment, _) in zip(starts, found, strict=True)])
        column = np.concatenate([images_wrong for _, _, images_wrong in found])
        shape = (len(self.image), len(images))
        self.false_positives = csr_matrix((np.ones(len(row)), (row, column)), shape=shape)  # between true positives

    def __call__(self, weights: Array) -> Array:
        """(T, B) AP for (I, B) weights; nan where a sample has no instance."""
        instances = self.instances @ weights
        positives, negatives = weights[self.image], self.false_positives @ weights
        parts = (np.split(side, self.ends) for side in (positives, negatives))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack([_average_precision(p, n, instances) for p, n in zip(*parts, strict=True)])


def _true_positives(
    image: npt.NDArray[np.int64], matched: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Image of each true positive; of each false positive before the last of them, the next one, and its image."""
    before: npt.NDArray[np.int64] = np.cumsum(matched) - matched
    counts = ~matched & (before < matched.sum())
    return image[matched], before[counts], image[counts]


def _average_precision(positives: Array, negatives: Array, instances: Array) -> Array:
    """(B,) COCO's AP from (R, B) weights of true positives, and of the false positives before each; changes both."""
    found, precision = np.cumsum(positives, axis=0, out=positives), np.cumsum(negatives, axis=0, out=negatives)
    precision += found
    np.divide(found, np.maximum(precision, 1, out=precision), out=precision)  # weights are whole numbers
    np.maximum.accumulate(precision[::-1], axis=0, out=precision[::-1])
    found /= instances
    reached = np.searchsorted(_RECALLS, found, side="right")  # how many recall points
    total = np.einsum("rb,rb->b", precision, np.diff(reached, axis=0, prepend=0))
    return np.where(instances > 0, total / len(_RECALLS), np.nan)


class WeightedEvaluation:
    """AP by area and category of an evaluation that hotcoco has made, for any weights of the images."""

    def __init__(self, run: hotcoco.COCOeval) -> None:
        self.image_ids, self.category_ids = list(run.params.img_ids), list(run.params.cat_ids)
        self.thresholds = len(run.params.iou_thrs)
        areas = {tuple(area): a for a, area in enumerate(run.params.area_rng)}
        images = {image_id: i for i, image_id in enumerate(self.image_ids)}
        categories = {category_id: k for k, category_id in enumerate(self.category_ids)}
        grouped: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
        for entry in run.eval_imgs:
            if entry is not None:
                grouped[areas[tuple(entry["aRng"])], categories[entry["category_id"]]].append(entry)
        self.shape = len(areas), len(self.category_ids)
        self.parts = {key: WeightedPrecision(entries, images) for key, entries in grouped.items()}

    @property
    def numbers_per_sample(self) -> int:
        """How many numbers its largest array holds for each sample."""
        rows = (len(part.image) for part in self.parts.values())
        return max(self.shape[0] * self.shape[1] * self.thresholds, len(self.image_ids), 1, *rows)

    def images_with_instances(self, area: int, categories: Sequence[bool]) -> int:
        """How many images have an instance of these categories in a range of areas."""
        found = np.zeros(len(self.image_ids), dtype=bool)
        for (part_area, category), part in self.parts.items():
            if part_area == area and categories[category]:
                found |= part.instances > 0
        return int(found.sum())

    def __call__(self, weights: Array) -> Array:
        """(A, K, T, B) AP for (I, B) weights; nan where there is no instance."""
        values = np.full((*self.shape, self.thresholds, weights.shape[1]), np.nan)
        for (area, category), part in self.parts.items():
            values[area, category] = part(weights)
        return values


def image_weights(sides: Sequence[WeightedEvaluation], samples: int, seed: int) -> list[Array]:
    """Batches of (I, B) weights: all images alike once, then the samples; B is as large as memory should allow."""
    images, generator = len(sides[0].image_ids), np.random.default_rng(seed)
    largest = max(side.numbers_per_sample for side in sides)
    size = max(1, min(samples, _MOST_NUMBERS // largest))
    drawn = generator.multinomial(images, np.full(images, 1 / max(images, 1)), samples).T.astype(np.float64)
    parts = (drawn[:, start : start + size] for start in range(0, samples, size))
    return [np.ones((images, 1)), *(np.ascontiguousarray(part) for part in parts)]  # rows are read, image by image
