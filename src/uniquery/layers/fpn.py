"""Feature pyramid network."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn


class FPN(nn.Module):
    """Top-down pyramid: 1×1 laterals, nearest ×2, sum, 3×3 outputs; coarser levels by strided convolutions.

    Args:
        channels: stride → channels of the backbone's features to use.
        out_channels: channels of every level.
        extra_levels: how many 3×3 stride-2 convolutions follow the coarsest level, with ReLU between them.
        context: is applied to the coarsest lateral, and keeps its shape.
    """

    def __init__(
        self,
        channels: Mapping[int, int],
        out_channels: int,
        extra_levels: int = 0,
        context: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.strides = sorted(channels)
        self.laterals = nn.ModuleDict({str(s): nn.Conv2d(channels[s], out_channels, 1) for s in self.strides})
        self.outputs = nn.ModuleDict(
            {str(s): nn.Conv2d(out_channels, out_channels, 3, padding=1) for s in self.strides}
        )
        self.extras = nn.ModuleList(
            nn.Conv2d(out_channels, out_channels, 3, stride=2, padding=1) for _ in range(extra_levels)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        self.context = context

    def forward(self, features: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Stride → (B, out_channels, h, w), finest first."""
        pyramid: dict[int, Tensor] = {}
        top: Tensor | None = None
        for stride in reversed(self.strides):
            merged = self.laterals[str(stride)](features[stride])
            if top is not None:
                merged = merged + F.interpolate(top, size=merged.shape[-2:], mode="nearest")
            elif self.context is not None:
                merged = self.context(merged)
            top = merged
            pyramid[stride] = self.outputs[str(stride)](merged)
        stride = self.strides[-1]
        coarse = pyramid[stride]
        for i, conv in enumerate(self.extras):
            stride *= 2
            coarse = conv(coarse.relu() if i else coarse)
            pyramid[stride] = coarse
        return dict(sorted(pyramid.items()))
