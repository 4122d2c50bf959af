"""Query-based instance segmenters, trained with instance-unique, equivariant querying."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "UniqueQuerying": "uniquery.querying",
    "Segmenter": "uniquery.querying",
    "Images": "uniquery.structures",
    "Instances": "uniquery.structures",
    "Targets": "uniquery.structures",
    "build_segmenter": "uniquery.segmenters",
    "evaluate": "uniquery.evaluation",
    "load_config": "uniquery.training.config",
    "load_model": "uniquery.weights.model_file",
    "predict_image": "uniquery.evaluation.inference",
    "read_image": "uniquery.data.images",
    "train": "uniquery.training.loop",
}
__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 (the keys are strings)


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: the command line has settings to make before torch is imported."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'uniquery' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)
