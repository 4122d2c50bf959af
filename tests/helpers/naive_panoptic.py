"""Panoptic quality once more, from its definition."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from uniquery.data.dataset import GroundTruth
from uniquery.evaluation.panoptic import PanopticMetrics, evaluate_panoptic
from uniquery.masks import rle

NAMES = ["PQ", "PQ_th", "PQ_st", "SQ", "SQ_th", "SQ_st", "RQ", "RQ_th", "RQ_st"]


def naive_quality(truth, results):
    """Class id → (IoU sum, TP, FP, FN), from the definition: bitmaps, one image and one pair at a time."""
    counts = defaultdict(lambda: [0.0, 0, 0, 0])
    for image in truth.images:
        real = [(a["category_id"], a["iscrowd"], bitmap(a)) for a in truth.annotations if a["image_id"] == image]
        found = [(r["category_id"], bitmap(r)) for r in results if r["image_id"] == image]
        size = truth.images[image]["height"], truth.images[image]["width"]
        void = ~np.any([mask for *_, mask in real] or [np.zeros(size, bool)], axis=0)
        matched = set()
        for category, crowd, mask in real:
            if crowd:
                continue
            overlaps = [(k, iou(mask, other, void)) for k, (label, other) in enumerate(found) if label == category]
            hit = next(((k, value) for k, value in overlaps if value > 0.5), None)
            if hit is None:
                counts[category][3] += 1
            else:
                matched.add(hit[0])
                counts[category][0] += hit[1]
                counts[category][1] += 1
        for k, (category, mask) in enumerate(found):
            crowds = [other for label, crowd, other in real if crowd and label == category]
            ignored = np.any([void, *crowds[-1:]], axis=0)  # the official tool knows one crowd per class
            if k not in matched and (mask & ignored).sum() <= 0.5 * mask.sum():
                counts[category][2] += 1
    return counts


def iou(real, found, void):
    both = (real & found).sum()
    return both / (real.sum() + found.sum() - both - (found & void).sum())


def bitmap(row):
    return rle.decode(row["segmentation"]).astype(bool)


def quality_of(counts, categories):
    """PQ, SQ and RQ of each class in percent, and their means over all, things and stuff."""
    per_class = {}
    for number in categories:
        total, tp, fp, fn = counts[number]
        if tp + fp + fn:
            sq, rq = total / tp if tp else 0.0, tp / (tp + 0.5 * fp + 0.5 * fn)
            per_class[number] = 100 * np.array([sq * rq, sq, rq])
    values = {}
    for ending, kinds in (("", (0, 1)), ("_th", (1,)), ("_st", (0,))):
        rows = [row for number, row in per_class.items() if categories[number]["isthing"] in kinds]
        means = np.mean(rows, axis=0) if rows else (None, None, None)
        values |= {f"{name}{ending}": value for name, value in zip(("PQ", "SQ", "RQ"), means, strict=True)}
    return values, {number: row[0] for number, row in per_class.items()}


def assert_equals_the_naive_way(truth, results):
    """Returns our metrics, which are equal to those from the definition."""
    found = evaluate_panoptic(truth, results)
    values, per_class = quality_of(naive_quality(truth, results), truth.categories)
    assert list(found.values) == NAMES
    for name in NAMES:
        assert found.values[name] == (None if values[name] is None else pytest.approx(values[name], abs=1e-9)), name
    names = {number: row["name"] for number, row in truth.categories.items()}
    expected = {names[number]: pytest.approx(per_class[number], abs=1e-9) for number in per_class}
    assert {name: value for name, value in found.per_class.items() if value is not None} == expected
    return found


def assert_files_equal_the_naive_way(annotations: Path, results: Path) -> PanopticMetrics:
    """The same for files, whose PNG files are read here: the ground truth, and COCO's format or a run's predictions.

    For example: assert_files_equal_the_naive_way(Path("val.json"), Path("runs/x/predictions.json")).
    """
    content, found = json.loads(annotations.read_text()), json.loads(results.read_text())
    images, categories = ({row["id"]: row for row in content[key]} for key in ("images", "categories"))
    truth = GroundTruth(images, categories, segments_of(content, annotations.with_suffix("")), str(annotations))
    rows = segments_of(found, results.with_suffix("")) if isinstance(found, dict) else found
    return assert_equals_the_naive_way(truth, rows)


def segments_of(content, pngs):
    rows = []
    for entry in content["annotations"]:
        ids = np.asarray(Image.open(pngs / entry["file_name"]).convert("RGB")).astype(int) @ [1, 256, 65536]
        for segment in entry["segments_info"]:
            about = {key: segment.get(key, 0) for key in ("category_id", "iscrowd")}
            mask = ids == segment["id"]
            if mask.any():
                rows.append({"image_id": entry["image_id"], "segmentation": rle.encode(mask), **about})
    return rows
