"""Predictions of images of any size: tile by tile, and instances on seams joined.

Tiles overlap. Each pixel belongs to the core of one tile, the one that sees most around it. Two instances of
neighboring tiles are the same if they agree in the overlap. The tile whose core has most of an instance decides about its
mask if it sees all of it; else the mask is what each tile says in its own core. An instance that has no partner is kept by
the tile whose core has most of it: the other tiles see a part at most.

Masks are held as windows and run lengths, so memory is that of one tile, and some hundred bytes for each instance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from uniquery.data.windows import WindowedImage
from uniquery.errors import ConfigError
from uniquery.evaluation.agreement import disagreement
from uniquery.evaluation.inference import Progress
from uniquery.masks import rle
from uniquery.masks.paste import rle_boxes
from uniquery.masks.runs import Runs, encode_runs, runs_of_window, union
from uniquery.structures import Instances

SAME_INSTANCE = 0.5
"""The smallest IoU of two masks in the overlap of their tiles that makes them the same instance."""
Box = tuple[int, int, int, int]
"""x0 y0 x1 y1 in pixels of the image, the far edge exclusive."""
Bitmap = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tiling:
    """How an image is cut.

    Attributes:
        side: pixels of a tile's side.
        overlap: share of the side that neighboring tiles have in common, at least.
        shift: pixels by which all inner seams are moved, to measure their effect.
    """

    side: int
    overlap: float = 0.2
    shift: int = 0

    def __post_init__(self) -> None:
        if self.side < 32:
            raise ConfigError(f"The side of a tile is at least 32 pixels, not {self.side}.")
        if not 0 < self.overlap <= 0.5:
            raise ConfigError(f"The overlap of tiles is a share above 0, and at most 0.5, not {self.overlap:g}.")

    def starts(self, length: int) -> list[int]:
        """Where tiles start along an axis; the last one ends with the image.

        >>> Tiling(100, 0.2).starts(250), Tiling(100, 0.2).starts(80)
        ([0, 75, 150], [0])
        """
        if length <= self.side:
            return [0]
        step = self.side - round(self.side * self.overlap)
        last = length - self.side
        count = -(-last // step)
        starts = [round(i * last / count) for i in range(count + 1)]
        if not self.shift:
            return starts
        moved = {min(max(start - self.shift, 0), last) for start in starts}
        return sorted({0, last, *moved})


@dataclass(frozen=True)
class Tile:
    """A tile of an image.

    Attributes:
        row: of the grid of tiles.
        column: of the grid of tiles.
        box: what it sees.
        core: the pixels that it decides alone.
    """

    row: int
    column: int
    box: Box
    core: Box


@dataclass(frozen=True)
class Fragment:
    """An instance as one tile sees it.

    Attributes:
        tile: the tile.
        score: in 0..1.
        label: its class.
        box: around its mask.
        mask: run lengths of the mask inside of the box.
    """

    tile: Tile
    score: float
    label: int
    box: Box
    mask: rle.Rle

    def is_cut(self, size: tuple[int, int]) -> bool:
        """Whether it reaches an edge of its tile that is not an edge of the image of (height, width)."""
        (x0, y0, x1, y1), seen, (height, width) = self.box, self.tile.box, size
        return (x0 == seen[0] > 0) or (y0 == seen[1] > 0) or (x1 == seen[2] < width) or (y1 == seen[3] < height)

    def inside(self, window: Box) -> Bitmap:
        """The bitmap of a window, which must lie inside of the box."""
        x0, y0, x1, y1 = window
        return rle.decode(self.mask)[y0 - self.box[1] : y1 - self.box[1], x0 - self.box[0] : x1 - self.box[0]]

    def runs(self, size: tuple[int, int], window: Box | None = None) -> Runs:
        """The runs of its mask, or of the part of it that is in a window."""
        visible = intersection(self.box, window or self.box)
        if visible is None:
            return np.zeros((0, 2), dtype=np.int64)
        return runs_of_window(self.inside(visible), visible[0], visible[1], size[0])


def cut(size: tuple[int, int], tiling: Tiling) -> list[Tile]:
    """The tiles of an image of (height, width), row by row."""
    (ys, cores_y), (xs, cores_x) = (_axis(tiling, length) for length in size)
    height, width = size
    return [
        Tile(
            row,
            column,
            (x, y, min(x + tiling.side, width), min(y + tiling.side, height)),
            (cores_x[column], cores_y[row], cores_x[column + 1], cores_y[row + 1]),
        )
        for row, y in enumerate(ys)
        for column, x in enumerate(xs)
    ]


def _axis(tiling: Tiling, length: int) -> tuple[list[int], list[int]]:
    """Where tiles start, and where their cores do: in the middle of each overlap."""
    starts = tiling.starts(length)
    middles = [(a + tiling.side + b) // 2 for a, b in itertools.pairwise(starts)]
    return starts, [0, *middles, length]


def predict_tiles(
    predict: Callable[[npt.NDArray[np.uint8]], Instances],
    image: WindowedImage,
    tiling: Tiling,
    progress: Progress = lambda *_: None,
) -> Instances:
    """The instances of an image of any size, best first.

    Args:
        predict: the instances of a (side, side, 3) array.
        image: the image.
        tiling: how it is cut.
        progress: called with how many tiles are done, and how many there are.
    """
    tiles = cut(image.size, tiling)
    fragments: list[list[Fragment]] = []
    for done, tile in enumerate(tiles, start=1):
        instances = predict(image.read(tile.box[0], tile.box[1], tiling.side))
        fragments.append(list(_fragments(tile, instances)))
        progress(done, len(tiles))
    return replace(
        _joined(fragments, tiles, image.size), classes=instances.classes, category_ids=instances.category_ids
    )


def _fragments(tile: Tile, instances: Instances) -> Iterator[Fragment]:
    x0, y0, x1, y1 = tile.box
    for score, label, mask in zip(instances.scores.tolist(), instances.labels.tolist(), instances.rles, strict=True):
        bitmap = rle.decode(mask)[: y1 - y0, : x1 - x0]  # without what lies beyond the image
        rows, columns = np.flatnonzero(bitmap.any(1)), np.flatnonzero(bitmap.any(0))
        if len(rows):
            top, left, bottom, right = int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1
            box = (x0 + left, y0 + top, x0 + right, y0 + bottom)
            yield Fragment(tile, score, label, box, rle.encode(bitmap[top:bottom, left:right]))


def _joined(fragments: Sequence[Sequence[Fragment]], tiles: Sequence[Tile], size: tuple[int, int]) -> Instances:
    """Instances from the fragments of all tiles."""
    scores, labels, rles = [], [], []
    cores = {(tile.row, tile.column): tile.core for tile in tiles}
    for group in join(fragments):
        if len(group) == 1 and not _sees_most(group[0], cores):
            continue
        in_core = [fragment.runs(size, fragment.tile.core) for fragment in group]
        area = [int((runs[:, 1] - runs[:, 0]).sum()) for runs in in_core]
        largest = int(np.argmax(area))
        is_whole = len(group) == 1 or not max(area) or not group[largest].is_cut(size)
        merged = union([group[largest].runs(size)] if is_whole else in_core)
        scores.append(group[largest].score)
        labels.append(group[largest].label)
        rles.append(encode_runs(merged, size))
    found = Instances(torch.tensor(scores), torch.tensor(labels, dtype=torch.int64), rle_boxes(rles), rles, size)
    return found[found.scores.argsort(descending=True, stable=True)]


def _sees_most(fragment: Fragment, cores: Mapping[tuple[int, int], Box]) -> bool:
    """Whether no other tile's core has more of an instance."""
    row, column, bitmap = fragment.tile.row, fragment.tile.column, fragment.inside(fragment.box)

    def area_in(core: Box | None) -> int:
        part = core and intersection(fragment.box, core)
        if not part:
            return 0
        x, y = fragment.box[:2]
        return int(bitmap[part[1] - y : part[3] - y, part[0] - x : part[2] - x].sum())

    near = itertools.product(range(row - 2, row + 3), range(column - 2, column + 3))  # no pixel has more tiles
    return area_in(fragment.tile.core) >= max(area_in(cores.get(place)) for place in near)


