"""Models to the names of other projects, and checkpoints of other projects to model files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from uniquery.backbones import BACKBONES, BackboneConfig, PixelFormat
from uniquery.backbones.pretrained import read_weight_file
from uniquery.data.coco_json import read_json
from uniquery.data.dataset import Category
from uniquery.errors import CheckpointError, DataError, UserError
from uniquery.files import write_atomically
from uniquery.segmenters import build_segmenter
from uniquery.weights.foreign import FORMATS, Format, find_format
from uniquery.weights.model_file import ModelInfo, is_foreign, read_model_file

PROJECTS = tuple(dict.fromkeys(f.project for f in FORMATS if f.to_theirs is not None))
"""Whose names a model can be written with."""


@dataclass(frozen=True)
class Conversion:
    """What became of the tensors of a file.

    Attributes:
        info: the header of the model.
        project: whose names the tensors had or have now.
        converted: how many tensors were written with new names.
        dropped: how many of the file were left out: buffers that follow from the settings.
        missing: how many of the model are not in the file and have their initial value: counts of batches.
    """

    info: ModelInfo
    project: str
    converted: int
    dropped: int = 0
    missing: int = 0

    @property
    def pixels(self) -> PixelFormat:
        """What the model expects of pixels; weights do not show it."""
        return _pixels(self.info.backbone)


def convert_to_theirs(
    source: str | Path, output: Path, project: str = "original", *, overwrite: bool = False
) -> Conversion:
    """Writes a model with the names of another project, so that it runs in that project's code.

    Args:
        source: a run folder (its best model), a checkpoint folder or a model file.
        output: a .safetensors file, or a .pth file in the structure that the project loads.
        project: one of `PROJECTS`.
        overwrite: whether `output` may exist.

    Raises:
        CheckpointError: there is no model, or the project has no such model.
        UserError: the file exists, has another suffix or cannot be written.
    """
    _check_output(output, (".safetensors", ".pth"), overwrite)
    info, state = read_model_file(source)
    target = _format(info, project)
    assert target.to_theirs is not None
    renamed = {name: _own_storage(tensor) for name, tensor in target.to_theirs(state).items()}
    write_atomically(output, _encoded(renamed, output.suffix, target.wrapper))
    return Conversion(info, project, len(renamed))


def convert_to_ours(source: Path, output: Path, info: ModelInfo, *, overwrite: bool = False) -> Conversion:
    """Writes a checkpoint of another project as a model file, which `uniquery.load` reads.

    Args:
        source: a .pth or .safetensors file.
        output: the .safetensors file.
        info: settings and classes of the model, which the file does not have.
        overwrite: whether `output` may exist.

    Raises:
        CheckpointError: the file cannot be read, its names are not known, or it does not fit the settings.
        UserError: the file exists, has another suffix or cannot be written.
    """
    _check_output(output, (".safetensors",), overwrite)
    foreign = read_weight_file(source)
    found = find_format(foreign)
    if found is None:
        raise CheckpointError(
            f"{source} has names of no project that is known, for example '{next(iter(foreign))}'; known are "
            f"{_listed(sorted({f'{f.segmenter} ({f.project})' for f in FORMATS}))}."
        )
    if found.segmenter != info.model.name:
        raise CheckpointError(
            f"{source} is a {found.segmenter} ({found.project}), but the configuration's model is {info.model.name}."
        )
    ours = found.to_ours(foreign)
    state, missing = _fitted(ours, info, source)
    write_atomically(output, safetensors.torch.save(state, info.to_metadata()))
    kept = len(ours if found.to_theirs is None else found.to_theirs(ours))
    return Conversion(info, found.project, len(state) - missing, len(foreign) - kept, missing)


def is_own_model(path: Path) -> bool:
    """Whether a path is a run folder, a checkpoint folder or a model file of ours."""
    return not is_foreign(path)


def read_categories(path: Path) -> tuple[Category, ...]:
    """The categories of a COCO json by id, which is the order of labels.

    Raises:
        DataError: the file is missing, broken, or its categories have no ids and names.
    """
    rows = read_json(path)["categories"]
    try:
        return tuple(sorted((Category(int(r["id"]), str(r["name"])) for r in rows), key=lambda category: category.id))
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: every category needs an 'id', a whole number, and a 'name'.") from None


def _fitted(ours: Mapping[str, Tensor], info: ModelInfo, source: Path) -> tuple[dict[str, Tensor], int]:
    """The whole state of the model, with all tensors of the file, and how many it does not have."""
    state = build_segmenter(info.model, info.backbone, len(info.categories), pretrained=False).state_dict()
    unknown = [name for name in ours if name not in state]
    missing = [name for name in state if name not in ours and not name.endswith("num_batches_tracked")]
    for names, sentence in (
        (unknown, "has {} that the configured model does not have"),
        (missing, "lacks {} of the configured model"),
    ):
        if names:
            tensors = f"{len(names)} tensor{'s' * (len(names) > 1)}"
            raise CheckpointError(
                f"{source} {sentence.format(tensors)}, for example '{names[0]}'; use settings of the same architecture."
            )
    for name, initial in state.items():
        if name in ours and ours[name].shape != initial.shape:
            raise CheckpointError(
                f"{source}: '{name}' has shape {list(ours[name].shape)}, but {list(initial.shape)} in the configured "
                f"model, which has {len(info.categories)} classes; use its settings and its categories."
            )
    filled = {name: ours.get(name, initial) for name, initial in state.items()}
    return {name: _own_storage(tensor) for name, tensor in filled.items()}, len(state) - len(ours)


def _format(info: ModelInfo, project: str) -> Format:
    """How the project names the model."""
    segmenter, backbone = info.model.name, info.backbone.name
    known = [f for f in FORMATS if f.segmenter == segmenter and f.to_theirs is not None]
    found = next((f for f in known if f.project == project), None)
    if found is None:
        raise CheckpointError(
            f"A {segmenter} cannot be written with the names of '{project}', only of "
            f"{_listed([f.project for f in known]) or 'no project'}."
        )
    if not backbone.startswith(found.backbones):
        raise CheckpointError(
            f"The {segmenter} of '{project}' has no backbone '{backbone}', only {_listed(list(found.backbones))}; "
            "the model cannot run there."
        )
    return found


def _check_output(output: Path, suffixes: tuple[str, ...], overwrite: bool) -> None:
    if output.suffix not in suffixes:
        raise UserError(f"The output {output} must end in {' or '.join(suffixes)}.")
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists; give another name, or --overwrite to replace it.")


def _encoded(state: dict[str, Tensor], suffix: str, wrapper: str | None) -> bytes:
    if suffix == ".safetensors":
        return safetensors.torch.save(state, {"format": "pt"})
    content: dict[str, Any] = {wrapper: state} if wrapper else state
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _own_storage(tensor: Tensor) -> Tensor:
    """A copy that is contiguous and shares no memory, as files need it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _pixels(backbone: BackboneConfig) -> PixelFormat:
    with torch.device("meta"):
        return BACKBONES[backbone.name].build("frozen", backbone.caffe).pixels


def _listed(names: list[str]) -> str:
    return ", ".join(names)
