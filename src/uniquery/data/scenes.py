"""Drawn scenes: a small COCO data set without a download, the same pixels on every machine for a given seed.

Crowds of overlapping objects. The class is the shape. Colors and texture vary from object to object, but some objects
share them, so that appearance alone does not distinguish them. Later objects cover earlier ones; a mask is what stays
visible.
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
from pydantic import Field, model_validator

from uniquery.data.drawing import (
    CLASS_NAMES,
    Array,
    Rng,
    SceneObject,
    background,
    direction,
    edge,
    paint,
    random_color,
    shape,
    stuff_background,
)
from uniquery.data.lvis_scenes import image_name, long_tailed, lvis_form
from uniquery.data.panoptic_scenes import panoptic_categories, visible_stuff, write_panoptic_entry
from uniquery.errors import DataError
from uniquery.masks import rle
from uniquery.settings import Settings

SPLITS = ("train", "val")
_VERSION = 1  # increase it when the images change: a folder of an older version is then refused instead of reused
_MIN_PIXELS, _MIN_SHARE = 20, 0.25  # at least this much of each object stays visible


class ScenesConfig(Settings):
    """The settings of the drawn data set."""

    train_images: int = Field(400, ge=1, le=999_999, description="Images of the training split.")
    val_images: int = Field(100, ge=1, le=999_999, description="Images of the validation split.")
    size: int = Field(192, ge=64, le=1024, description="Side of the square images in pixels; objects grow with it.")
    classes: int = Field(
        6, ge=1, le=len(CLASS_NAMES), description=f"How many of these occur: {', '.join(CLASS_NAMES)}."
    )
    crowding: float = Field(10.0, ge=1, le=60, description="Objects per image on average; fewer if they do not fit.")
    lookalikes: float = Field(0.3, ge=0, le=1, description="Share of objects that copy another's class and texture.")
    occlusion: float = Field(0.5, ge=0, le=1, description="0: objects only touch; 1: up to 3/4 may be covered.")
    seed: int = Field(0, ge=0, description="All images follow from it.")
    lvis: bool = Field(
        False, description="Write LVIS json; each class is 2.2 times as rare in training as the one before it."
    )
    panoptic: bool = Field(False, description="Backgrounds are stuff and void, and annotations COCO's panoptic ones.")

    @model_validator(mode="after")
    def _has_one_form(self) -> ScenesConfig:
        if self.lvis and self.panoptic:
            raise ValueError("lvis and panoptic are two forms of annotations: choose one")
        return self


DEMO_SCENES = ScenesConfig(train_images=600, val_images=80)  # of the demo, and of studies without data


@dataclass(frozen=True)
class Scene:
    """One drawn image with K objects.

    Attributes:
        image: (H, W, 3) uint8 RGB.
        masks: (K, H, W) bool, disjoint and not empty: the visible pixels of each object.
        labels: (K,) int64, indices in `CLASS_NAMES`.
        appearances: (K,) int64, equal for objects that share colors and texture.
        stuff: (H, W) int64, an index in `STUFF_NAMES`, −1 for objects and void; None in scenes that are not panoptic.
    """

    image: npt.NDArray[np.uint8]
    masks: npt.NDArray[np.bool_]
    labels: npt.NDArray[np.int64]
    appearances: npt.NDArray[np.int64]
    stuff: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class SceneFiles:
    """The files of a drawn data set."""

    root: Path

    def images(self, split: str) -> Path:
        """The folder of a split's images."""
        return self.root / "images" / split

    def annotations(self, split: str) -> Path:
        """The COCO json of a split."""
        return self.root / "annotations" / f"{split}.json"

    def pngs(self, split: str) -> Path:
        """The folder of a split's panoptic PNG files."""
        return self.root / "annotations" / split


