"""The base of every segmenter's settings: what training and evaluation ask of any of them."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field

from uniquery.settings import Settings


class SegmenterSettings(Settings):
    """Settings that every segmenter has. `name` selects the segmenter in the table of `segmenters`."""

    name: str
    max_detections: int = Field(100, gt=0, description="most instances that are predicted in an image")
    mask_threshold: float = Field(0.5, gt=0, lt=1, description="probability above which a pixel belongs to a mask")

    @property
    def instance_limit(self) -> tuple[str, int] | None:
        """How many instances of an image the network can represent, as (key in the config, limit); None: any number."""
        return None

    @property
    def supports_panoptic(self) -> bool:
        """Whether it learns and predicts stuff besides things."""
        return False

    @property
    def has_federated_loss(self) -> bool:
        """Whether the class loss can leave classes out: each has a sigmoid of its own, and `losses` does so."""
        return False

    @property
    @abstractmethod
    def memory_advice(self) -> str:
        """Which setting to lower when memory runs out in training, to complete the sentence "Try: ..."."""
