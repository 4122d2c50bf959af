"""Whether an exported model predicts what the model predicts: both run on the same images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from uniquery.data.augment import TestSize
from uniquery.data.batch import EvaluationSamples, collate, raise_errors
from uniquery.data.dataset import Dataset, Row
from uniquery.evaluation import evaluate
from uniquery.evaluation.agreement import match_instances
from uniquery.evaluation.inference import Progress, category_ids_by_name
from uniquery.evaluation.protocol import Protocol
from uniquery.export.runtimes import ExportedModel
from uniquery.querying.contract import Segmenter
from uniquery.structures import Instances

MAX_AP_DIFFERENCE = 0.1
_COMPARED_SCORE = 0.05  # instances below it are noise, of which any number may differ


@dataclass(frozen=True)
class Proof:
    """What both models gave on some images.

    Attributes:
        images: how many images.
        native_ap: mask AP of the model, in percent; nan without annotations.
        exported_ap: mask AP of the exported model.
        score_difference: the largest difference between the scores of an instance that both found.
        lowest_iou: the smallest IoU between the masks of such an instance.
        unmatched: instances with a score of at least 0.05 that only one of them found.
        native_seconds: median time of an image, masks included.
        exported_seconds: the same of the exported model.
    """

    images: int
    native_ap: float
    exported_ap: float
    score_difference: float
    lowest_iou: float
    unmatched: int
    native_seconds: float
    exported_seconds: float

    @property
    def ap_difference(self) -> float:
        """In points of AP; 0 if neither can be computed."""
        if math.isnan(self.native_ap) and math.isnan(self.exported_ap):
            return 0.0
        return abs(self.native_ap - self.exported_ap)

    @property
    def is_equal(self) -> bool:
        """Whether the exported model may be used for the other."""
        return self.ap_difference <= MAX_AP_DIFFERENCE  # false for nan


@torch.inference_mode()
def compare_models(
    model: Segmenter[Any, Any, Any],
    exported: ExportedModel,
    data: Dataset,
    size: TestSize,
    *,
    max_detections: int | None = None,
    protocol: Protocol | None = None,
    progress: Progress = lambda *_: None,
) -> Proof:
    """Runs both models on each image of a data set, in turns, so that both meet the same load of the machine."""
    samples = EvaluationSamples(data, size.short, size.longest)
    loader: Any = torch.utils.data.DataLoader(samples, 1, collate_fn=collate)
    ids = category_ids_by_name(exported.info.classes, data)
    rows: tuple[list[Row], list[Row]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    differences = _Differences()
    for done, batch in enumerate(raise_errors(loader), start=1):
        images, sizes = batch.images, batch.original_sizes
        predicted: list[Instances] = []
        for is_native, times, results in zip((True, False), seconds, rows, strict=True):
            start = perf_counter()
            found = model.predict(model(images), sizes) if is_native else exported.predict(images, sizes)
            (instances,) = found
            times.append(perf_counter() - start)
            results += instances.to_coco(batch.targets[0].image_id, ids)
            predicted.append(instances)
        differences.add(*predicted)
        progress(done, len(samples))
    native_ap, exported_ap = (_mask_ap(data, results, max_detections, protocol) for results in rows)
    return Proof(
        images=len(samples),
        native_ap=native_ap,
        exported_ap=exported_ap,
        score_difference=differences.score,
        lowest_iou=differences.iou,
        unmatched=differences.unmatched,
        native_seconds=median(seconds[0]),
        exported_seconds=median(seconds[1]),
    )


def _mask_ap(data: Dataset, rows: list[Row], max_detections: int | None, protocol: Protocol | None) -> float:
    truth = data.ground_truth()
    metrics = evaluate(truth, rows, iou_type="segm", max_detections=max_detections, protocol=protocol)
    value = metrics.values["AP"]
    return math.nan if value is None else float(value)


class _Differences:
    """The largest differences between the instances of two models so far."""

    def __init__(self) -> None:
        self.score, self.iou, self.unmatched = 0.0, 1.0, 0

    def add(self, native: Instances, exported: Instances) -> None:
        """The instances of one more image."""
        kept = native[native.scores >= _COMPARED_SCORE]
        pairs = match_instances(kept, exported)
        for i, j, iou in pairs:
            self.score = max(self.score, float((kept.scores[i] - exported.scores[j]).abs()))
            self.iou = min(self.iou, iou)
        found = {j for _, j, _ in pairs}
        only_exported = [j for j in range(len(exported)) if j not in found and exported.scores[j] >= _COMPARED_SCORE]
        borderline = sum(1 for j in only_exported if exported.scores[j] < _COMPARED_SCORE + 1e-3)
        self.unmatched += len(kept) - len(pairs) + len(only_exported) - borderline


def summary_lines(proof: Proof, runtime: str) -> Sequence[str]:
    """What was measured, for a terminal."""
    ratio = proof.native_seconds / proof.exported_seconds
    native, exported = ("n/a" if math.isnan(ap) else f"{ap:.2f}" for ap in (proof.native_ap, proof.exported_ap))
    return (
        f"mask AP on {proof.images} images: torch {native}, {runtime} {exported}, difference {proof.ap_difference:.3f}",
        f"largest difference of a score {proof.score_difference:.1e}, lowest IoU of a mask {proof.lowest_iou:.3f}, "
        f"{proof.unmatched} instances found by one only",
        f"time of an image: torch {1e3 * proof.native_seconds:.0f} ms, {runtime} {1e3 * proof.exported_seconds:.0f} ms "
        f"({ratio:.2f} times as fast)",
    )
