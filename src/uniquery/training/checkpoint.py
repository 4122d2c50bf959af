"""Checkpoints: safetensors and json, nothing that can run code.

`model.safetensors` is a model on its own: its header says the architecture and the classes. `trainer.safetensors` and
`trainer.json` beside it hold what a resumed run needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from uniquery.backbones import BackboneConfig
from uniquery.backbones.pretrained import read_tensors
from uniquery.data.coco import Category, CocoData
from uniquery.errors import CheckpointError, UserError
from uniquery.files import folder_replaced, recover_folder
from uniquery.querying.contract import Segmenter
from uniquery.segmenters import SegmenterConfig, build_segmenter
from uniquery.training.config import TestSizeConfig
from uniquery.weights.adelaidet import condinst_names, is_condinst

FORMAT = "uniquery/1"
MODEL_FILE, TENSORS_FILE, STATE_FILE = "model.safetensors", "trainer.safetensors", "trainer.json"


@dataclass(frozen=True)
class ModelCard:
    """What a model file says of itself."""

    model: SegmenterConfig
    backbone: BackboneConfig
    categories: tuple[Category, ...]
    test_size: TestSizeConfig

    def to_metadata(self) -> dict[str, str]:
        """As the header of a safetensors file wants it: text."""
        return {
            "format": FORMAT,
            "model": self.model.model_dump_json(),
            "backbone": self.backbone.model_dump_json(),
            "categories": json.dumps([[c.id, c.name] for c in self.categories]),
            "test_size": self.test_size.model_dump_json(),
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> ModelCard:
        """The inverse."""
        return cls(
            SegmenterConfig.model_validate_json(metadata["model"]),
            BackboneConfig.model_validate_json(metadata["backbone"]),
            tuple(Category(int(i), str(name)) for i, name in json.loads(metadata["categories"])),
            TestSizeConfig.model_validate_json(metadata["test_size"]),
        )


@dataclass(frozen=True)
class TrainerState:
    """What a resumed run needs beside the model: tensors by name, and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


@dataclass(frozen=True)
class LoadReport:
    """What became of each key when weights were loaded into another model."""

    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded"]
        for title, names in (("re-initialised", self.kept), ("ignored", self.ignored)):
            if names:
                shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                lines.append(f"{len(names)} {title}: {shown}")
        return "; ".join(lines)


def save_checkpoint(
    folder: Path, state: Mapping[str, Tensor], card: ModelCard, trainer: TrainerState | None = None
) -> None:
    """Replaces a checkpoint folder as a whole."""
    try:
        with folder_replaced(folder) as temporary:
            save_file(_plain(state), temporary / MODEL_FILE, metadata=card.to_metadata())
            if trainer is not None:
                save_file(_plain(trainer.tensors), temporary / TENSORS_FILE)
                (temporary / STATE_FILE).write_text(json.dumps(trainer.values))
    except SafetensorError as error:  # how safetensors tells of a full disk
        raise UserError(f"Cannot write {folder}: {error}.") from None


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def load_trainer_state(folder: Path) -> TrainerState:
    """What a run left to resume from."""
    recover_folder(folder)
    try:
        values = json.loads((folder / STATE_FILE).read_text())
        return TrainerState(load_file(folder / TENSORS_FILE), values)
    except FileNotFoundError as error:
        raise CheckpointError(f"Nothing to resume: {error.filename or folder} is missing.") from None
    except (json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {folder} is damaged: {error}.") from None


def model_file(path: Path) -> Path:
    """The model file that a run folder, a checkpoint folder or a file name means; a run means its best model."""
    if path.is_file():
        return path
    for folder in (path, path / "best", path / "last"):
        recover_folder(folder)
        if (folder / MODEL_FILE).is_file():
            return folder / MODEL_FILE
    raise CheckpointError(f"No checkpoint at {path}: give a run folder, a checkpoint folder or a {MODEL_FILE}.")


def read_card(path: Path) -> ModelCard:
    """What a model file says of itself.

    Raises:
        CheckpointError: the file is missing, cut off, or not ours.
    """
    file = model_file(path)
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{file} is not a checkpoint of this program (its format is {metadata.get('format')!r})."
            )
        return ModelCard.from_metadata(metadata)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read, it is damaged or not a safetensors file: {error}.") from None
    except (ValidationError, KeyError, ValueError):
        raise CheckpointError(f"{file} was written by another version: its header does not fit this one.") from None


def read_model(path: Path) -> tuple[ModelCard, dict[str, Tensor]]:
    """The card and the weights of a model file.

    Raises:
        CheckpointError: the file is missing, cut off, or not ours.
    """
    return read_card(path), load_file(model_file(path))


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[Segmenter[Any, Any, Any], ModelCard]:
    """A trained segmenter, ready to predict."""
    card, state = read_model(path)
    model = build_segmenter(card.model, card.backbone, len(card.categories), pretrained=False)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights of {path} do not fit its own header: {str(error).splitlines()[-1].strip()}"
        ) from None
    return model.to(device).eval(), card


def init_from(model: nn.Module, path: Path) -> LoadReport:
    """Copies every weight that fits by name and shape, from our checkpoints or from AdelaiDet's.

    Raises:
        CheckpointError: the file cannot be read, or nothing in it fits.
    """
    state = _foreign(path) if path.suffix in (".pth", ".pt") else read_model(path)[1]
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    if not fitting:
        raise CheckpointError(
            f"Nothing in {path} fits the model: no tensor has the name and the shape of one of its own."
        )
    model.load_state_dict(fitting, strict=False)
    return LoadReport(
        loaded=tuple(fitting),
        kept=tuple(name for name in own if name not in fitting),
        ignored=tuple(name for name in state if name not in fitting),
    )


def _foreign(path: Path) -> dict[str, Tensor]:
    """A state dict of another project, under our names where we know theirs."""
    state = read_tensors(path)
    return condinst_names(state) if is_condinst(state) else state


def check_classes_unchanged(card: ModelCard, data: CocoData) -> None:
    """Raises if a run's data no longer has the classes that its checkpoint was trained on."""
    before, now = [c.name for c in card.categories], data.classes
    if before != now:
        raise CheckpointError(
            f"{data.annotations} has the classes {', '.join(now)}, but the checkpoint was trained on "
            f"{', '.join(before)}: start a new run, with train.init_from if its weights are to be used."
        )


def check_classes(card: ModelCard, classes: Sequence[str], data_name: str) -> None:
    """Raises unless data and model speak of the same classes."""
    ours = {c.name for c in card.categories}
    missing = [name for name in classes if name not in ours]
    if missing:
        raise CheckpointError(
            f"{data_name} has {len(missing)} class{'es' * (len(missing) > 1)} that the model does not know, "
            f"'{missing[0]}' for one; the model knows {', '.join(sorted(ours)[:8])}{', …' * (len(ours) > 8)}."
        )