def join(fragments: Sequence[Sequence[Fragment]]) -> list[list[Fragment]]:
    """Groups of fragments that are one instance, from the fragments of each tile."""
    members = [fragment for of_tile in fragments for fragment in of_tile]
    first = np.cumsum([0, *(len(of_tile) for of_tile in fragments)])
    parent = list(range(len(members)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    places = {(of_tile[0].tile.row, of_tile[0].tile.column): t for t, of_tile in enumerate(fragments) if of_tile}
    for (row, column), t in places.items():
        for neighbor in ((row, column + 1), (row + 1, column - 1), (row + 1, column), (row + 1, column + 1)):
            if neighbor in places:
                other = places[neighbor]
                for i, j in _same(fragments[t], fragments[other]):
                    parent[root(int(first[t]) + i)] = root(int(first[other]) + j)
    groups: dict[int, list[Fragment]] = {}
    for i, fragment in enumerate(members):
        groups.setdefault(root(i), []).append(fragment)
    return list(groups.values())


def _same(a: Sequence[Fragment], b: Sequence[Fragment]) -> list[tuple[int, int]]:
    """Pairs of fragments of two tiles that agree in the overlap of the tiles, each fragment in one pair at most."""
    overlap = intersection(a[0].tile.box, b[0].tile.box)
    if overlap is None:
        return []
    candidates = [
        (iou, i, j)
        for i, one in _inside(a, overlap)
        for j, other in _inside(b, overlap)
        if one.label == other.label and (iou := _iou_inside(one, other, overlap)) >= SAME_INSTANCE
    ]
    pairs: list[tuple[int, int]] = []
    for _, i, j in sorted(candidates, reverse=True):
        if all(i != used_i and j != used_j for used_i, used_j in pairs):
            pairs.append((i, j))
    return pairs


def _inside(fragments: Sequence[Fragment], window: Box) -> list[tuple[int, Fragment]]:
    return [(i, fragment) for i, fragment in enumerate(fragments) if intersection(fragment.box, window)]


def _iou_inside(a: Fragment, b: Fragment, window: Box) -> float:
    """The IoU of the parts of two masks inside of a window."""
    part_a, part_b = intersection(a.box, window), intersection(b.box, window)
    common = part_a and part_b and intersection(part_a, part_b)
    if not (part_a and part_b and common):
        return 0.0
    both = int((a.inside(common) & b.inside(common)).sum())
    either = int(a.inside(part_a).sum()) + int(b.inside(part_b).sum()) - both
    return both / max(either, 1)


def intersection(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, if there is one.

    >>> intersection((0, 0, 4, 4), (2, 3, 9, 9)), intersection((0, 0, 2, 2), (2, 0, 4, 2))
    ((2, 3, 4, 4), None)
    """
    x0, y0, x1, y1 = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


def seam_error(predict: Callable[[Tiling], Instances], tiling: Tiling) -> tuple[float, int]:
    """How much the instances of an image depend on where the seams are, and how many instances there are.

    Args:
        predict: the instances of the image, for any tiling.
        tiling: how it is cut; the second time, seams are moved by half a tile's step.

    Returns:
        `disagreement` of both, and the number of instances with the given tiling.
    """
    step = tiling.side - round(tiling.side * tiling.overlap)
    first, second = predict(tiling), predict(replace(tiling, shift=step // 2))
    return disagreement(first, second), len(first)