@dataclass
class _Canvas:
    """A scene that is being drawn."""

    pixels: Array  # (3, H, W)
    owner: npt.NDArray[np.int64]  # (H, W), −1 for the background
    lattice: Array  # (32, 32), the source of all smooth noise
    light: tuple[float, float]
    circles: list[tuple[int, int, float]] = field(default_factory=list)  # x, y, radius of each object
    may_lose: list[float] = field(default_factory=list)  # how many pixels of each object may still be covered


def draw_scene(rng: Rng, config: ScenesConfig) -> Scene:
    """One scene; the seed and the numbers of images in `config` are not used.

    >>> scene = draw_scene(np.random.default_rng(0), ScenesConfig(size=64, crowding=3))
    >>> scene.image.shape, len(scene.masks) == len(scene.labels)
    ((64, 64, 3), True)
    """
    lattice, side = rng.random((32, 32)).astype(np.float32), config.size
    owner = np.full((side, side), -1, dtype=np.int64)
    pixels, stuff = stuff_background(rng, side, lattice) if config.panoptic else (background(rng, side, lattice), None)
    canvas = _Canvas(pixels, owner, lattice, direction(rng))
    objects = [drawn for obj in _plan(rng, config) if (drawn := _draw(rng, canvas, obj, config.occlusion))]
    grain = (rng.random((side, side)).astype(np.float32) - 0.5) * 0.03
    image = (np.clip(canvas.pixels + grain, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    stuff = visible_stuff(stuff, owner) if stuff is not None else None
    masks = owner == np.arange(len(objects))[:, None, None]
    labels = np.array([obj.label for obj in objects], dtype=np.int64)
    appearances = np.array([obj.appearance for obj in objects], dtype=np.int64)
    return Scene(np.ascontiguousarray(image), masks, labels, appearances, stuff)


def _plan(rng: Rng, config: ScenesConfig) -> list[SceneObject]:
    """The objects to draw, larger ones mostly first, so that they do not cover the small ones."""
    smallest, largest = _smallest_radius(config.size), 0.45 * config.size
    objects: list[SceneObject] = []
    for _ in range(max(1, int(config.crowding * (0.5 + rng.random()) + 0.5))):
        if objects and rng.random() < config.lookalikes:
            objects.append(_copy(rng, objects[int(rng.random() * len(objects))], smallest))
            continue
        share, label = rng.random(), _class(rng.random(), config)
        radius = smallest + (largest - smallest) * share * share
        form, texture = (tuple(rng.random(8).tolist()) for _ in range(2))
        colors = np.stack([random_color(rng, 0.4, 1.0), random_color(rng, 0.2, 1.0)])
        objects.append(SceneObject(label, len(objects), radius, direction(rng), form, texture, colors))
    return sorted(objects, key=lambda obj: -obj.radius * (0.5 + rng.random()))


def _class(uniform: float, config: ScenesConfig) -> int:
    """A class from a uniform number in 0..1."""
    return long_tailed(uniform, config.classes) if config.lvis else int(uniform * config.classes)


def _smallest_radius(side: int) -> float:
    """The smallest radius at which the classes can be distinguished in an image of this side."""
    return max(6.0, 0.05 * side)


def _copy(rng: Rng, original: SceneObject, smallest: float) -> SceneObject:
    """A look-alike: the same class and appearance, slightly varied, in another orientation."""
    radius = max(smallest, original.radius * (0.8 + 0.4 * rng.random()))
    colors = np.clip(original.colors + 0.05 * (rng.random((2, 3)).astype(np.float32) - 0.5), 0, 1)
    form = tuple(min(max(value + 0.2 * (rng.random() - 0.5), 0.0), 1.0) for value in original.shape)
    return replace(original, radius=radius, axis=direction(rng), colors=colors, shape=form)


def _draw(rng: Rng, canvas: _Canvas, obj: SceneObject, occlusion: float) -> SceneObject | None:
    """Draws the object where it covers no older one too much, smaller if necessary; None if there is no such place."""
    side = len(canvas.owner)
    for _ in range(6):
        left, top, values, u, v = shape(obj)
        inside = values < 0
        full_area = np.count_nonzero(inside)
        for _ in range(8):
            x, y = _center(rng, canvas, obj.radius, occlusion)
            rows, window_rows = _overlap(y + top, values.shape[0], side)
            columns, window_columns = _overlap(x + left, values.shape[1], side)
            owner, new = canvas.owner[rows, columns], inside[window_rows, window_columns]
            lost = np.bincount(owner[new] + 1, minlength=len(canvas.circles) + 1)[1:]
            area = np.count_nonzero(new)
            if area < max(_MIN_PIXELS, 0.6 * full_area) or np.any(lost > canvas.may_lose):
                continue
            owner[new] = len(canvas.circles)
            must_stay = max(_MIN_PIXELS, _MIN_SHARE * full_area, (1 - (1 - _MIN_SHARE) * occlusion) * area)
            canvas.may_lose = [*(np.array(canvas.may_lose) - lost).tolist(), area - must_stay]
            canvas.circles.append((x, y, obj.radius))
            pixels = canvas.pixels[:, rows, columns]
            geometry = [array[window_rows, window_columns] for array in (*edge(values), u, v)]
            pixels[:] = paint(pixels, obj, geometry, canvas.light, canvas.lattice)
            return obj
        obj = replace(obj, radius=max(_smallest_radius(side), 0.8 * obj.radius))
    return None


def _overlap(start: int, length: int, side: int) -> tuple[slice, slice]:
    """Where a window overlaps the image: the slice of the image, and the slice of the window.

    >>> _overlap(-2, 5, 192)
    (slice(0, 3, None), slice(2, 5, None))
    """
    first, last = max(0, start), min(side, start + length)
    return slice(first, last), slice(first - start, last - start)


def _center(rng: Rng, canvas: _Canvas, radius: float, occlusion: float) -> tuple[int, int]:
    """A random center, mostly beside an older object: crowds touch and overlap."""
    side = len(canvas.owner)
    x, y = side * rng.random(), side * rng.random()
    if canvas.circles and rng.random() < 0.6:
        x, y, other = canvas.circles[int(rng.random() * len(canvas.circles))]
        distance = (radius + other) * (1 - 0.6 * occlusion * rng.random())
        dx, dy = direction(rng)
        x, y = x + distance * dx, y + distance * dy
    margin = min(0.75 * radius, 0.5 * side)
    return int(min(max(x, margin), side - 1 - margin)), int(min(max(y, margin), side - 1 - margin))


def make_scenes(root: Path, config: ScenesConfig, progress: Callable[[int, int], None] | None = None) -> SceneFiles:
    """Draws both splits into `root`, completely or not at all; a folder that holds exactly this data is reused.

    Args:
        root: the folder to make, with `images/<split>/000001.png …` and `annotations/<split>.json`.
        config: the settings; an image follows from the seed, its split and its number, not from how many there are.
        progress: called after each image with how many are done and how many there will be.

    Raises:
        DataError: `root` holds something else, or cannot be written.
    """
    files = SceneFiles(root)
    partial = SceneFiles(root.parent / f".{root.name}.{uuid.uuid4().hex}.partial")
    try:
        if root.exists() and not (root.is_dir() and not any(root.iterdir())):
            if reason := _mismatch(files, config):
                raise DataError(f"{root} does not hold these scenes: {reason}; remove it or choose another folder.")
            return files
        done = 0
        for split in SPLITS:
            for _ in _write_split(partial, split, config):
                done += 1
                if progress:
                    progress(done, config.train_images + config.val_images)
        partial.root.rename(root)
    except OSError as error:
        if _mismatch(files, config):  # otherwise another process has just drawn the same scenes
            raise DataError(
                f"Cannot write scenes to {root} ({error.strerror or error}); choose another folder."
            ) from error
    finally:
        shutil.rmtree(partial.root, ignore_errors=True)
    return files


def _write_split(files: SceneFiles, split: str, config: ScenesConfig) -> Iterator[int]:
    """Writes the images, yielding each one's number, and then the annotations."""
    files.images(split).mkdir(parents=True)
    files.annotations(split).parent.mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    # Rare classes of an evenly drawn validation split can be measured.
    drawing = config if split == "train" else config.model_copy(update={"lvis": False})
    for number in range(1, _count(split, config) + 1):
        key = np.random.SeedSequence([config.seed, SPLITS.index(split), number])
        scene, name = draw_scene(np.random.Generator(np.random.PCG64(key)), drawing), f"{number:06d}.png"
        Image.fromarray(scene.image).save(files.images(split) / name, compress_level=1)
        images.append({"id": number, "file_name": name, "width": config.size, "height": config.size})
        labels = scene.labels.tolist()
        if scene.stuff is not None:
            annotations.append(write_panoptic_entry(files.pngs(split), number, scene.masks, labels, scene.stuff))
        else:
            rows = enumerate(zip(labels, scene.masks, strict=True), start=len(annotations) + 1)
            annotations += [_annotation(row, number, label, mask) for row, (label, mask) in rows]
        yield number
    categories = [{"id": i, "name": name} for i, name in enumerate(CLASS_NAMES[: config.classes], start=1)]
    if config.panoptic:
        categories = panoptic_categories(config.classes)
    content = {"info": _info(config), "images": images, "annotations": annotations, "categories": categories}
    if config.lvis:
        content = lvis_form(content, split, config.seed, files.annotations(SPLITS[0]))
    with files.annotations(split).open("w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _annotation(number: int, image: int, label: int, mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
    encoded = rle.encode(mask)
    ids = {"id": number, "image_id": image, "category_id": label + 1, "iscrowd": 0}
    return ids | {"area": rle.area(encoded), "bbox": list(rle.bounding_box(encoded)), "segmentation": encoded}


def _info(config: ScenesConfig) -> dict[str, Any]:
    return {"description": "Scenes drawn by uniquery", "drawing": _VERSION, "config": _settings(config)}


def _settings(config: ScenesConfig) -> dict[str, Any]:
    """The settings, without the form of the annotations if it is the usual one, as older folders have them."""
    return {key: value for key, value in config.model_dump().items() if key not in ("lvis", "panoptic") or value}


def _count(split: str, config: ScenesConfig) -> int:
    return config.train_images if split == "train" else config.val_images


def _mismatch(files: SceneFiles, config: ScenesConfig) -> str:
    """Why a folder is not exactly this data set, as a part of a sentence; empty if it is."""
    for split in SPLITS:
        try:
            content = json.loads(files.annotations(split).read_text(encoding="utf-8"))
            info, names = content["info"], [image_name(image) for image in content["images"]]
            files_found = {path.name for path in files.images(split).glob("*.png") if path.stat().st_size}
        except (OSError, ValueError, KeyError, TypeError):
            return f"annotations/{split}.json is missing or was not written by uniquery"
        if info != _info(config):
            return _difference(info, config)
        if len(names) != _count(split, config) or not files_found.issuperset(names):
            return f"some of the {_count(split, config)} images of images/{split} are missing"
        if config.panoptic and any(not (files.pngs(split) / name).is_file() for name in names):
            return f"some of the PNG files of annotations/{split} are missing"
    return ""


def _difference(info: Any, config: ScenesConfig) -> str:
    old = info.get("config") if isinstance(info, dict) else None
    old, new = {"lvis": False, "panoptic": False, **(old if isinstance(old, dict) else {})}, config.model_dump()
    changed = [f"{key} is {old[key]}, not {new[key]}" for key in new if key in old and old[key] != new[key]]
    return ", ".join(changed) or "it was drawn by another version"
