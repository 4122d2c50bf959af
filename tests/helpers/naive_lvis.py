"""A second, slow implementation of LVIS's AP, which shares nothing with the first."""

from collections import defaultdict
from typing import Any

import numpy as np

from uniquery.masks import rle

AREAS = {"": (0, 1e10), "s": (0, 32**2), "m": (32**2, 96**2), "l": (96**2, 1e10)}
THRESHOLDS = np.linspace(0.5, 0.95, 10)


class NaiveLvis:
    """AP by the text of the LVIS paper, from bitmaps, one detection after the other."""

    def __init__(self, truth: dict[str, Any], results: list[dict[str, Any]], limit: int = 300) -> None:
        self.truth = truth
        self.objects, self.found = defaultdict(list), defaultdict(list)
        for row in truth["annotations"]:
            bitmap = rle.decode(row["segmentation"]).astype(bool)
            self.objects[row["image_id"], row["category_id"]].append((bitmap, row["area"]))
        for image in truth["images"]:
            best = sorted((r for r in results if r["image_id"] == image["id"]), key=lambda r: -r["score"])[:limit]
            for row in best:
                bitmap = rle.decode(row["segmentation"]).astype(bool)
                self.found[row["image_id"], row["category_id"]].append((bitmap, row["score"]))

    def precisions(self, category: int, area: tuple[float, float], threshold: float) -> np.ndarray | None:
        """(101,) precision at recall 0, 0.01, …; None without ground truth."""
        outcomes, wanted = [], 0
        for image in self.truth["images"]:
            objects = self.objects[image["id"], category]
            if not objects and category not in image["neg_category_ids"]:
                continue
            counted = [area[0] <= size <= area[1] for _, size in objects]
            wanted += sum(counted)
            taken = [False] * len(objects)
            for bitmap, score in self.found[image["id"], category]:
                ious = [(bitmap & other).sum() / (bitmap | other).sum() for other, _ in objects]
                options = [k for k in range(len(objects)) if not taken[k] and ious[k] >= threshold]
                match = max(options, key=lambda k: (counted[k], ious[k]), default=None)
                if match is not None:
                    taken[match] = True
                    if counted[match]:
                        outcomes.append((score, True))
                elif area[0] <= bitmap.sum() <= area[1] and category not in image["not_exhaustive_category_ids"]:
                    outcomes.append((score, False))
        if not wanted:
            return None
        outcomes.sort(key=lambda pair: -pair[0])
        hits = np.cumsum([hit for _, hit in outcomes])
        points = np.zeros(101)
        for i, recall in enumerate(np.linspace(0, 1, 101)):
            reached = [hits[k] / (k + 1) for k in range(len(outcomes)) if hits[k] / wanted >= recall]
            points[i] = max(reached, default=0)
        return points

    def ap(self, categories: list[int], area: str = "", thresholds: np.ndarray = THRESHOLDS) -> float | None:
        values = [self.precisions(c, AREAS[area], t) for c in categories for t in thresholds]
        measured = [v.mean() for v in values if v is not None]
        return 100 * float(np.mean(measured)) if measured else None
