"""A second, slow implementation of LVIS's AP, which shares nothing with the first but the decoding of masks."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uniquery.evaluation import Metrics, evaluate
from uniquery.masks import rle

AREAS = {"": (0, 1e10), "s": (0, 32**2), "m": (32**2, 96**2), "l": (96**2, 1e10)}
THRESHOLDS = np.linspace(0.5, 0.95, 10)


class NaiveLvis:
    """AP by the text of the LVIS paper, from bitmaps, one detection after the other."""

    def __init__(self, truth: dict[str, Any], results: list[dict[str, Any]], limit: int = 300) -> None:
        self.truth = truth
        objects, found = defaultdict(list), defaultdict(list)
        for row in truth["annotations"]:
            objects[row["image_id"], row["category_id"]].append(row)
        for row in sorted(results, key=lambda row: -row["score"]):
            found[row["image_id"]].append(row)
        self.pairs: dict[tuple[int, int], Pair] = {}
        for image in truth["images"]:
            best = found[image["id"]][:limit]
            for category in (row["id"] for row in truth["categories"]):
                wanted = objects[image["id"], category]
                if wanted or category in image["neg_category_ids"]:
                    of_class = [row for row in best if row["category_id"] == category]
                    self.pairs[image["id"], category] = Pair(image, category, wanted, of_class)

    def precisions(self, category: int, area: tuple[float, float], threshold: float) -> np.ndarray | None:
        """(101,) precision at recall 0, 0.01, …; None without ground truth."""
        pairs = [self.pairs[key] for image in self.truth["images"] if (key := (image["id"], category)) in self.pairs]
        wanted = sum(area[0] <= size <= area[1] for pair in pairs for size in pair.areas)
        if not wanted:
            return None
        outcomes = [outcome for pair in pairs for outcome in pair.outcomes(area, threshold)]
        outcomes.sort(key=lambda outcome: -outcome[0])
        hits = np.cumsum([hit for _, hit in outcomes])
        precision = hits / np.arange(1, len(hits) + 1)
        points = [precision[hits / wanted >= recall] for recall in np.linspace(0, 1, 101)]
        return np.array([reached.max() if len(reached) else 0 for reached in points])

    def ap(self, categories: list[int], area: str = "", thresholds: np.ndarray = THRESHOLDS) -> float | None:
        values = [self.precisions(c, AREAS[area], t) for c in categories for t in thresholds]
        measured = [v.mean() for v in values if v is not None]
        return 100 * float(np.mean(measured)) if measured else None

    def values(self) -> dict[str, float | None]:
        """LVIS's numbers, without recall."""
        categories = {row["id"]: row["frequency"] for row in self.truth["categories"]}
        return {
            "AP": self.ap([*categories]),
            "AP50": self.ap([*categories], thresholds=THRESHOLDS[:1]),
            "AP75": self.ap([*categories], thresholds=THRESHOLDS[5:6]),
            **{f"AP{letter}": self.ap([*categories], letter) for letter in "sml"},
            **{f"AP{letter}": self.ap([c for c, f in categories.items() if f == letter]) for letter in "rcf"},
        }


class Pair:
    """An image and a class that it was labeled for."""

    def __init__(self, image: dict[str, Any], category: int, objects: list[Any], found: list[Any]) -> None:
        size = image["height"], image["width"]
        masks, bitmaps = (
            [rle.decode(rle.from_segmentation(row["segmentation"], *size)).astype(bool) for row in rows]
            for rows in (objects, found)
        )
        spellings = ("not_exhaustive_category_ids", "non_exhaustive_category_ids")
        self.is_exhaustive = not any(category in image.get(key, ()) for key in spellings)
        self.areas = [row["area"] for row in objects]
        self.scores, self.found_areas = [row["score"] for row in found], [int(bitmap.sum()) for bitmap in bitmaps]
        self.ious = [[(one & other).sum() / (one | other).sum() for other in masks] for one in bitmaps]

    def outcomes(self, area: tuple[float, float], threshold: float) -> list[tuple[float, bool]]:
        """(score, whether it is right) of the detections that count."""
        counted, taken, outcomes = [area[0] <= size <= area[1] for size in self.areas], set[int](), []
        for score, size, ious in zip(self.scores, self.found_areas, self.ious, strict=True):
            options = [k for k, iou in enumerate(ious) if k not in taken and iou >= threshold]
            match = max(options, key=lambda k: (counted[k], ious[k]), default=None)
            if match is not None:
                taken.add(match)
                if counted[match]:
                    outcomes.append((score, True))
            elif area[0] <= size <= area[1] and self.is_exhaustive:
                outcomes.append((score, False))
        return outcomes


def assert_lvis_equals_the_naive_way(
    truth: dict[str, Any] | Path, results: list[dict[str, Any]] | Path, limit: int = 300
) -> Metrics:
    """Our metrics of results, which are equal to those from the definition; both may be json files.

    For example on a run: assert_lvis_equals_the_naive_way(Path("val.json"), Path("runs/x/predictions.json")).
    """
    truth, results = (json.loads(x.read_text()) if isinstance(x, Path) else x for x in (truth, results))
    naive, metrics = NaiveLvis(truth, results, limit), evaluate(truth, results, max_detections=limit)
    expected = naive.values()
    assert {name for name in metrics.values if name.startswith("AP")} == set(expected)
    for name, value in expected.items():
        assert metrics.values[name] == (None if value is None else pytest.approx(value, abs=1e-9)), name
    for row in truth["categories"]:
        value = naive.ap([row["id"]])
        assert metrics.per_class[row["name"]] == (None if value is None else pytest.approx(value, abs=1e-9)), row
    return metrics
