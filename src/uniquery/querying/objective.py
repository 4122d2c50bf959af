"""Training objectives: one module, one forward, named losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from uniquery.querying.contract import Segmenter
from uniquery.structures import Images, Targets

Phase = Callable[[str], AbstractContextManager[None]]


class BaseObjective(nn.Module):
    """The segmenter's own objective, Eq. 3: L_cls + L_mask and whatever else the base adds."""

    def __init__(self, segmenter: Segmenter[Any, Any, Any]) -> None:
        super().__init__()
        self.segmenter = segmenter

    def forward(
        self, images: Images, targets: Sequence[Targets], phase: Phase = lambda _: nullcontext()
    ) -> dict[str, Tensor]:
        """Weighted losses by name; `phase` is told which part of the work begins."""
        with phase("forward"):
            outputs = self.segmenter(images)
        with phase("assign"):
            assignment = self.segmenter.assign(outputs, targets)
        with phase("loss"):
            return self.segmenter.losses(outputs, targets, assignment)
