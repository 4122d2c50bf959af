"""From pixel values to what a backbone's weights expect."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from uniquery.layers.padding import valid_cells, without_padding
from uniquery.structures import Images


class Normalize(nn.Module):
    """Subtracts the mean, divides by the standard deviation, and sets padding to zero."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], order: Literal["RGB", "BGR"]) -> None:
        super().__init__()
        self.order = order
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Images) -> Tensor:
        """(B, 3, H, W) float, in the channel order of the weights."""
        pixels = images.pixels.flip(1) if self.order == "BGR" else images.pixels
        x = (pixels.to(self.mean.dtype) - self.mean) / self.std
        if isinstance(images.sizes, Tensor):
            return without_padding(x, valid_cells(images.sizes, 1, x))
        for i, (height, width) in zip(range(len(x)), images.sizes, strict=True):
            x[i, :, height:] = 0
            x[i, :, :, width:] = 0
        return x
