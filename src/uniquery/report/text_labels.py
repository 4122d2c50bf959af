"""Names written into pictures: where each fits, and what the built-in font can print."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from uniquery.report.palette import Color, ink_on

Picture = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]  # x, y, width, height
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_LONGEST_NAME = 24


class Label(NamedTuple):
    """A text that belongs to a mask: the mask's box, the x of its topmost pixel, and its color."""

    text: str
    box: Box
    peak: int
    ground: Color


def write_labels(canvas: Picture, labels: Sequence[Label]) -> None:
    """Writes each text on top of its mask or near it, in place; the first chooses first.

    A text is left out where it would hide more than its mask shows, hide another, or leave the (H, W, 3) canvas.
    """
    height, width = canvas.shape[:2]
    size = max(11, round(min(height, width) / 36))
    font = ImageFont.load_default(size)
    taken: list[tuple[int, int, int, int]] = []
    for label in labels:
        patch = text_patch(label.text, font, ink_on(label.ground), label.ground, padding=max(1, size // 6))
        if label.box[2] * label.box[3] < patch.shape[0] * patch.shape[1] / 2:
            continue
        place = _free_place(label, patch.shape[:2], (height, width), taken)
        if place is not None:
            x, y = place
            canvas[y : y + patch.shape[0], x : x + patch.shape[1]] = patch
            taken.append((x, y, x + patch.shape[1], y + patch.shape[0]))


def caption(name: str, score: float | None) -> str:
    """What is written on an instance.

    >>> caption("dog", 0.873), caption("dog", None)
    ('dog .87', 'dog')
    """
    name = printable(name)
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    if score is None or score != score:
        return name
    return f"{name} {f'{score:.2f}'.removeprefix('0')}".strip()


def _free_place(
    label: Label, patch: tuple[int, ...], size: tuple[int, int], taken: Sequence[tuple[int, int, int, int]]
) -> tuple[int, int] | None:
    """Where a patch (height, width) fits in the image near its mask without hiding another; None if nowhere."""
    if patch[0] > size[0] or patch[1] > size[1]:
        return None
    x, y, width, height = (int(v) for v in label.box)
    peak, middle, right = label.peak - patch[1] // 2, x + (width - patch[1]) // 2, x + width - patch[1]
    above, center, below = y - patch[0], y + (height - patch[0]) // 2, y + height
    wishes = [(peak, above), (peak, y), (middle, center), (middle, below), (x, center), (right, center)]
    for left, top in [*wishes, (x, above), (right, above), (x, below), (right, below)]:
        left = min(max(left, 0), size[1] - patch[1])
        top = min(max(top, 0), size[0] - patch[0])
        if all(left >= x1 or top >= y1 or left + patch[1] <= x0 or top + patch[0] <= y0 for x0, y0, x1, y1 in taken):
            return left, top
    return None


def text_patch(text: str, font: Font, ink: Color, ground: Color, padding: int) -> Picture:
    """(h, w, 3): one line of text on a plain ground; all lines of one font are equally high."""
    _, top, _, bottom = font.getbbox("Ág|")
    width = int(np.ceil(font.getlength(text))) + 2 * padding
    patch = Image.new("RGB", (width, int(bottom - top) + 2 * padding), ground)
    ImageDraw.Draw(patch).text((padding, padding - top), text, fill=ink, font=font)
    return np.asarray(patch)


def printable(text: str) -> str:
    r"""The text in the letters of the built-in font (ASCII): accents dropped, others as question marks, one line.

    >>> printable("café\tau  lait"), printable("椅子")
    ('cafe au lait', '??')
    """
    bare = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    ascii_only = "".join(c if c.isspace() or " " <= c <= "~" else "?" for c in bare)
    return " ".join(ascii_only.split())
