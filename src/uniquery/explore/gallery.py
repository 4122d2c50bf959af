"""The gallery: one row of numbers for each image at once, and the masks of those that are in sight."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from uniquery.data.dataset import Row
from uniquery.errors import UserError
from uniquery.explore.analysis import KINDS
from uniquery.explore.byte_cache import ByteCache
from uniquery.explore.exploration import Exploration
from uniquery.explore.runs import ExploredRun
from uniquery.explore.thresholds import LEAST_SCORE, MASK_THRESHOLDS, Forward, packed
from uniquery.masks.rle import Rle
from uniquery.model import Model
from uniquery.report.palette import COLORS

MAX_IMAGES = 100
"""How many images one request for masks may name."""
LEVELS_BYTES = 32 * 2**20
KEPT_FORWARDS = 4


class Gallery:
    """Answers the gallery's questions.

    Args:
        exploration: the data and the runs.
    """

    def __init__(self, exploration: Exploration) -> None:
        self.exploration = exploration
        self._levels = ByteCache[bytes](LEVELS_BYTES)
        self._forwards: deque[tuple[tuple[int, int, int], Forward]] = deque(maxlen=KEPT_FORWARDS)

    def start(self) -> dict[str, Any]:
        """What never changes: the images, the classes, the kinds of errors, the runs."""
        data = self.exploration.data
        index, label = data.image_classes()
        classes: list[list[int]] = [[] for _ in range(len(data))]
        for i, one in zip(index.tolist(), label.tolist(), strict=True):
            classes[i].append(one)
        return {
            "data": str(data.annotations),
            "panoptic": self.exploration.is_panoptic,
            "classes": data.classes,
            "kinds": KINDS,
            "colors": COLORS,
            "thresholds": MASK_THRESHOLDS,
            "runs": [run.name for run in self.exploration.runs],
            "images": {
                "id": data.image_ids.tolist(),
                "name": [data.path(i).relative_to(data.image_root).as_posix() for i in range(len(data))],
                "size": data.sizes.tolist(),
                "instances": data.instances_per_image().tolist(),
                "classes": classes,
            },
        }

    def state(self) -> dict[str, Any]:
        """What changes: versions, progress and messages of the runs."""
        return {
            "runs": [
                {
                    "version": run.version,
                    "predicted": len(run.predictions),
                    "analyzed": len(run.analysis),
                    "message": run.message,
                    "has_model": run.has_model,
                    "maps": maps.progress,
                }
                for run, maps in zip(self.exploration.runs, self.exploration.maps, strict=True)
            ]
        }

    def analysis(self, number: int) -> dict[str, Any]:
        """AP and counts of errors of each image of a run, in the order of the images; None where not yet known."""
        run = self.exploration.run(number)
        rows = [run.analysis.get(image_id) for image_id in self.exploration.data.image_ids.tolist()]
        return {
            "version": run.version,
            "ap": [None if row is None or row.ap is None else round(row.ap, 4) for row in rows],
            "counts": [None if row is None else row.counts for row in rows],
        }

    def masks(self, image_ids: Sequence[int]) -> dict[str, Any]:
        """Ground truth and predictions of some images, with the kind of each.

        Raises:
            UserError: an image does not exist, or there are too many.
        """
        if len(image_ids) > MAX_IMAGES:
            raise UserError(f"At most {MAX_IMAGES} images at once, not {len(image_ids)}.")
        indices = [self.exploration.index(image_id) for image_id in image_ids]
        for run, maps in zip(self.exploration.runs, self.exploration.maps, strict=True):
            if not run.has_own_predictions:
                maps.prefer(indices)
        return {str(image_id): self._masks_of(image_id) for image_id in image_ids}

    def _masks_of(self, image_id: int) -> dict[str, Any]:
        instances = self.exploration.data.instances(self.exploration.index(image_id))
        runs = [self._run_masks(run, image_id, len(instances)) for run in self.exploration.runs]
        return {"truth": [[label, mask["counts"]] for label, mask in instances], "runs": runs}

    def _run_masks(self, run: ExploredRun, image_id: int, count: int) -> dict[str, Any] | None:
        """[label, score, run lengths, kind] of each prediction, and the kind of each instance; None if not predicted.

        A kind is None as long as the image is not analyzed.
        """
        rows = run.predictions.get(image_id)
        if rows is None:
            return None
        known = run.analysis.get(image_id)
        kinds = known.prediction_kinds if known else {}
        labels = {category.id: label for label, category in enumerate(self.exploration.data.categories)}
        predictions = [
            [labels[row["category_id"]], round(row["score"], 4), row["segmentation"]["counts"], kinds.get(position)]
            for position, row in enumerate(rows)
            if row["score"] >= LEAST_SCORE
        ]
        return {"truth": known.instance_kinds if known else [None] * count, "predictions": predictions}

    def predictions_at(self, number: int, image_id: int, mask_threshold: float) -> bytes:
        """Predictions of an image at a mask threshold, as json.

        Raises:
            UserError: the image cannot be read, or the run has no model.
        """
        run, index = self.exploration.run(number), self.exploration.index(image_id)
        with run.lock:
            model = run.model()
            key = number, image_id, run.model_version
            found = self._levels.get((*key, mask_threshold))
            if found is None:
                known = {name: label for label, name in enumerate(self.exploration.data.classes)}
                labels = [known.get(name) for name in model.classes]
                instances = self._forward(key, model, index).at(mask_threshold)
                found = json.dumps(packed(instances, labels)).encode()
                self._levels.put((*key, mask_threshold), found, len(found))
        return found

    def _forward(self, key: tuple[int, int, int], model: Model, index: int) -> Forward:
        """Kept for the other thresholds of the images in sight."""
        for known, forward in self._forwards:
            if known == key:
                return forward
        forward = Forward.of(model, self.exploration.data.read(index))
        self._forwards.append((key, forward))
        return forward

    def instance(self, image_id: int, source: str, position: int) -> tuple[int, Rle]:
        """The label and the mask of an instance that was clicked.

        Args:
            image_id: of the image.
            source: "truth", or the number of the run that predicted it.
            position: in the list that `masks` gives.

        Raises:
            UserError: there is no such instance.
        """
        data = self.exploration.data
        if source == "truth":
            instances = data.instances(self.exploration.index(image_id))
        else:
            run = self.exploration.run(int(source) if source.isdecimal() else -1)
            labels = {category.id: label for label, category in enumerate(data.categories)}
            rows: list[Row] = run.predictions.get(image_id, [])
            instances = [
                (labels[row["category_id"]], row["segmentation"]) for row in rows if row["score"] >= LEAST_SCORE
            ]
        if not 0 <= position < len(instances):
            raise UserError(f"Image {image_id} has no instance number {position} any more: reload the page.")
        return instances[position]
