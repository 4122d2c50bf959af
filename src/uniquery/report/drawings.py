"""Instances drawn over an image: translucent masks, outlines, names; label maps, grids of pictures.

Letters: H × W the image; arrays are uint8 (H, W, 3) in RGB.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFont
from scipy.ndimage import minimum_filter1d

from uniquery.data.image_input import ImageInput, as_rgb_array
from uniquery.errors import DataError, UserError
from uniquery.masks import rle
from uniquery.report.palette import Color, color
from uniquery.report.text_labels import Label, Picture, caption, printable, text_patch, write_labels
from uniquery.structures import Instances

_MASK_OPACITY = 0.45  # inside of the outline
_MAX_LABELS = 40  # with more instances than this, names would hide the picture
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)


@dataclass(frozen=True)
class LabeledMask:
    """A mask to draw, with its class name and score.

    Attributes:
        rle: its compressed COCO run-length mask, at the size of the image.
        class_name: the name of its class.
        score: 0..1, or None for ground truth.
    """

    rle: dict[str, Any]
    class_name: str
    score: float | None = None


def labeled_masks(instances: Instances) -> list[LabeledMask]:
    """Predicted instances as masks to draw."""
    rows = zip(instances.rles, instances.names, instances.scores.tolist(), strict=True)
    return [LabeledMask(mask, name, score) for mask, name, score in rows]


def draw_instances(image: ImageInput, instances: Instances) -> Picture:
    """(H, W, 3) uint8: predicted instances drawn over their image.

    Raises:
        DataError: the image cannot be read, or is not of the masks' size.
    """
    pixels = as_rgb_array(image)
    if pixels.shape[:2] != instances.size:
        raise DataError(
            f"The image is {pixels.shape[0]} × {pixels.shape[1]} pixels and the masks are "
            f"{instances.size[0]} × {instances.size[1]}: draw on the image that was predicted."
        )
    return overlay(pixels, labeled_masks(instances))


def overlay(image: Picture, masks: Sequence[LabeledMask], *, text: bool = True) -> Picture:
    """The image with its instances drawn over it, the best score on top.

    Only pixels under a mask or a name change. Masks are decoded one at a time, so memory does not grow with their
    number. Names are left out of tiny instances, where there is no free place, and when there are very many.

    Args:
        image: (H, W, 3) uint8; not changed.
        masks: masks at the size of the image; each gets its own color.
        text: whether to write names and scores.

    Returns:
        (H, W, 3) uint8.

    Raises:
        ValueError: the image is not uint8 (H, W, 3), or a mask is not of its size.

    >>> square = LabeledMask(rle.encode(np.ones((2, 2), np.uint8)), "square")
    >>> overlay(np.zeros((2, 2, 3), np.uint8), [square])[0, 0].tolist()
    [230, 46, 46]
    """
    _check_sizes(image, masks)
    canvas = image.copy()
    thickness = max(1, round(min(image.shape[:2]) / 320))
    labels = []
    for i in _painting_order(masks):
        mask = masks[i]
        top_x = _paint(canvas, mask.rle, color(i), thickness)
        labels.append(Label(caption(mask.class_name, mask.score), rle.bounding_box(mask.rle), top_x, color(i)))
    if text and len(masks) <= _MAX_LABELS:
        write_labels(canvas, labels[::-1])
    return canvas


def label_map(masks: Sequence[LabeledMask], size: tuple[int, int]) -> npt.NDArray[np.uint16]:
    """(H, W) uint16: 0 is background, i + 1 the i-th instance; where they overlap, the best score wins.

    >>> whole, corner = np.ones((2, 2), np.uint8), np.eye(2, dtype=np.uint8)
    >>> masks = [LabeledMask(rle.encode(whole), "a", 0.3), LabeledMask(rle.encode(corner), "b", 0.9)]
    >>> label_map(masks, (2, 2)).tolist()
    [[2, 1], [1, 2]]
    """
    if len(masks) > np.iinfo(np.uint16).max:
        raise ValueError(f"{len(masks)} instances do not fit in 16 bits")
    labels = np.zeros(size, np.uint16)
    for i in _painting_order(masks):
        labels[rle.decode(masks[i].rle).astype(bool)] = i + 1
    return labels


def downscale(image: Picture, masks: Sequence[LabeledMask], longest: int) -> tuple[Picture, list[LabeledMask]]:
    """Image and masks, scaled down together so that no side exceeds `longest`.

    Drawing after scaling keeps outlines and names sharp in a thumbnail. A mask never becomes empty.
    """
    height, width = image.shape[:2]
    if max(height, width) <= longest:
        return image, list(masks)
    scale = longest / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
    return small, [replace(mask, rle=_downscale_mask(mask.rle, size)) for mask in masks]


def _downscale_mask(mask: rle.Rle, size: tuple[int, int]) -> rle.Rle:
    cover = np.asarray(Image.fromarray(rle.decode(mask) * 255).resize(size, Image.Resampling.BOX))
    return rle.encode(cover >= max(1, min(128, int(cover.max()))))


def _check_sizes(image: Picture, masks: Sequence[LabeledMask]) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"an image to draw on is uint8 (H, W, 3), not {image.dtype} {image.shape}")
    for mask in masks:
        if tuple(mask.rle["size"]) != image.shape[:2]:
            raise ValueError(f"a mask of {tuple(mask.rle['size'])} does not fit an image of {image.shape[:2]}")


def _painting_order(masks: Sequence[LabeledMask]) -> list[int]:
    """Worst score first; among equals the largest first, so that small ones stay visible."""

    def key(i: int) -> tuple[float, int]:
        score = masks[i].score
        return (score if score is not None and score == score else -1.0, -rle.area(masks[i].rle))

    return sorted(range(len(masks)), key=key)


def _paint(canvas: Picture, mask: rle.Rle, mask_color: Color, thickness: int) -> int:
    """Paints one mask in place and returns the x of its topmost pixel, 0 if it has none."""
    x, y, width, height = (int(v) for v in rle.bounding_box(mask))
    if not width or not height:
        return 0
    inside = np.ascontiguousarray(rle.decode(mask)[y : y + height, x : x + width])
    eroded = minimum_filter1d(inside, 2 * thickness + 1, axis=0, mode="constant", cval=0)
    eroded = minimum_filter1d(eroded, 2 * thickness + 1, axis=1, mode="constant", cval=0)
    fill, edge = inside.astype(bool), inside > eroded
    region = canvas[y : y + height, x : x + width]
    levels = np.arange(256) * (1 - _MASK_OPACITY)
    for channel, level in enumerate(mask_color):
        # A lookup table of 256 values: blending a large mask in floating point would take eight times its memory.
        blend = np.round(levels + level * _MASK_OPACITY).astype(np.uint8)
        plane = region[..., channel]
        np.copyto(plane, blend[plane], where=fill)
        np.copyto(plane, np.uint8(level), where=edge)
    return x + int(np.median(np.flatnonzero(inside[0])))


def grid(images: Sequence[Picture], columns: int, titles: Sequence[str] = ()) -> Picture:
    """Pictures in a grid, row by row; smaller pictures are centered in their cell, on white.

    Args:
        images: each (H, W, 3) uint8, of any size.
        columns: how many in a row.
        titles: one for each image, or none at all.

    Raises:
        ValueError: there is no image, no column, or not a title for each.

    >>> black = np.zeros((30, 40, 3), np.uint8)
    >>> grid([black] * 3, columns=2).shape
    (64, 84, 3)
    """
    if not images or columns < 1:
        raise ValueError(f"a grid needs at least one image and one column, not {len(images)} and {columns}")
    if titles and len(titles) != len(images):
        raise ValueError(f"{len(titles)} titles for {len(images)} images")
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    title_pictures = _draw_titles(titles, width)
    title_height = title_pictures[0].shape[0] if title_pictures else 0
    gap = max(4, width // 100)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    sheet = np.full((rows * (height + title_height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, image in enumerate(images):
        y, x = (i // columns) * (height + title_height + gap), (i % columns) * (width + gap)
        if title_pictures:
            _paste(sheet, title_pictures[i], y, x)
        _paste(sheet, image, y + title_height + (height - image.shape[0]) // 2, x + (width - image.shape[1]) // 2)
    return sheet


def _draw_titles(titles: Sequence[str], width: int) -> list[Picture]:
    size = max(10, width // 28)
    font = ImageFont.load_default(size)
    patches = [text_patch(printable(title), font, _BLACK, _WHITE, padding=size // 3) for title in titles]
    return [patch[:, :width] for patch in patches]


def _paste(sheet: Picture, image: Picture, y: int, x: int) -> None:
    sheet[y : y + image.shape[0], x : x + image.shape[1]] = image


def read_png(path: Path) -> Picture:
    """(H, W, 3) of a PNG file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with Image.open(path, formats=("PNG",)) as picture:
            return np.asarray(picture.convert("RGB"))
    except OSError as error:
        raise UserError(f"{path} is not a readable PNG file ({error}): delete it.") from None


def png_bytes(image: npt.NDArray[Any]) -> bytes:
    """The content of a PNG file with an (H, W, 3) uint8, (H, W) uint8 or (H, W) uint16 picture.

    >>> png_bytes(np.zeros((2, 2), np.uint16))[1:4]
    b'PNG'
    """
    return _encode(Image.fromarray(image), "png")


def data_uri(image: Picture, longest: int = 360) -> str:
    """The picture as a JPEG data URI for an html page, scaled down so that no side exceeds `longest`.

    >>> data_uri(np.zeros((2, 2, 3), np.uint8))[:23]
    'data:image/jpeg;base64,'
    """
    picture = Image.fromarray(image)
    picture.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    return f"data:image/jpeg;base64,{base64.b64encode(_encode(picture, 'jpeg')).decode()}"


def _encode(picture: Image.Image, file_format: Literal["jpeg", "png"]) -> bytes:
    options: dict[str, Any] = {"quality": 88, "optimize": True} if file_format == "jpeg" else {"compress_level": 6}
    buffer = io.BytesIO()
    picture.save(buffer, file_format, **options)
    return buffer.getvalue()
