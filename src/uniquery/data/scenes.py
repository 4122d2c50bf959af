"""Drawn scenes: a small COCO data set without a download, the same pixels on every machine for a given seed.

Crowds of overlapping things. The class is the shape; paint varies from thing to thing, and some things share it, so
that appearance alone does not tell them apart. Later things hide earlier ones; a mask is what stays visible.

All is made of + − × ÷ √ floor and comparisons, which IEEE 754 rounds alike everywhere, and of random numbers from
`Generator.random`: sin, exp and BLAS may differ in the last bit between processors. Arrays are float32 and scalars
Python floats, which NumPy 1 and 2 combine alike. The letters u, v are a thing's own coordinates.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from uniquery import rle
from uniquery.errors import DataError

Array = npt.NDArray[np.floating[Any]]  # float32 in fact; the stubs take a Python float for a float64
Floats = tuple[float, ...]
Rng = np.random.Generator

CLASS_NAMES = ("disc", "box", "triangle", "star", "ring", "crescent", "cross", "blob")
SPLITS = ("train", "val")
_DRAWING = 1  # raise it when the pictures change: a folder drawn by older code is then refused instead of reused
_MIN_PIXELS, _MIN_SHARE = 20, 0.25  # of each thing at least this stays visible


class ScenesConfig(BaseModel):
    """The knobs of the drawn data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train_images: int = Field(400, ge=1, le=999_999, description="Images of the training split.")
    val_images: int = Field(100, ge=1, le=999_999, description="Images of the validation split.")
    size: int = Field(192, ge=64, le=1024, description="Side of the square images in pixels; things grow with it.")
    classes: int = Field(
        6, ge=1, le=len(CLASS_NAMES), description=f"How many of these occur: {', '.join(CLASS_NAMES)}."
    )
    crowding: float = Field(10.0, ge=1, le=60, description="Things per image on average; a full one takes fewer.")
    lookalikes: float = Field(0.3, ge=0, le=1, description="Share of things that copy another's class and paint.")
    occlusion: float = Field(0.5, ge=0, le=1, description="0: things touch at most; 1: up to 3/4 may be hidden.")
    seed: int = Field(0, ge=0, description="Every picture follows from it.")


@dataclass(frozen=True)
class Scene:
    """One drawn picture with K things.

    Attributes:
        image: (H, W, 3) uint8 RGB.
        masks: (K, H, W) bool, disjoint and not empty: the visible part of each thing.
        labels: (K,) int64, indices in `CLASS_NAMES`.
        looks: (K,) int64, equal for things that share their paint.
    """

    image: npt.NDArray[np.uint8]
    masks: npt.NDArray[np.bool_]
    labels: npt.NDArray[np.int64]
    looks: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SceneFiles:
    """Where a drawn data set lies."""

    root: Path

    def images(self, split: str) -> Path:
        """The folder of a split's pictures."""
        return self.root / "images" / split

    def annotations(self, split: str) -> Path:
        """The COCO file of a split."""
        return self.root / "annotations" / f"{split}.json"


@dataclass
class _Sheet:
    """A scene in the making: `spare` says how many pixels each thing may still lose."""

    pixels: Array  # (3, H, W)
    owner: npt.NDArray[np.int64]  # (H, W), −1 for the background
    lattice: Array  # (32, 32), the source of all smooth noise
    light: tuple[float, float]
    spots: list[tuple[int, int, float]] = field(default_factory=list)  # x, y, radius
    spare: list[float] = field(default_factory=list)


