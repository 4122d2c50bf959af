"""Draws the objects and backgrounds of scenes, with the same bits on every machine.

Only + − × ÷ √ floor and comparisons are used, which IEEE 754 rounds in the same way everywhere, and random numbers of
`Generator.random`: sin, exp and BLAS may differ in the last bit between processors. Arrays are float32 and scalars
Python floats, which NumPy 1 and 2 combine in the same way. The letters u, v are coordinates in an object's own frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]  # always float32; to the type stubs a Python float makes it float64
Floats = tuple[float, ...]
Rng = np.random.Generator

CLASS_NAMES = ("disc", "box", "triangle", "star", "ring", "crescent", "cross", "blob")
STUFF_NAMES = ("grass", "sand", "water", "rock")
_STUFF = {  # kind of pattern, and its two colors
    "grass": (0.55, ((0.16, 0.34, 0.12), (0.34, 0.5, 0.2))),
    "sand": (0.4, ((0.6, 0.5, 0.34), (0.42, 0.34, 0.24))),
    "water": (0.7, ((0.14, 0.28, 0.46), (0.3, 0.46, 0.6))),
    "rock": (0.2, ((0.4, 0.38, 0.38), (0.24, 0.22, 0.24))),
}
_VOID_SHARE = 0.2  # how many parts of a background of stuff are void, on average


@dataclass(frozen=True)
class SceneObject:
    """One object to draw.

    Attributes:
        label: its class, an index in `CLASS_NAMES`.
        appearance: equal for objects that share colors and texture.
        radius: radius in pixels.
        axis: unit vector of its orientation.
        shape: eight numbers in 0..1 that vary its shape.
        texture: eight numbers in 0..1 that choose its texture and shading.
        colors: (2, 3) RGB in 0..1.
    """

    label: int
    appearance: int
    radius: float
    axis: tuple[float, float]
    shape: Floats
    texture: Floats
    colors: Array


def shape(obj: SceneObject) -> tuple[int, int, Array, Array, Array]:
    """A window around the object: its left and top from the center, the implicit function (< 0 inside), u and v."""
    half = int(1.4 * obj.radius) + 2
    x = np.arange(-half, half + 1, dtype=np.float32)
    y = x[:, None]
    (c, s), t = obj.axis, obj.shape
    u = (c * x + s * y) / obj.radius
    v = (c * y - s * x) / (obj.radius * (0.6 + 0.4 * t[0]))
    u, v = u + 0.07 * t[1] * _wave(0.6 * v + t[2]), v + 0.07 * t[3] * _wave(0.6 * u + t[4])
    values = _implicit(CLASS_NAMES[obj.label], u, v, t[5:])
    inside = values < 0
    rows, columns = (np.flatnonzero(np.any(inside, axis=axis)) for axis in (1, 0))
    margin = 3 + int(0.08 * obj.radius)  # for the shadow
    top, left = max(0, int(rows[0]) - margin), max(0, int(columns[0]) - margin)
    window = slice(top, int(rows[-1]) + margin + 1), slice(left, int(columns[-1]) + margin + 1)
    return left - half, top - half, values[window], u[window], v[window]


def edge(values: Array) -> tuple[Array, Array, Array]:
    """The signed distance to the outline in pixels (to first order), and the outward normal's x and y."""
    dy, dx = np.gradient(values)
    slope = np.sqrt(dx * dx + dy * dy) + 1e-9
    return values / slope, dx / slope, dy / slope


def paint(canvas: Array, obj: SceneObject, geometry: list[Array], light: tuple[float, float], lattice: Array) -> Array:
    """`canvas` (3, h, w) with the object over it: pattern, light, bevel, gloss, outline, and a soft shadow around.

    `geometry` is the distance to the outline, the normal's x and y, u and v, each (h, w).
    """
    distance, normal_x, normal_y, u, v = geometry
    kind, scale, shift, rim, depth, gloss, ink, slant = obj.texture
    period, (c, s), (lx, ly) = max(0.35 + 0.5 * scale, 4 / obj.radius), obj.axis, light
    a, b = (u + slant * v) / period + 7 * shift, (v - slant * u) / period + 5 * shift
    pattern = _pattern(kind, a, b, lattice)
    du, dv = c * lx + s * ly, c * ly - s * lx  # the light in the object's own coordinates
    bevel = np.clip(1 + distance / (1.5 + 0.15 * obj.radius), 0, 1) * (normal_x * lx + normal_y * ly)
    shade = 0.95 + 0.25 * (u * du + v * dv) + (0.1 + 0.4 * depth) * bevel
    spot = np.clip(1 - 6 * ((u - 0.4 * du) * (u - 0.4 * du) + (v - 0.4 * dv) * (v - 0.4 * dv)), 0, 1)
    line = np.clip(1.5 + 0.03 * obj.radius + distance, 0, 1) * (0.3 + 0.6 * rim)
    ground, marks = obj.colors[:, :, None, None]  # (3, 1, 1) each
    color = _mix(ground, marks, pattern) * shade + 0.5 * gloss * spot * spot
    color = np.clip(_mix(color, 0.15 * ground + 0.9 * (ink > 0.8), line), 0, 1)
    shadow = 1 - 0.4 * np.clip(1 - distance / (2 + 0.08 * obj.radius), 0, 1)
    return _mix(canvas * shadow, color, np.clip(0.5 - distance, 0, 1))


