"""Query-based instance segmenters, trained with instance-unique, equivariant querying."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uniquery.evaluation import evaluate
    from uniquery.experiment import train
    from uniquery.model import Model, load
    from uniquery.querying import (
        EquivarianceLoss,
        EquivarianceSettings,
        InterSceneLoss,
        InterSceneSettings,
        PixelMemory,
        Segmenter,
        UniqueQuerying,
    )
    from uniquery.segmenters import build_segmenter
    from uniquery.structures import Images, Instances, Targets
    from uniquery.training.config import load_config

__version__ = "0.1.0"

__all__ = [
    "EquivarianceLoss",
    "EquivarianceSettings",
    "Images",
    "Instances",
    "InterSceneLoss",
    "InterSceneSettings",
    "Model",
    "PixelMemory",
    "Segmenter",
    "Targets",
    "UniqueQuerying",
    "__version__",
    "build_segmenter",
    "evaluate",
    "load",
    "load_config",
    "train",
]

_MODULES = {
    "EquivarianceSettings": "querying",
    "EquivarianceLoss": "querying",
    "Images": "structures",
    "Instances": "structures",
    "InterSceneSettings": "querying",
    "InterSceneLoss": "querying",
    "Model": "model",
    "PixelMemory": "querying",
    "Segmenter": "querying",
    "Targets": "structures",
    "UniqueQuerying": "querying",
    "build_segmenter": "segmenters",
    "evaluate": "evaluation",
    "load": "model",
    "load_config": "training.config",
    "train": "experiment",
}


if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name on first use: the command line sets OpenMP variables before torch is imported."""
        if name not in _MODULES:
            raise AttributeError(f"module 'uniquery' has no attribute '{name}'")
        return getattr(import_module(f"uniquery.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
