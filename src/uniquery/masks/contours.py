"""Outlines of masks along the edges of their pixels: exact polygons, with holes.

Letters: H × W pixels, V corners of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from uniquery.masks import rle

Ring = npt.NDArray[np.int64]
"""(V, 2) x, y of the corners of a closed line; the last is joined to the first."""

_SEARCHED = 4096  # corners among which the nearest is the start of a bridge


@dataclass(frozen=True)
class Part:
    """Pixels that are connected by their sides.

    Attributes:
        exterior: the line around them; its signed area, Σ (x₁y₂ − x₂y₁) / 2, is positive.
        holes: the lines around the pixels that are missing in it; their areas are negative.
    """

    exterior: Ring
    holes: tuple[Ring, ...] = ()


def mask_parts(mask: rle.Rle) -> list[Part]:
    """The outlines of a run-length mask; none if it is empty.

    Corners are those of pixels: the pixel in row 2 and column 5 has the corners (5, 2), (6, 2), (6, 3), (5, 3). No line
    crosses or touches itself. Two lines may have corners in common.
    """
    left, top, width, height = map(int, rle.bounding_box(mask))
    if not width or not height:
        return []
    bitmap = rle.decode(mask)[top : top + height, left : left + width]
    parts = bitmap_parts(bitmap.astype(bool))
    offset = np.array([left, top])
    return [Part(part.exterior + offset, tuple(hole + offset for hole in part.holes)) for part in parts]


def bitmap_parts(bitmap: npt.NDArray[np.bool_]) -> list[Part]:
    """The outlines of an (H, W) bitmap."""
    labels, count = ndimage.label(bitmap)  # by sides, not by corners
    exteriors: dict[int, Ring] = {}
    holes: dict[int, list[Ring]] = {number: [] for number in range(1, count + 1)}
    for ring in _rings(bitmap):
        number = int(labels[_pixel_beside(ring)])
        if _doubled_area(ring) > 0:
            exteriors[number] = ring
        else:
            holes[number].append(ring)
    return [Part(exteriors[number], tuple(holes[number])) for number in range(1, count + 1)]


def single_ring(parts: Sequence[Part]) -> Ring:
    """One line around all parts and holes, joined by bridges that are walked twice.

    Filled by the even-odd or the non-zero rule, it gives the mask again: a bridge has no area.
    """
    rings = [ring for part in parts for ring in (part.exterior, *part.holes)]
    corners, starts = np.concatenate(rings), [0, *np.cumsum([len(ring) for ring in rings]).tolist()]
    bridges: dict[int, list[int]] = {}  # from a corner to rings
    for number, first in enumerate(starts[1:-1], start=1):
        before = corners[max(0, first - _SEARCHED) : first]
        nearest = int(((before - corners[first]) ** 2).sum(1).argmin())
        bridges.setdefault(first - len(before) + nearest, []).append(number)
    order, left = list[int](), list(range(starts[1] - 1, -1, -1))
    while left:
        corner = left.pop()
        order.append(corner)
        for number in bridges.pop(corner, ()):  # around that ring, then back
            first, end = starts[number : number + 2]
            left += [corner, first, *range(end - 1, first - 1, -1)]
    return corners[order]


def _rings(bitmap: npt.NDArray[np.bool_]) -> Iterator[Ring]:
    """Lines along all edges between a pixel of the mask, on the right hand, and one that is not."""
    columns = bitmap.shape[1] + 1
    for line in _lines(bitmap):
        for loop in _simple_loops(line):
            yield np.stack([np.array(loop) % columns, np.array(loop) // columns], axis=1)


def _lines(bitmap: npt.NDArray[np.bool_]) -> Iterator[list[int]]:
    """Closed lines, each as the numbers of its corners, row by row."""
    padded = np.pad(bitmap, 1)
    above, below, left, right = padded[:-1], padded[1:], padded[:, :-1], padded[:, 1:]
    # Whether an edge to the east, south, west or north starts at each corner of a pixel.
    east, south = (below & ~above)[:, 1:], (left & ~right)[1:]
    west, north = (above & ~below)[:, :-1], (right & ~left)[:-1]
    starts = np.stack([east, south, west, north]).reshape(4, -1)
    points, columns = starts.shape[1], east.shape[1]
    edges = np.flatnonzero(starts)
    direction, start = edges // points, edges % points
    end = start + np.array([1, columns, -1, -columns])[direction]
    turns = (direction + np.array([[1], [0], [3]])) % 4  # right, straight, left
    turn = turns[starts[turns, end].argmax(0), np.arange(len(edges))]
    following = np.searchsorted(edges, turn * points + end).tolist()
    is_corner = (turn != direction).tolist()
    ends = end.tolist()
    is_done = bytearray(len(edges))
    for first in range(len(edges)):
        line, edge = [], first
        while not is_done[edge]:
            is_done[edge] = 1
            if is_corner[edge]:
                line.append(ends[edge])
            edge = following[edge]
        if line:
            yield line


def _simple_loops(line: Sequence[int]) -> Iterator[list[int]]:
    """The loops of a line that comes to some corners twice."""
    path: list[int] = []
    place: dict[int, int] = {}
    for corner in line:
        if corner in place:
            start = place[corner]
            loop = path[start:]
            del path[start:]
            for one in loop:
                del place[one]
            yield loop
        place[corner] = len(path)
        path.append(corner)
    yield path


def _pixel_beside(ring: Ring) -> tuple[int, int]:
    """Row and column of the pixel of the mask beside the first edge of a ring."""
    (x, y), (to_x, to_y) = ring[:2].tolist()
    if y == to_y:
        return (y, x) if to_x > x else (y - 1, x - 1)
    return (y, x - 1) if to_y > y else (y - 1, x)


def _doubled_area(ring: Ring) -> int:
    following = np.roll(ring, -1, axis=0)
    return int((ring[:, 0] * following[:, 1] - following[:, 0] * ring[:, 1]).sum())