def background(rng: Rng, side: int, lattice: Array) -> Array:
    """(3, H, W): two dull colors, blended by a gradient and smooth noise, with a faint pattern."""
    x = np.arange(side, dtype=np.float32) / side
    y = x[:, None]
    (c, s), p = direction(rng), [rng.random() for _ in range(6)]
    blend = 0.5 + (c * (x - 0.5) + s * (y - 0.5)) * 2 * p[0]
    for cells in (3, 9):
        blend = blend + (_noise(lattice, cells * x + 9 * p[1], cells * y + cells) - 0.5) * 3 / cells
    first, second = (random_color(rng, 0.0, 0.45)[:, None, None] * (0.4 + 0.5 * p[2]) for _ in range(2))
    a, b = ((8 + 24 * p[3]) * along + 0.4 * blend for along in (c * x + s * y, c * y - s * x))
    pattern = _pattern(p[4], a, b, lattice)
    return _mix(first, second, np.clip(blend, 0, 1)) + 0.2 * p[5] * (pattern - 0.5)


def stuff_background(rng: Rng, side: int, lattice: Array) -> tuple[Array, npt.NDArray[np.int64]]:
    """(3, H, W), and the (H, W) index in `STUFF_NAMES` of each pixel, −1 for void: three to five parts of stuff.

    Each part is nearest to its center, in coordinates that smooth noise distorts. Void looks like `background`.
    """
    pixels, labels = background(rng, side, lattice), np.full((side, side), -1, dtype=np.int64)
    x = np.arange(side, dtype=np.float32) / side
    y = x[:, None]
    u, v = (a + 0.3 * (_noise(lattice, 4 * x + 9 * rng.random(), 4 * y + 9 * rng.random()) - 0.5) for a in (x, y))
    nearest, void = np.full((side, side), 9, dtype=np.float32), pixels
    for part in range(3 + int(3 * rng.random())):
        du, dv = u - rng.random(), v - rng.random()
        label, is_void = int(rng.random() * len(STUFF_NAMES)), rng.random() < _VOID_SHARE and part > 0
        texture = void if is_void else _stuff_texture(rng, STUFF_NAMES[label], x, y, lattice)
        distance = du * du + dv * dv
        closer = distance < nearest
        nearest, pixels = np.where(closer, distance, nearest), np.where(closer, texture, pixels)
        labels[closer] = -1 if is_void else label
    return pixels, labels


def _stuff_texture(rng: Rng, name: str, x: Array, y: Array, lattice: Array) -> Array:
    """(3, H, W): the pattern of a kind of stuff, in another brightness, scale and direction each time."""
    (c, s), scale, light = direction(rng), 10 + 8 * rng.random(), 0.7 + 0.6 * rng.random()
    kind, colors = _STUFF[name]
    first, second = (light * np.array(rgb, dtype=np.float32)[:, None, None] for rgb in colors)
    return _mix(first, second, _pattern(kind, scale * (c * x + s * y), scale * (c * y - s * x), lattice))


def _mix(first: Array, second: Array, weight: Array) -> Array:
    return first + (second - first) * weight


def direction(rng: Rng) -> tuple[float, float]:
    """A random unit vector, uniform in angle, without sine and cosine."""
    while True:
        x, y = 2 * rng.random() - 1, 2 * rng.random() - 1
        square = x * x + y * y
        if 0.01 < square <= 1:
            return x / math.sqrt(square), y / math.sqrt(square)


