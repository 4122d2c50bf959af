"""A trained model, opened together with the data to measure it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from uniquery.data.dataset import Dataset, is_panoptic
from uniquery.data.open import open_data
from uniquery.errors import UserError
from uniquery.evaluation.protocol import Protocol
from uniquery.querying.contract import Segmenter
from uniquery.training.batches import check_classes_known, hint_at_option
from uniquery.training.config import SplitConfig
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import ModelInfo, load_model


@dataclass(frozen=True)
class ModelAndData:
    """A model and the data to measure it on.

    Attributes:
        model: the segmenter in evaluation mode.
        info: its settings and its classes.
        data: the given data, or the validation data of the model's run.
        max_detections: how many detections its run scores; None: the protocol's number.
        protocol: whose metrics its run asks for; None: the data decides.
    """

    model: Segmenter[Any, Any, Any]
    info: ModelInfo
    data: Dataset
    max_detections: int | None
    protocol: Protocol | None

    @property
    def is_panoptic(self) -> bool:
        """Whether the data has things and stuff."""
        return is_panoptic(self.data.categories)

    @property
    def classes(self) -> list[str]:
        """The model's class names, by label."""
        return [category.name for category in self.info.categories]


def open_model_and_data(
    path: Path,
    data: tuple[Path, Path] | None = None,
    device: torch.device | str = "cpu",
    *,
    pngs: Path | None = None,
    needs_annotations: bool = True,
) -> ModelAndData:
    """Loads a model and the data to measure it on.

    Args:
        path: a run folder, a checkpoint folder or a model file.
        data: annotations and image folder; by default the validation data of the model's run.
        device: where the model goes.
        pngs: the folder of panoptic PNG files of `data`; None: the path of the json without its ending.
        needs_annotations: False accepts a json without 'annotations', such as that of COCO test-dev.

    Raises:
        UserError: something cannot be read, the classes do not fit, or there is no data.
    """
    model, info = load_model(path, device)
    run = RunFolder.of_model(path)
    config = run.read_config() if run else None
    split = config.data.val if config else None
    if data is not None:
        split = SplitConfig(annotations=data[0], images=data[1], panoptic_pngs=pngs)
    if split is None:
        raise UserError(f"{path} has no validation data of its own: add --data ANNOTATIONS IMAGES.")
    model_classes = [category.name for category in info.categories]
    with hint_at_option("--data", split):
        dataset = open_data(
            split.annotations,
            split.images,
            pngs=split.panoptic_pngs,
            classes=model_classes,
            allow_missing=True,
            bit_depth=info.bit_depth,
            needs_annotations=needs_annotations,
        )
        dataset.check_files_exist()
    if is_panoptic(dataset.categories) and not is_panoptic(info.categories):
        raise UserError(
            f"{split.annotations} is panoptic, but {path} was trained on instances: score it with instance annotations."
        )
    if data is not None or config is None or config.data.classes is None:
        check_classes_known(dataset, model_classes)
    limit, protocol = (config.eval.max_detections, config.eval.protocol) if config else (None, None)
    return ModelAndData(model, info, dataset, limit, protocol)
