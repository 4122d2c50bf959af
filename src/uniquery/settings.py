"""The base of every settings model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """What every group of settings is: closed to unknown keys, and fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