def random_color(rng: Rng, saturation_from: float, saturation_to: float) -> Array:
    """(3,) RGB in 0..1 of a random hue, bright enough to be visible."""
    hue, value = 6 * rng.random(), 0.45 + 0.55 * rng.random()
    saturation = saturation_from + (saturation_to - saturation_from) * rng.random()
    channels = np.array([hue, hue + 4, hue + 2], dtype=np.float32)
    channels = channels - 6 * np.floor(channels / 6)
    color: Array = value * (1 - saturation * (1 - np.clip(np.abs(channels - 3) - 1, 0, 1)))
    return color


def _wave(t: Array) -> Array:
    """Close to a sine of period 1, made of parabolas."""
    t = t - np.floor(t) - 0.5
    height: Array = 8 * t * (1 - 2 * np.abs(t))
    return height


def _noise(lattice: Array, x: Array, y: Array) -> Array:
    """Smooth noise in 0..1 whose bumps are one unit wide."""
    left, top = np.floor(x), np.floor(y)
    fx, fy = x - left, y - top
    fx, fy = fx * fx * (3 - 2 * fx), fy * fy * (3 - 2 * fy)
    i, j = top.astype(np.intp) & 31, left.astype(np.intp) & 31
    corners = (lattice.take(((i + di) & 31) * 32 + ((j + dj) & 31)) for di in (0, 1) for dj in (0, 1))
    north_west, north_east, south_west, south_east = corners
    return _mix(_mix(north_west, north_east, fx), _mix(south_west, south_east, fx), fy)


def _length(x: Array, y: Array) -> Array:
    return np.sqrt(x * x + y * y)


def _pattern(kind: float, a: Array, b: Array, lattice: Array) -> Array:
    """A texture in 0..1 of period 1 in a and b; `kind` in 0..1 selects it."""
    texture: Array
    match int(6 * kind):
        case 0:
            texture = 2 * _wave(a)  # stripes
        case 1:
            texture = 3 * _wave(a / 2) * _wave(b / 2)  # checks
        case 2:
            texture = 1.5 * (_wave(a) + _wave(b)) - 2.5  # dots
        case 3:
            texture = 4 * _noise(lattice, 2 * a, 2 * b) - 2  # patches
        case 4:
            texture = 2 * _wave(_length(a, b))  # ripples
        case _:
            texture = np.full_like(a, -0.5)  # plain
    return np.clip(texture + 0.5, 0, 1)


def _implicit(name: str, u: Array, v: Array, t: Floats) -> Array:
    """Negative inside the shape of a class, of a radius about 1; `t` in 0..1 varies the shape."""
    values: Array
    match name:
        case "disc":
            values = _length(u, v) - 1
        case "box":
            values = _box(u, v, 0.05 + 0.25 * t[0])
        case "triangle":
            values = np.maximum(0.866025 * np.abs(u) - 0.5 * v, v) - 0.6
        case "star":
            values = _star(u, v, 0.5 + 0.15 * t[0])
        case "ring":
            values = np.maximum(_length(u, v) - 1.05, 0.4 + 0.2 * t[0] - _length(u, v))
        case "crescent":
            values = np.maximum(_length(u, v) - 1.1, 0.85 - _length(u - 0.5 - 0.15 * t[0], v))
        case "cross":
            narrow, wide = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
            values = np.maximum(narrow - 0.3 - 0.12 * t[0], wide - 1.1)
        case _:
            values = _blob(u, v, t)
    return values


def _box(u: Array, v: Array, corner: float) -> Array:
    a, b = np.abs(u) - (0.9 - corner), np.abs(v) - (0.9 - corner)
    return _length(np.maximum(a, 0), np.maximum(b, 0)) + np.minimum(np.maximum(a, b), 0) - corner


def _star(u: Array, v: Array, notch: float, tip: float = 1.25) -> Array:
    """Mirrored into a tenth of the plane, where the outline is one line from tip to notch."""
    u = np.abs(u)
    for cos, sin in ((-0.309017, 0.951057), (0.809017, 0.587785)):  # mirrors at 108° and 36° from the tip
        beyond = np.maximum(u * cos - v * sin, 0)
        u, v = u - 2 * beyond * cos, v + 2 * beyond * sin
    return np.abs(u) * (tip - notch * 0.809017) + (v - tip) * notch * 0.587785


def _blob(u: Array, v: Array, t: Floats) -> Array:
    """Three lobes that merge into one another."""
    pull = np.zeros_like(u)
    for x, y in ((0.6, 0.2 * t[0]), (-0.5, 0.55), (-0.2 - 0.3 * t[1], -0.6)):
        pull = pull + 0.17 / ((u - x) * (u - x) + (v - y) * (v - y) + 0.02)
    return 1 - pull
