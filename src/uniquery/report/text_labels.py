"""Text in pictures: where each label fits, and what the built-in font can print."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from uniquery.report.palette import Color, text_color_on

Picture = npt.NDArray[np.uint8]  # (H, W, 3) RGB
Box = tuple[float, float, float, float]  # x, y, width, height
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_MAX_NAME_LENGTH = 24


class Label(NamedTuple):
    """A text that belongs to a mask: the mask's box, the x of its topmost pixel, and its color."""

    text: str
    box: Box
    top_x: int
    background: Color


def write_labels(canvas: Picture, labels: Sequence[Label]) -> None:
    """Writes each text near its mask, in place; earlier labels choose their place first.

    A text is left out if it would hide most of its mask or another label, or if it does not fit the (H, W, 3) canvas.
    """
    height, width = canvas.shape[:2]
    size = max(11, round(min(height, width) / 36))
    font = ImageFont.load_default(size)
    occupied: list[tuple[int, int, int, int]] = []
    for label in labels:
        patch = text_patch(
            label.text, font, text_color_on(label.background), label.background, padding=max(1, size // 6)
        )
        if label.box[2] * label.box[3] < patch.shape[0] * patch.shape[1] / 2:
            continue
        position = _free_position(label, patch.shape[:2], (height, width), occupied)
        if position is not None:
            x, y = position
            canvas[y : y + patch.shape[0], x : x + patch.shape[1]] = patch
            occupied.append((x, y, x + patch.shape[1], y + patch.shape[0]))


def caption(name: str, score: float | None) -> str:
    """The text of an instance: its class name, shortened, and its score.

    >>> caption("dog", 0.873), caption("dog", None)
    ('dog .87', 'dog')
    """
    name = printable(name)
    name = name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"
    if score is None or score != score:
        return name
    return f"{name} {f'{score:.2f}'.removeprefix('0')}".strip()


def _free_position(
    label: Label, patch: tuple[int, ...], size: tuple[int, int], occupied: Sequence[tuple[int, int, int, int]]
) -> tuple[int, int] | None:
    """The x, y near its mask where a patch of (height, width) hides no other label; None if there is none."""
    if patch[0] > size[0] or patch[1] > size[1]:
        return None
    x, y, width, height = (int(v) for v in label.box)
    at_top, middle, right = label.top_x - patch[1] // 2, x + (width - patch[1]) // 2, x + width - patch[1]
    above, center, below = y - patch[0], y + (height - patch[0]) // 2, y + height
    candidates = [(at_top, above), (at_top, y), (middle, center), (middle, below), (x, center), (right, center)]
    for left, top in [*candidates, (x, above), (right, above), (x, below), (right, below)]:
        left = min(max(left, 0), size[1] - patch[1])
        top = min(max(top, 0), size[0] - patch[0])
        if all(left >= x1 or top >= y1 or left + patch[1] <= x0 or top + patch[0] <= y0 for x0, y0, x1, y1 in occupied):
            return left, top
    return None


def text_patch(text: str, font: Font, text_color: Color, background: Color, padding: int) -> Picture:
    """(h, w, 3): one line of text on a background; all lines of one font have the same height."""
    _, top, _, bottom = font.getbbox("Ág|")
    width = int(np.ceil(font.getlength(text))) + 2 * padding
    patch = Image.new("RGB", (width, int(bottom - top) + 2 * padding), background)
    ImageDraw.Draw(patch).text((padding, padding - top), text, fill=text_color, font=font)
    return np.asarray(patch)


def printable(text: str) -> str:
    r"""The text in the letters of the built-in font (ASCII): accents dropped, others as question marks, one line.

    >>> printable("café\tau  lait"), printable("椅子")
    ('cafe au lait', '??')
    """
    without_accents = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    ascii_only = "".join(c if c.isspace() or " " <= c <= "~" else "?" for c in without_accents)
    return " ".join(ascii_only.split())
