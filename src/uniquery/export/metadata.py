"""What an exported file says about itself, as json in the metadata of the ONNX model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from uniquery.export.graphs import MaskFrame
from uniquery.structures import SIZE_DIVISIBILITY
from uniquery.weights.model_file import SCORE_THRESHOLD, ModelInfo

KEY = "uniquery"
FORMAT = "uniquery-onnx/1"
INPUTS = ("images", "sizes")
OUTPUTS = ("scores", "labels", "boxes", "masks")


@dataclass(frozen=True)
class ExportInfo:
    """How to use an exported model.

    Attributes:
        segmenter: its name.
        classes: the name of each label.
        category_ids: the COCO category id of each label.
        short: pixels of the short side that images are resized to.
        longest: most pixels of the long side.
        multiple: images are padded to multiples of it.
        score_thresholds: for each label, the score below which an instance is left out.
        mask_threshold: probability above which a pixel belongs to a mask.
        masks: where the cells of a mask lie.
    """

    segmenter: str
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    short: int
    longest: int
    multiple: int
    score_thresholds: tuple[float, ...]
    mask_threshold: float
    masks: MaskFrame

    @classmethod
    def of_model(cls, info: ModelInfo, frame: MaskFrame) -> ExportInfo:
        """The description of a model's export."""
        return cls(
            segmenter=info.model.name,
            classes=tuple(category.name for category in info.categories),
            category_ids=tuple(category.id for category in info.categories),
            short=info.test_size.short,
            longest=info.test_size.longest,
            multiple=SIZE_DIVISIBILITY,
            score_thresholds=info.thresholds.scores if info.thresholds else (SCORE_THRESHOLD,) * len(info.categories),
            mask_threshold=info.thresholds.mask if info.thresholds else info.model.mask_threshold,
            masks=frame,
        )

    def to_json(self) -> str:
        """For the metadata."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ExportInfo:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        values.pop("format")
        lists: dict[str, Any] = {
            name: tuple(values.pop(name)) for name in ("classes", "category_ids", "score_thresholds")
        }
        return cls(masks=MaskFrame(**values.pop("masks")), **lists, **values)
