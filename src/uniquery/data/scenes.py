"""Drawn scenes: a small COCO data set without a download, the same pixels on every machine for a given seed.

Crowds of overlapping things. The class is the shape; paint varies from thing to thing, and some things share it, so
that appearance alone does not tell them apart. Later things hide earlier ones; a mask is what stays visible.
"""

from __future__ import annotations

import json
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

from uniquery.data.drawing import (
    CLASS_NAMES,
    Array,
    Rng,
    Thing,
    background,
    direction,
    edge,
    paint,
    random_color,
    shape,
)
from uniquery.errors import DataError
from uniquery.masks import rle

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
    sheet = _Sheet(background(rng, side, lattice), owner, lattice, direction(rng))
    things = [placed for thing in _plan(rng, config) if (placed := _place(rng, sheet, thing, config.occlusion))]
    grain = (rng.random((side, side)).astype(np.float32) - 0.5) * 0.03
    image = (np.clip(sheet.pixels + grain, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    masks = owner == np.arange(len(things))[:, None, None]
    labels = np.array([thing.label for thing in things], dtype=np.int64)
    looks = np.array([thing.look for thing in things], dtype=np.int64)
    return Scene(np.ascontiguousarray(image), masks, labels, looks)


def _plan(rng: Rng, config: ScenesConfig) -> list[Thing]:
    """The things wished for, larger ones mostly first, so that they do not bury the small ones."""
    smallest, largest = _smallest(config.size), 0.45 * config.size
    things: list[Thing] = []
    for _ in range(max(1, int(config.crowding * (0.5 + rng.random()) + 0.5))):
        if things and rng.random() < config.lookalikes:
            things.append(_copy(rng, things[int(rng.random() * len(things))], smallest))
            continue
        share, label = rng.random(), int(rng.random() * config.classes)
        radius = smallest + (largest - smallest) * share * share
        traits, paint = (tuple(rng.random(8).tolist()) for _ in range(2))
        colors = np.stack([random_color(rng, 0.4, 1.0), random_color(rng, 0.2, 1.0)])
        things.append(Thing(label, len(things), radius, direction(rng), traits, paint, colors))
    return sorted(things, key=lambda thing: -thing.radius * (0.5 + rng.random()))


def _smallest(side: int) -> float:
    """The least radius at which a shape of an image of this side is still told from the others."""
    return max(6.0, 0.05 * side)


def _copy(rng: Rng, model: Thing, smallest: float) -> Thing:
    """A look-alike: the same class and paint, all slightly varied, turned at will."""
    radius = max(smallest, model.radius * (0.8 + 0.4 * rng.random()))
    colors = np.clip(model.colors + 0.05 * (rng.random((2, 3)).astype(np.float32) - 0.5), 0, 1)
    traits = tuple(min(max(trait + 0.2 * (rng.random() - 0.5), 0.0), 1.0) for trait in model.traits)
    return replace(model, radius=radius, axis=direction(rng), colors=colors, traits=traits)


def _place(rng: Rng, sheet: _Sheet, thing: Thing, occlusion: float) -> Thing | None:
    """Draw the thing where it hides no older one too much, smaller if need be; None if there is no such place."""
    side = len(sheet.owner)
    for _ in range(6):
        left, top, values, u, v = shape(thing)
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
            parts = [part[window_rows, window_columns] for part in (*edge(values), u, v)]
            under[:] = paint(under, thing, parts, sheet.light, sheet.lattice)
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
    """A center, mostly beside an older thing: crowds touch and overlap."""
    side = len(sheet.owner)
    x, y = side * rng.random(), side * rng.random()
    if sheet.spots and rng.random() < 0.6:
        x, y, other = sheet.spots[int(rng.random() * len(sheet.spots))]
        reach = (radius + other) * (1 - 0.6 * occlusion * rng.random())
        dx, dy = direction(rng)
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
