"""A model in one safetensors file, whose header says the architecture and the classes; nothing in it can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from uniquery.backbones import BackboneConfig
from uniquery.backbones.pretrained import read_weight_file as read_foreign
from uniquery.data.augment import TestSize
from uniquery.data.coco import Category
from uniquery.errors import CheckpointError
from uniquery.files import recover_folder
from uniquery.querying.contract import Segmenter
from uniquery.segmenters import SegmenterConfig, build_segmenter, read_segmenter_config
from uniquery.weights.checksummed import read_tensors
from uniquery.weights.foreign import our_names

FORMAT = "uniquery/1"
MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class ModelCard:
    """What a model file says of itself."""

    model: SegmenterConfig
    backbone: BackboneConfig
    categories: tuple[Category, ...]
    test_size: TestSize

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
            read_segmenter_config(metadata["model"]),
            BackboneConfig.model_validate_json(metadata["backbone"]),
            tuple(Category(int(i), str(name)) for i, name in json.loads(metadata["categories"])),
            TestSize.model_validate_json(metadata["test_size"]),
        )


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
    return read_card(path), read_tensors(model_file(path))


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


def check_classes(card: ModelCard, classes: Sequence[str], data_name: str) -> None:
    """Raises unless data and model speak of the same classes."""
    ours = {c.name for c in card.categories}
    missing = [name for name in classes if name not in ours]
    if missing:
        raise CheckpointError(
            f"{data_name} has {len(missing)} class{'es' * (len(missing) > 1)} that the model does not know, "
            f"'{missing[0]}' for one; the model knows {', '.join(sorted(ours)[:8])}{', …' * (len(ours) > 8)}."
        )


@dataclass(frozen=True)
class LoadReport:
    """What became of each key when weights were loaded into another model."""

    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded"]
        for title, names in (("re-initialized", self.kept), ("ignored", self.ignored)):
            if names:
                shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                lines.append(f"{len(names)} {title}: {shown}")
        return "; ".join(lines)


def init_from(model: nn.Module, path: Path) -> LoadReport:
    """Copies every weight that fits by name and shape, from our checkpoints or from those that `our_names` knows.

    Raises:
        CheckpointError: the file cannot be read, or nothing in it fits.
    """
    state = our_names(read_foreign(path)) if _is_foreign(path) else read_model(path)[1]
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


def _is_foreign(path: Path) -> bool:
    """Whether a file is another project's: a pickle, or safetensors without our header."""
    if path.suffix != ".safetensors" or not path.is_file():
        return path.suffix in (".pth", ".pt", ".bin", ".pkl")
    try:
        with safe_open(path, framework="pt") as content:
            return not (content.metadata() or {}).get("format", "").startswith("uniquery")
    except SafetensorError:
        return False  # damaged: reading it as ours says so
