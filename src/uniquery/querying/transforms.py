"""G and its elements g: geometric transformations that act on images, embeddings, masks, boxes and locations alike.

Letters: K instances, H × W the source in pixels, h × w a map of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, field_validator
from torch import Tensor

from uniquery.querying.keyed_random import Generators, generator_per_image
from uniquery.settings import Settings
from uniquery.structures import SIZE_DIVISIBILITY

Fraction = Annotated[float, Field(gt=0, le=1)]

_MASKS_AT_ONCE = 16


@dataclass(frozen=True)
class Transform:
    """One drawn element g: crop a window, flip it, then rotate and scale it about its center.

    A window on the grid of 32 pixels, flipped or not, is an exact index operation at every stride. Rotation
    and scaling resample; pixels from outside the window are not valid.

    Attributes:
        top: top edge of the crop window in pixels.
        left: left edge of the crop window in pixels.
        height: height of the crop window, and of the view.
        width: width of the crop window, and of the view.
        flip: whether the window is flipped left to right.
        angle: degrees counter-clockwise on the displayed image.
        scale: factor; above 1 enlarges.

    >>> g = Transform(0, 0, 32, 64, flip=True)
    >>> g.on_locations(torch.tensor([[4.0, 4.0]])).tolist()
    [[60.0, 4.0]]
    """

    top: int
    left: int
    height: int
    width: int
    flip: bool = False
    angle: float = 0.0
    scale: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether it only moves values, without resampling."""
        return self.angle == 0 and self.scale == 1

    def on_map(self, x: Tensor, stride: int = 1, mode: Literal["bilinear", "nearest"] = "bilinear") -> Tensor:
        """(C, h, w) at a stride → the view's (C, h', w').

        Raises:
            ValueError: the window does not consist of whole cells.
        """
        top, left, height, width = self._window(stride)
        x = x[:, top : top + height, left : left + width]
        if self.flip:
            x = x.flip(2)
        if self.is_exact:
            return x
        dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.float32
        sampled = F.grid_sample(
            x[None].to(dtype),
            self._grid(height, width, x.device).to(dtype),
            mode=mode,
            padding_mode="zeros",
            align_corners=False,
        )[0]
        return sampled if x.is_floating_point() else sampled.round().to(x.dtype)

    def on_masks(self, masks: Tensor) -> Tensor:
        """(K, H, W) bool → the view's."""
        if self.is_exact:
            return self.on_map(masks)
        moved = masks.new_empty(len(masks), self.height, self.width)
        for start in range(0, len(masks), _MASKS_AT_ONCE):  # resampling needs floats: only of a few masks at a time
            some = masks[start : start + _MASKS_AT_ONCE].to(torch.uint8)
            moved[start : start + _MASKS_AT_ONCE] = self.on_map(some, mode="nearest")
        return moved

    def on_locations(self, locations: Tensor) -> Tensor:
        """(N, 2) x, y in pixels of the source → of the view."""
        x, y = locations[:, 0] - self.left, locations[:, 1] - self.top
        if self.flip:
            x = self.width - x
        if self.is_exact:
            return torch.stack([x, y], dim=1)
        u, v = x - self.width / 2, y - self.height / 2
        cos, sin = math.cos(math.radians(self.angle)), math.sin(math.radians(self.angle))
        return torch.stack(
            [
                self.scale * (cos * u + sin * v) + self.width / 2,
                self.scale * (-sin * u + cos * v) + self.height / 2,
            ],
            dim=1,
        )

    def valid(self, stride: int = 1, device: torch.device | None = None) -> Tensor:
        """(h', w') bool: which pixels of the view lie inside the window."""
        _, _, height, width = self._window(stride)
        if self.is_exact:
            return torch.ones(height, width, dtype=torch.bool, device=device)
        return (self._grid(height, width, device)[0].abs() <= 1).all(-1)

    def inverse(self) -> Transform:
        """The inverse element, where the window is the whole source."""
        if self.top or self.left:
            raise ValueError("a crop has no inverse")
        return Transform(
            0, 0, self.height, self.width, self.flip, self.angle if self.flip else -self.angle, 1 / self.scale
        )

    def then(self, other: Transform) -> Transform:
        """The element that equals this one followed by another; after resampling, the other must not crop."""
        if not self.is_exact and (other.top or other.left or (other.height, other.width) != (self.height, self.width)):
            raise ValueError("a crop of a resampled view is not one element")
        left = self.width - other.left - other.width if self.flip else other.left
        return Transform(
            self.top + other.top,
            self.left + left,
            other.height,
            other.width,
            self.flip != other.flip,
            other.angle + (-self.angle if other.flip else self.angle),
            self.scale * other.scale,
        )

    def _grid(self, height: int, width: int, device: torch.device | None) -> Tensor:
        """(1, h', w', 2): sampling locations in the flipped window, from −1 to 1."""
        cos, sin = math.cos(math.radians(self.angle)) / self.scale, math.sin(math.radians(self.angle)) / self.scale
        aspect = self.height / self.width
        theta = torch.tensor([[cos, -sin * aspect, 0], [sin / aspect, cos, 0]], device=device, dtype=torch.float32)
        with torch.autocast(theta.device.type, enabled=False):  # bfloat16 would be off by pixels
            return F.affine_grid(theta[None], [1, 1, height, width], align_corners=False)

    def _window(self, stride: int) -> tuple[int, int, int, int]:
        """Top, left, height and width in cells of a map."""
        window = self.top, self.left, self.height, self.width
        if any(v % stride for v in window):
            raise ValueError(f"the window {window} (top, left, height, width) is not on the grid of stride {stride}")
        top, left, height, width = (v // stride for v in window)
        return top, left, height, width


class RandomTransform(Settings):
    """G: a random policy that draws one element per image."""

    flip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    crop: tuple[Fraction, Fraction] | None = Field(
        (0.6, 1.0), description="smallest and largest fraction of each side that is kept; None: no crop"
    )
    rotate: tuple[float, float] | None = Field(None, description="smallest and largest angle in degrees")
    scale: tuple[PositiveFloat, PositiveFloat] | None = Field(None, description="smallest and largest factor")
    combine: Literal["compose", "choose"] = Field("compose", description="apply all of them, or choose one per image")

    @field_validator("crop", "rotate", "scale")
    @classmethod
    def _smaller_first(cls, limits: tuple[float, float] | None) -> tuple[float, float] | None:
        if limits is not None and limits[0] > limits[1]:
            raise ValueError("give the smaller value first")
        return limits

    def draw(
        self,
        sizes: Sequence[tuple[int, int]],
        generator: torch.Generator | None = None,
        image_generators: Generators = None,
    ) -> list[Transform]:
        """An element for each image of the given valid (height, width).

        Args:
            sizes: (height, width) of each image.
            generator: for the crop fraction, which all images share.
            image_generators: one per image for flip, position, angle and scale; by default `generator`.
        """
        fraction = self._uniform(self.crop, generator) if self.crop else 1.0
        generators = generator_per_image(image_generators or generator, len(sizes))
        return [self._draw_one(size, fraction, own) for size, own in zip(sizes, generators, strict=True)]

    def _draw_one(self, size: tuple[int, int], fraction: float, generator: torch.Generator | None) -> Transform:
        """An element; the identity for an image narrower than 32 pixels."""
        available = {"flip": self.flip > 0, "crop": self.crop, "rotate": self.rotate, "scale": self.scale}
        names = [name for name, setting in available.items() if setting] if min(size) >= SIZE_DIVISIBILITY else []
        if self.combine == "choose" and names:
            names = [names[int(self._uniform((0, len(names)), generator))]]
        kept = fraction if "crop" in names else 1.0
        (top, height), (left, width) = (self._side(side, kept, generator) for side in size)
        flip = "flip" in names and self._uniform((0, 1), generator) < self.flip
        angle = self._uniform(self.rotate, generator) if self.rotate and "rotate" in names else 0.0
        scale = self._uniform(self.scale, generator) if self.scale and "scale" in names else 1.0
        return Transform(top, left, height, width, flip, angle, scale)

    def _side(self, side: int, fraction: float, generator: torch.Generator | None) -> tuple[int, int]:
        """Start and length of the smallest window on the grid that keeps the fraction, inside the valid side."""
        whole = max(side // SIZE_DIVISIBILITY, 1)
        cells = min(math.ceil(fraction * side / SIZE_DIVISIBILITY), whole)
        start = int(self._uniform((0, whole - cells + 1), generator))
        return start * SIZE_DIVISIBILITY, cells * SIZE_DIVISIBILITY

    @staticmethod
    def _uniform(limits: tuple[float, float], generator: torch.Generator | None) -> float:
        low, high = limits
        return low + (high - low) * float(torch.rand((), generator=generator))
