"""A model in one safetensors file, with its architecture and classes in the header; loading it cannot run code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from uniquery.backbones import BackboneConfig
from uniquery.backbones.pretrained import read_weight_file as read_foreign
from uniquery.data.augment import TestSize
from uniquery.data.dataset import Category
from uniquery.errors import CheckpointError, list_some
from uniquery.files import replace_folder, restore_folder
from uniquery.querying.contract import Segmenter
from uniquery.segmenters import SegmenterConfig, build_segmenter, read_segmenter_config
from uniquery.weights.checksummed import CHECKSUMS_FILE, TensorFile, read_json, read_safetensors, write_checksummed
from uniquery.weights.foreign import to_uniquery_names
from uniquery.weights.hub import download_model, is_hub_address

FORMAT = "uniquery/1"
MODEL_FILE = "model.safetensors"
BEST, LAST = "best", "last"  # the checkpoint folders of a run
SCORE_THRESHOLD = 0.5  # the least score of an instance where no thresholds were chosen


@dataclass(frozen=True)
class Thresholds:
    """What `uniquery eval --choose-thresholds` found on validation data; predictions use it by default.

    Attributes:
        scores: the least score of an instance of each class, by label.
        mask: the least probability of a mask's pixel.
        rule: how they were chosen, such as best-f1.
    """

    scores: tuple[float, ...]
    mask: float
    rule: str


@dataclass(frozen=True)
class ModelInfo:
    """The header of a model file: what is needed to build the model and to use it.

    Attributes:
        model: settings of the segmenter.
        backbone: settings of its backbone.
        categories: ids and names of the classes, in the order of the model's labels.
        test_size: the image size of its evaluation.
        thresholds: which of its predictions to keep; None if they were not chosen.
        bit_depth: how many bits the values of 16-bit images use; None: as `read_image` finds them.
    """

    model: SegmenterConfig
    backbone: BackboneConfig
    categories: tuple[Category, ...]
    test_size: TestSize
    thresholds: Thresholds | None = None
    bit_depth: int | None = None

    def to_metadata(self) -> dict[str, str]:
        """The header of a safetensors file, which is text only."""
        chosen = {"thresholds": json.dumps(asdict(self.thresholds))} if self.thresholds else {}
        depth = {} if self.bit_depth is None else {"bit_depth": str(self.bit_depth)}
        return {
            "format": FORMAT,
            "model": self.model.model_dump_json(),
            "backbone": self.backbone.model_dump_json(),
            "categories": json.dumps([_category_fields(c) for c in self.categories]),
            "test_size": self.test_size.model_dump_json(),
            **chosen,
            **depth,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> ModelInfo:
        """The inverse of `to_metadata`."""
        return cls(
            read_segmenter_config(metadata["model"]),
            BackboneConfig.model_validate_json(metadata["backbone"]),
            tuple(_category(fields) for fields in json.loads(metadata["categories"])),
            TestSize.model_validate_json(metadata["test_size"]),
            _thresholds(metadata["thresholds"]) if "thresholds" in metadata else None,
            int(metadata["bit_depth"]) if "bit_depth" in metadata else None,
        )


def _thresholds(text: str) -> Thresholds:
    fields = json.loads(text)
    return Thresholds(tuple(float(score) for score in fields["scores"]), float(fields["mask"]), str(fields["rule"]))


def _category_fields(category: Category) -> list[Any]:
    """What the header holds of a category; `is_thing` is left out where it says nothing, as in older files."""
    flag = [] if category.is_thing is None else [category.is_thing]
    return [category.id, category.name, *flag]


def _category(fields: Sequence[Any]) -> Category:
    number, name, *flag = fields
    return Category(int(number), str(name), bool(flag[0]) if flag else None)


def find_model_file(path: str | Path) -> Path:
    """The model file of a run folder (its best model), of a checkpoint folder, of the Hub, or the file itself.

    Raises:
        CheckpointError: there is none.
    """
    if is_hub_address(path):
        return download_model(path, MODEL_FILE)
    path = Path(path)
    if path.is_file():
        return path
    for folder in (path, path / BEST, path / LAST):
        restore_folder(folder)
        if (folder / MODEL_FILE).is_file():
            return folder / MODEL_FILE
    raise CheckpointError(f"No checkpoint at {path}: give a run folder, a checkpoint folder or a {MODEL_FILE}.")


def read_model_info(path: str | Path) -> ModelInfo:
    """The header of a model file, without its weights.

    Raises:
        CheckpointError: the file is missing, damaged, or not a uniquery model.
    """
    file = find_model_file(path)
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{file} is not a uniquery model (its format is {metadata.get('format')!r}).")
        return ModelInfo.from_metadata(metadata)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read, it is damaged or not a safetensors file: {error}.") from None
    except (ValidationError, KeyError, ValueError):
        raise CheckpointError(f"{file} was written by another version: its header does not fit this one.") from None


def read_model_file(path: str | Path) -> tuple[ModelInfo, dict[str, Tensor]]:
    """The header and the weights of a model file.

    Raises:
        CheckpointError: the file is missing, damaged, or not a uniquery model.
    """
    file = find_model_file(path)
    return read_model_info(file), read_safetensors(file)


def load_model(path: str | Path, device: torch.device | str = "cpu") -> tuple[Segmenter[Any, Any, Any], ModelInfo]:
    """A trained segmenter in eval mode, and the header of its file.

    Args:
        path: a run folder (its best model), a checkpoint folder or a model file.
        device: where to put the model.

    Raises:
        CheckpointError: the file is missing, damaged, or not a uniquery model.
    """
    info, state = read_model_file(path)
    model = build_segmenter(info.model, info.backbone, len(info.categories), pretrained=False)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights of {path} do not fit the header of the file: {str(error).splitlines()[-1].strip()}"
        ) from None
    return model.to(device).eval(), info


def store_thresholds(path: str | Path, thresholds: Thresholds) -> Path:
    """Writes thresholds into the header of a model file; its weights stay as they are.

    Args:
        path: a run folder (its best model), a checkpoint folder or a model file.
        thresholds: what to store.

    Returns:
        The model file.

    Raises:
        CheckpointError: the file is missing, damaged, or not a uniquery model.
        UserError: it cannot be written; it is then unchanged.
    """
    if is_hub_address(path):
        raise CheckpointError(f"{path} is shared: store thresholds in the model of your run, then push that.")
    file = find_model_file(path)
    info, state = read_model_file(file)
    content = TensorFile(state, replace(info, thresholds=thresholds).to_metadata())
    folder = file.parent
    if (folder / CHECKSUMS_FILE).is_file():
        checksums = read_json(folder / CHECKSUMS_FILE)
        with replace_folder(folder) as temporary:
            shutil.copytree(folder, temporary, dirs_exist_ok=True)
            write_checksummed(temporary, {file.name: content})
            checksums |= read_json(temporary / CHECKSUMS_FILE)
            (temporary / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=1))
        return file
    try:
        with TemporaryDirectory(dir=folder, prefix=f".{file.name}.") as temporary_name:
            write_checksummed(Path(temporary_name), {file.name: content})
            (Path(temporary_name) / file.name).replace(file)
    except OSError as error:
        raise CheckpointError(f"Cannot write {file}: {error.strerror or error}.") from None
    return file


@dataclass(frozen=True)
class WeightMatch:
    """Which weights of a file were loaded into a model.

    Attributes:
        loaded: names that were loaded.
        missing: names of the model that the file does not have in the same shape; they keep their initial values.
        unexpected: names of the file that the model does not have in the same shape.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded"]
        for title, names in (("re-initialized", self.missing), ("ignored", self.unexpected)):
            if names:
                lines.append(f"{len(names)} {title}: {list_some(names)}")
        return "; ".join(lines)


def load_matching_weights(model: nn.Module, path: str | Path) -> WeightMatch:
    """Loads every weight that fits by name and shape, from our files or from those of other projects.

    Raises:
        CheckpointError: the file cannot be read, or nothing in it fits.
    """
    path = Path(path)
    state = to_uniquery_names(read_foreign(path)) if is_foreign(path) else read_model_file(path)[1]
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    if not fitting:
        raise CheckpointError(f"Nothing in {path} fits the model: no tensor has the name and shape of a model weight.")
    model.load_state_dict(fitting, strict=False)
    return WeightMatch(
        loaded=tuple(fitting),
        missing=tuple(name for name in own if name not in fitting),
        unexpected=tuple(name for name in state if name not in fitting),
    )


def is_foreign(path: Path) -> bool:
    """Whether a file is from another project: a pickle, or safetensors without our header."""
    if path.suffix != ".safetensors" or not path.is_file():
        return path.suffix in (".pth", ".pt", ".bin", ".pkl")
    try:
        with safe_open(path, framework="pt") as content:
            return not (content.metadata() or {}).get("format", "").startswith("uniquery")
    except SafetensorError:
        return False  # damaged: reading it as our own file reports that
