import numpy as np
import pytest
from scipy import ndimage

from uniquery.masks import rle
from uniquery.masks.contours import Part, mask_parts, single_ring


def even_odd(rings, height: int, width: int) -> np.ndarray:
    """Fills rings by counting crossings to the left of each pixel's center, straight from the definition."""
    inside = np.zeros((height, width), bool)
    for ring in rings:
        for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
            for row in range(min(y0, y1), max(y0, y1)):
                crossing = x0 + (row + 0.5 - y0) * (x1 - x0) / (y1 - y0)
                inside[row, np.arange(width) + 0.5 > crossing] ^= True
    return inside


def rings_of(parts: list[Part]) -> list[np.ndarray]:
    return [ring for part in parts for ring in (part.exterior, *part.holes)]


def masks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    cases = {f"noise {d}": rng.random((23, 31)) < d for d in (0.02, 0.2, 0.5, 0.8, 0.98)}
    cases |= {f"blobs {n}": ndimage.gaussian_filter(rng.random((40, 50)), n) > 0.5 for n in (1, 2, 4)}
    cases["full"] = np.ones((5, 7), bool)
    cases["one pixel"] = np.eye(6, dtype=bool)[:1]
    cases["checkerboard"] = np.indices((9, 8)).sum(0) % 2 == 0
    cases["inverse checkerboard"] = np.pad(np.indices((9, 8)).sum(0) % 2 == 1, 2, constant_values=True)
    nested = np.ones((15, 15), bool)
    for border in (1, 3, 5):
        nested[border:-border, border:-border] ^= True
    cases["nested"] = nested
    return cases


@pytest.mark.parametrize("name", masks())
def test_outlines_are_exact(name):
    bitmap = masks()[name]
    parts = mask_parts(rle.encode(bitmap))
    assert np.array_equal(even_odd(rings_of(parts), *bitmap.shape), bitmap)
    ring = single_ring(parts)
    assert np.array_equal(even_odd([ring], *bitmap.shape), bitmap)
    polygon = ring.flatten().tolist()
    assert np.array_equal(rle.decode(rle.from_polygons([polygon], *bitmap.shape)), bitmap)  # COCO's own way to fill


@pytest.mark.parametrize("name", masks())
def test_parts_holes_and_directions(name):
    """A part for each region connected by sides; rings have right angles, and no corner twice."""
    bitmap = masks()[name]
    parts = mask_parts(rle.encode(bitmap))
    labels, count = ndimage.label(bitmap)
    assert len(parts) == count
    for number, part in enumerate(parts, start=1):
        assert np.array_equal(even_odd([part.exterior, *part.holes], *bitmap.shape), labels == number)
        for ring, is_hole in [(part.exterior, False), *((hole, True) for hole in part.holes)]:
            steps = np.roll(ring, -1, axis=0) - ring
            assert ((steps == 0).sum(1) == 1).all()
            assert (np.diff(steps[:, 0] == 0, append=steps[:1, 0] == 0)).all()
            assert len(np.unique(ring, axis=0)) == len(ring)
            area = (ring[:, 0] * np.roll(ring[:, 1], -1) - np.roll(ring[:, 0], -1) * ring[:, 1]).sum()
            assert (area < 0) == is_hole


def test_a_pixel_and_an_empty_mask():
    bitmap = np.zeros((4, 8), np.uint8)
    assert mask_parts(rle.encode(bitmap)) == []
    bitmap[2, 5] = 1
    (part,) = mask_parts(rle.encode(bitmap))
    assert sorted(part.exterior.tolist()) == [[5, 2], [5, 3], [6, 2], [6, 3]]
    assert part.holes == ()
