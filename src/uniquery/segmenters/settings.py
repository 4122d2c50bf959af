"""The settings that all segmenters share."""

from __future__ import annotations

from pydantic import Field

from uniquery.settings import Settings


class SegmenterSettings(Settings):
    """Base of the settings of a segmenter."""

    name: str
    max_detections: int = Field(100, gt=0)
    mask_threshold: float = Field(0.5, gt=0, lt=1)

    @property
    def instance_limit(self) -> tuple[str, int] | None:
        """The config key and the number of instances that an image can have at most; None: no limit."""
        return None

    @property
    def memory_advice(self) -> str:
        """What to change when training runs out of memory."""
        return "fewer queries: a smaller model.max_queries"