def draw_scene(rng: Rng, config: ScenesConfig) -> Scene:
    """One scene; the seed and the numbers of images in `config` play no part.

    >>> scene = draw_scene(np.random.default_rng(0), ScenesConfig(size=64, crowding=3))
    >>> scene.image.shape, len(scene.masks) == len(scene.labels)
    ((64, 64, 3), True)
    """
    lattice, side = rng.random((32, 32)).astype(np.float32), config.size
    owner = np.full((side, side), -1, dtype=np.int64)
    sheet = _Sheet(_background(rng, side, lattice), owner, lattice, _direction(rng))
    things = [placed for thing in _plan(rng, config) if (placed := _place(rng, sheet, thing, config.occlusion))]
    grain = (rng.random((side, side)).astype(np.float32) - 0.5) * 0.03
    image = (np.clip(sheet.pixels + grain, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    masks = owner == np.arange(len(things))[:, None, None]
    labels = np.array([thing.label for thing in things], dtype=np.int64)
    looks = np.array([thing.look for thing in things], dtype=np.int64)
    return Scene(np.ascontiguousarray(image), masks, labels, looks)


def _plan(rng: Rng, config: ScenesConfig) -> list[_Thing]:
    """The things wished for, larger ones mostly first, so that they do not bury the small ones."""
    smallest, largest = _smallest(config.size), 0.45 * config.size
    things: list[_Thing] = []
    for _ in range(max(1, int(config.crowding * (0.5 + rng.random()) + 0.5))):
        if things and rng.random() < config.lookalikes:
            things.append(_copy(rng, things[int(rng.random() * len(things))], smallest))
            continue
        share, label = rng.random(), int(rng.random() * config.classes)
        radius = smallest + (largest - smallest) * share * share
        traits, paint = (tuple(rng.random(8).tolist()) for _ in range(2))
        colours = np.stack([_colour(rng, 0.4, 1.0), _colour(rng, 0.2, 1.0)])
        things.append(_Thing(label, len(things), radius, _direction(rng), traits, paint, colours))
    return sorted(things, key=lambda thing: -thing.radius * (0.5 + rng.random()))


def _smallest(side: int) -> float:
    """The least radius at which a shape of an image of this side is still told from the others."""
    return max(6.0, 0.05 * side)


def _copy(rng: Rng, model: _Thing, smallest: float) -> _Thing:
    """A look-alike: the same class and paint, all slightly varied, turned at will."""
    radius = max(smallest, model.radius * (0.8 + 0.4 * rng.random()))
    colours = np.clip(model.colours + 0.05 * (rng.random((2, 3)).astype(np.float32) - 0.5), 0, 1)
    traits = tuple(min(max(trait + 0.2 * (rng.random() - 0.5), 0.0), 1.0) for trait in model.traits)
    return replace(model, radius=radius, axis=_direction(rng), colours=colours, traits=traits)


def _place(rng: Rng, sheet: _Sheet, thing: _Thing, occlusion: float) -> _Thing | None:
    """Draw the thing where it hides no older one too much, smaller if need be; None if there is no such place."""
    side = len(sheet.owner)
    for _ in range(6):
        left, top, values, u, v = _shape(thing)
        inside = values < 0
        whole = np.count_nonzero(inside)
        for _ in range(8):
            x, y = _spot(rng, sheet, thing.radius, occlusion)
            rows, window_rows = _overlap(y + top, values.shape[0], side)
            columns, window_columns = _overlap(x + left, values.shape[1], side)
            owner, new = sheet.owner[rows, columns], inside[window_rows, window_columns]
            lost = np.bincount(owner[new] + 1, minlength=len(sheet.spots) + 1)[1:]
            area = np.count_nonzero(new)
            if area < max(_MIN_PIXELS, 0.6 * whole) or np.any(lost > sheet.spare):
                continue
            owner[new] = len(sheet.spots)
            must_stay = max(_MIN_PIXELS, _MIN_SHARE * whole, (1 - (1 - _MIN_SHARE) * occlusion) * area)
            sheet.spare = [*(np.array(sheet.spare) - lost).tolist(), area - must_stay]
            sheet.spots.append((x, y, thing.radius))
            under = sheet.pixels[:, rows, columns]
            parts = [part[window_rows, window_columns] for part in (*_edge(values), u, v)]
            under[:] = _paint(under, thing, parts, sheet.light, sheet.lattice)
            return thing
        thing = replace(thing, radius=max(_smallest(side), 0.8 * thing.radius))
    return None


def _overlap(start: int, length: int, side: int) -> tuple[slice, slice]:
    """Which pixels of the image a window covers, and which of its own they are.

    >>> _overlap(-2, 5, 192)
    (slice(0, 3, None), slice(2, 5, None))
    """
    first, last = max(0, start), min(side, start + length)
    return slice(first, last), slice(first - start, last - start)


def _spot(rng: Rng, sheet: _Sheet, radius: float, occlusion: float) -> tuple[int, int]:
    """A centre, mostly beside an older thing: crowds touch and overlap."""
    side = len(sheet.owner)
    x, y = side * rng.random(), side * rng.random()
    if sheet.spots and rng.random() < 0.6:
        x, y, other = sheet.spots[int(rng.random() * len(sheet.spots))]
        reach = (radius + other) * (1 - 0.6 * occlusion * rng.random())
        dx, dy = _direction(rng)
        x, y = x + reach * dx, y + reach * dy
    margin = min(0.75 * radius, 0.5 * side)
    return int(min(max(x, margin), side - 1 - margin)), int(min(max(y, margin), side - 1 - margin))


def make_scenes(root: Path, config: ScenesConfig, progress: Callable[[int, int], None] | None = None) -> SceneFiles:
    """Draw both splits below `root`, all or nothing; a folder that already holds exactly this data is reused.

    Args:
        root: the folder to make, with `images/<split>/000001.png …` and `annotations/<split>.json`.
        config: the knobs; a picture follows from the seed, its split and its number, not from how many there are.
        progress: called after each picture with how many are done and how many there will be.

    Raises:
        DataError: `root` holds something else, or cannot be written.
    """
    files = SceneFiles(root)
    partial = SceneFiles(root.parent / f".{root.name}.{uuid.uuid4().hex}.partial")
    try:
        if root.exists() and not (root.is_dir() and not any(root.iterdir())):
            if fault := _fault(files, config):
                raise DataError(f"{root} does not hold these scenes: {fault}; remove it or choose another folder.")
            return files
        done = 0
        for split in SPLITS:
            for _ in _write_split(partial, split, config):
                done += 1
                if progress:
                    progress(done, config.train_images + config.val_images)
        partial.root.rename(root)
    except OSError as error:
        if _fault(files, config):  # without a fault, another process has just finished the same work
            reason = error.strerror or error
            raise DataError(f"Cannot write scenes to {root} ({reason}); choose another folder.") from error
    finally:
        shutil.rmtree(partial.root, ignore_errors=True)
    return files


def _write_split(files: SceneFiles, split: str, config: ScenesConfig) -> Iterator[int]:
    """Write the pictures, handing out each one's number, and then the annotations."""
    files.images(split).mkdir(parents=True)
    files.annotations(split).parent.mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(1, _count(split, config) + 1):
        key = np.random.SeedSequence([config.seed, SPLITS.index(split), number])
        scene, name = draw_scene(np.random.Generator(np.random.PCG64(key)), config), f"{number:06d}.png"
        Image.fromarray(scene.image).save(files.images(split) / name, compress_level=1)
        images.append({"id": number, "file_name": name, "width": config.size, "height": config.size})
        for label, mask in zip(scene.labels.tolist(), scene.masks, strict=True):
            annotations.append(_annotation(len(annotations) + 1, number, label, mask))
        yield number
    categories = [{"id": i, "name": name} for i, name in enumerate(CLASS_NAMES[: config.classes], start=1)]
    content = {"info": _info(config), "images": images, "annotations": annotations, "categories": categories}
    with files.annotations(split).open("w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _annotation(number: int, image: int, label: int, mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
    encoded = rle.encode(mask)
    what = {"id": number, "image_id": image, "category_id": label + 1, "iscrowd": 0}
    return what | {"area": rle.area(encoded), "bbox": list(rle.bounding_box(encoded)), "segmentation": encoded}


def _info(config: ScenesConfig) -> dict[str, Any]:
    return {"description": "Scenes drawn by uniquery", "drawing": _DRAWING, "config": config.model_dump()}


def _count(split: str, config: ScenesConfig) -> int:
    return config.train_images if split == "train" else config.val_images


def _fault(files: SceneFiles, config: ScenesConfig) -> str:
    """What keeps a folder from being exactly this data set, as a part of a sentence; empty if nothing does."""
    for split in SPLITS:
        try:
            content = json.loads(files.annotations(split).read_text(encoding="utf-8"))
            info, names = content["info"], [image["file_name"] for image in content["images"]]
            there = {path.name for path in files.images(split).glob("*.png") if path.stat().st_size}
        except (OSError, ValueError, KeyError, TypeError):
            return f"annotations/{split}.json is missing or was not drawn by us"
        if info != _info(config):
            return _difference(info, config)
        if len(names) != _count(split, config) or not there.issuperset(names):
            return f"some of the {_count(split, config)} images of images/{split} are missing"
    return ""


def _difference(info: Any, config: ScenesConfig) -> str:
    old = info.get("config") if isinstance(info, dict) else None
    old, new = old if isinstance(old, dict) else {}, config.model_dump()
    changed = [f"{knob} is {old[knob]}, not {new[knob]}" for knob in new if knob in old and old[knob] != new[knob]]
    return ", ".join(changed) or "another version drew it"


@dataclass(frozen=True)
class _Thing:
    """What to draw; eight `traits` in 0..1 deform it, eight `paint` in 0..1 and `colours` (2, 3) dress it."""

    label: int
    look: int
    radius: float
    axis: tuple[float, float]
    traits: Floats
    paint: Floats
    colours: Array


def _shape(thing: _Thing) -> tuple[int, int, Array, Array, Array]:
    """A window around the thing: its left and top from the centre, the implicit function (< 0 inside), u and v."""
    half = int(1.4 * thing.radius) + 2
    x = np.arange(-half, half + 1, dtype=np.float32)
    y = x[:, None]
    (c, s), t = thing.axis, thing.traits
    u = (c * x + s * y) / thing.radius
    v = (c * y - s * x) / (thing.radius * (0.6 + 0.4 * t[0]))
    u, v = u + 0.07 * t[1] * _wave(0.6 * v + t[2]), v + 0.07 * t[3] * _wave(0.6 * u + t[4])
    values = _implicit(CLASS_NAMES[thing.label], u, v, t[5:])
    inside = values < 0
    rows, columns = (np.flatnonzero(np.any(inside, axis=axis)) for axis in (1, 0))
    margin = 3 + int(0.08 * thing.radius)  # for the shadow
    top, left = max(0, int(rows[0]) - margin), max(0, int(columns[0]) - margin)
    cut = slice(top, int(rows[-1]) + margin + 1), slice(left, int(columns[-1]) + margin + 1)
    return left - half, top - half, values[cut], u[cut], v[cut]


def _edge(values: Array) -> tuple[Array, Array, Array]:
    """The signed distance to the outline in pixels (to first order), and the outward normal's x and y."""
    dy, dx = np.gradient(values)
    slope = np.sqrt(dx * dx + dy * dy) + 1e-9
    return values / slope, dx / slope, dy / slope


def _paint(under: Array, thing: _Thing, parts: list[Array], light: tuple[float, float], lattice: Array) -> Array:
    """`under` (3, h, w) with the thing over it: pattern, light, bevel, gloss, outline, and a soft shadow around."""
    distance, normal_x, normal_y, u, v = parts
    kind, scale, shift, rim, depth, gloss, ink, slant = thing.paint
    period, (c, s), (lx, ly) = max(0.35 + 0.5 * scale, 4 / thing.radius), thing.axis, light
    a, b = (u + slant * v) / period + 7 * shift, (v - slant * u) / period + 5 * shift
    pattern = _pattern(kind, a, b, lattice)
    du, dv = c * lx + s * ly, c * ly - s * lx  # the light in the thing's own coordinates
    bevel = np.clip(1 + distance / (1.5 + 0.15 * thing.radius), 0, 1) * (normal_x * lx + normal_y * ly)
    shade = 0.95 + 0.25 * (u * du + v * dv) + (0.1 + 0.4 * depth) * bevel
    spot = np.clip(1 - 6 * ((u - 0.4 * du) * (u - 0.4 * du) + (v - 0.4 * dv) * (v - 0.4 * dv)), 0, 1)
    line = np.clip(1.5 + 0.03 * thing.radius + distance, 0, 1) * (0.3 + 0.6 * rim)
    ground, marks = thing.colours[:, :, None, None]  # (3, 1, 1) each
    colour = _mix(ground, marks, pattern) * shade + 0.5 * gloss * spot * spot
    colour = np.clip(_mix(colour, 0.15 * ground + 0.9 * (ink > 0.8), line), 0, 1)
    shadow = 1 - 0.4 * np.clip(1 - distance / (2 + 0.08 * thing.radius), 0, 1)
    return _mix(under * shadow, colour, np.clip(0.5 - distance, 0, 1))


def _background(rng: Rng, side: int, lattice: Array) -> Array:
    """(3, H, W): two dull colours, blended by a gradient and smooth noise, under a faint pattern."""
    x = np.arange(side, dtype=np.float32) / side
    y = x[:, None]
    (c, s), p = _direction(rng), [rng.random() for _ in range(6)]
    blend = 0.5 + (c * (x - 0.5) + s * (y - 0.5)) * 2 * p[0]
    for cells in (3, 9):
        blend = blend + (_noise(lattice, cells * x + 9 * p[1], cells * y + cells) - 0.5) * 3 / cells
    first, second = (_colour(rng, 0.0, 0.45)[:, None, None] * (0.4 + 0.5 * p[2]) for _ in range(2))
    a, b = ((8 + 24 * p[3]) * along + 0.4 * blend for along in (c * x + s * y, c * y - s * x))
    pattern = _pattern(p[4], a, b, lattice)
    return _mix(first, second, np.clip(blend, 0, 1)) + 0.2 * p[5] * (pattern - 0.5)


def _mix(first: Array, second: Array, share: Array) -> Array:
    return first + (second - first) * share


def _direction(rng: Rng) -> tuple[float, float]:
    """A unit vector, uniform in angle, without sine and cosine."""
    while True:
        x, y = 2 * rng.random() - 1, 2 * rng.random() - 1
        square = x * x + y * y
        if 0.01 < square <= 1:
            return x / math.sqrt(square), y / math.sqrt(square)


def _colour(rng: Rng, saturation_from: float, saturation_to: float) -> Array:
    """(3,) RGB in 0..1 of a random hue, bright enough to be seen."""
    hue, value = 6 * rng.random(), 0.45 + 0.55 * rng.random()
    saturation = saturation_from + (saturation_to - saturation_from) * rng.random()
    turned = np.array([hue, hue + 4, hue + 2], dtype=np.float32)
    turned = turned - 6 * np.floor(turned / 6)
    colour: Array = value * (1 - saturation * (1 - np.clip(np.abs(turned - 3) - 1, 0, 1)))
    return colour


def _wave(t: Array) -> Array:
    """A sine of period 1 in effect, made of parabolas."""
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
    """A texture in 0..1 of period 1 in a and b; `kind` in 0..1 picks it."""
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
    """Negative inside the shape of a class, of a radius about 1; `t` in 0..1 gives it character."""
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
    """Folded by its mirrors into a tenth, where the outline is one line from tip to notch."""
    u = np.abs(u)
    for cos, sin in ((-0.309017, 0.951057), (0.809017, 0.587785)):  # mirrors at 108° and 36° from the tip
        beyond = np.maximum(u * cos - v * sin, 0)
        u, v = u - 2 * beyond * cos, v + 2 * beyond * sin
    return np.abs(u) * (tip - notch * 0.809017) + (v - tip) * notch * 0.587785


def _blob(u: Array, v: Array, t: Floats) -> Array:
    """Three lobes that melt into one another."""
    pull = np.zeros_like(u)
    for x, y in ((0.6, 0.2 * t[0]), (-0.5, 0.55), (-0.2 - 0.3 * t[1], -0.6)):
        pull = pull + 0.17 / ((u - x) * (u - x) + (v - y) * (v - y) + 0.02)
    return 1 - pull
