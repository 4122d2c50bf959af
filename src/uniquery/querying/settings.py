"""The settings of the method as a whole, and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from uniquery.errors import did_you_mean
from uniquery.querying.equivariance import EquivarianceSettings
from uniquery.querying.inter_scene import InterSceneSettings
from uniquery.settings import Settings

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"inter": {}, "equivariance": {}},  # both parts, as published
    "recommended": {},  # what docs/evidence.md found to do no harm: the segmenter's own objective
}


class QueryingSettings(Settings):
    """The two parts of the method; a part that is left out is off.

    Instead, the name of a preset: `querying: paper`; or changed: `querying: {preset: paper, inter: {weight: 0.1}}`.

    >>> QueryingSettings.model_validate({"preset": "paper", "inter": None}).equivariance.weight
    3.0
    """

    inter: InterSceneSettings | None = None
    equivariance: EquivarianceSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        value = {"preset": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping) or "preset" not in value:
            return value
        preset = value["preset"]
        if preset not in PRESETS:
            raise ValueError(
                f"there is no preset '{preset}'; write {' or '.join(PRESETS)}.{did_you_mean(str(preset), PRESETS)}"
            )
        return _changed(PRESETS[preset], {key: change for key, change in value.items() if key != "preset"})

    @property
    def forwards_per_image(self) -> int:
        """Forward passes with the base loss per loaded image: 2 with paired views."""
        return 2 if self.equivariance and self.equivariance.views == "paired" else 1

    @property
    def has_extra_views(self) -> bool:
        """Whether each image of a batch has one more forward pass, for L_equi only."""
        return self.equivariance is not None and self.equivariance.views == "extra"


def _changed(table: Any, changes: Any) -> Any:
    """A table with changes, tables inside it too."""
    if not isinstance(table, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**table, **{key: _changed(table.get(key), change) for key, change in changes.items()}}
