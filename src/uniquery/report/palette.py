"""Colors for instances: far apart for the eye, the same on every run."""

from __future__ import annotations

import colorsys
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Color = tuple[int, int, int]

# sRGB (linear) to the cone space of OKLab, and from there to lightness and two opponent axes (Ottosson, 2020).
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
_DISTINCT = 48  # beyond this many, colors repeat: no eye tells more apart


def color(index: int) -> Color:
    """The color of the index-th thing: each is as far as can be from all before it.

    >>> color(0)
    (230, 46, 46)
    >>> color(0) == color(48)
    True
    """
    return _farthest_first()[index % _DISTINCT]


def ink_on(background: Color) -> Color:
    """Black or white, whichever reads better.

    >>> ink_on((255, 240, 0)), ink_on((0, 0, 160))
    ((0, 0, 0), (255, 255, 255))
    """
    lightness = _oklab(np.array([background]))[0, 0]
    return (0, 0, 0) if lightness > 0.62 else (255, 255, 255)


@lru_cache(maxsize=1)
def _farthest_first() -> tuple[Color, ...]:
    """Starting from a red, always the candidate that is farthest from everything taken."""
    shades = [(0.8, 0.9), (0.9, 1.0), (0.5, 1.0), (0.9, 0.62)]
    candidates = np.array(
        [[round(255 * c) for c in colorsys.hsv_to_rgb(hue / 36, s, v)] for s, v in shades for hue in range(36)]
    )
    lab = _oklab(candidates)
    taken = [0]
    nearest = np.linalg.norm(lab - lab[0], axis=1)
    while len(taken) < _DISTINCT:
        taken.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, np.linalg.norm(lab - lab[taken[-1]], axis=1))
    return tuple((int(r), int(g), int(b)) for r, g, b in candidates[taken])


def _oklab(rgb: npt.NDArray[np.int_]) -> npt.NDArray[np.float64]:
    """(N, 3) of 0..255 to OKLab, where distance is how different two colors look."""
    linear = (rgb / 255.0) ** 2.2
    lab: npt.NDArray[np.float64] = np.cbrt(linear @ _TO_CONES.T) @ _TO_LAB.T
    return lab
