"""The base of every settings model."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """What every group of settings is: closed to unknown keys, and fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def by_name(value: Any) -> Any:
    """Lets a plain name stand for a table of settings: `model: condinst` means `model: {name: condinst}`."""
    return {"name": value} if isinstance(value, str) else value
