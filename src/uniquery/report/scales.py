"""The numbers behind a chart: ranges, round ticks and their texts, smoothing, thinning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]  # (N, 2) of x, y; y is nan in a gap

_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def points_of(pairs: Sequence[tuple[float, float | None]]) -> Points:
    """(N, 2), with every y that is missing or infinite (or beyond what can be added up) as nan.

    >>> points_of([(0, 1.5), (1, None), (2, float("inf"))]).tolist()
    [[0.0, 1.5], [1.0, nan], [2.0, nan]]
    """
    points = np.array([(x, np.nan if y is None else y) for x, y in pairs], np.float64).reshape(-1, 2)
    points[~(np.abs(points[:, 1]) < 1e300), 1] = np.nan
    return points


def smooth(points: Points, share: float = 0.04) -> Points:
    """Each y replaced by the mean of its neighborhood, a share of the curve wide; short curves and gaps stay.

    >>> smooth(np.array([[0, 0.0], [1, 3.0], [2, 0.0]]), share=0.7)[:, 1].tolist()
    [1.5, 1.0, 1.5]
    """
    half = round(len(points) * share / 2)
    known = np.isfinite(points[:, 1])
    window = np.ones(2 * half + 1)
    middle = slice(half, half + len(points))
    # Not by differences of a running sum: after one exploded loss of 1e30 they would hold no digit of the rest.
    sums = np.convolve(np.where(known, points[:, 1], 0.0), window)[middle] if len(points) else points[:, 1]
    counts = np.convolve(known, window)[middle] if len(points) else points[:, 1]
    return np.stack([points[:, 0], np.where(known, sums / np.maximum(counts, 1), np.nan)], axis=1)


def thin(points: Points, most: int = 600) -> Points:
    """At most about `most` points that look the same: the lowest and the highest of each stretch, and any gap.

    >>> thin(np.array([[0, 1.0], [1, 9.0], [2, 2.0], [3, 0.0]]), most=2).tolist()
    [[1.0, 9.0], [3.0, 0.0]]
    """
    if len(points) <= most:
        return points
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(points)), max(1, most // 2)):
        ys = points[stretch, 1]
        if np.isnan(ys).any():
            kept.add(int(stretch[np.isnan(ys).argmax()]))
        if not np.isnan(ys).all():
            kept |= {int(stretch[np.nanargmin(ys)]), int(stretch[np.nanargmax(ys)])}
    return points[sorted(kept)]


def visible_range(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Lowest and highest, without the few outliers that would flatten everything else; (0, 1) of nothing.

    >>> visible_range(np.array([1.0, 2.0, 9.0]))
    (1.0, 9.0)
    >>> visible_range(np.append(np.linspace(0, 1, 200), 1e30))[1] < 2
    True
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    first, last = (float(v) for v in np.percentile(values, [1, 99]))
    usual = last - first
    if usual and len(values) >= 100:
        low = low if first - low <= 2 * usual else first - usual / 4
        high = high if high - last <= 2 * usual else last + usual / 4
    return low, high


def span(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty, and starts at zero if it starts near it.

    >>> span(0.2, 1.0), span(3.0, 3.0), span(0.0, 0.0), span(0.9, 1.0)
    ((0.0, 1.0), (2.7, 3.3), (0.0, 1.0), (0.9, 1.0))
    """
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        room = abs(high) * 0.1
        return (low - room, high + room) if room > 1e-300 else (0.0, 1.0)
    return (0.0, high) if 0 <= low <= 0.5 * high else (low, high)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, a 1, 2 or 5 apart, from at or below `low` to at or above `high`.

    >>> ticks(0.3, 9.6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.7)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Multiplying by a power of ten leaves 0.30000000000000004; ten significant digits are enough for an axis.
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Short texts for the ticks of one axis, all in the same unit.

    >>> tick_texts([0, 5000, 10000]), tick_texts([0.0, 0.5, 1.0]), tick_texts([0.0, 0.0005])
    (['0', '5k', '10k'], ['0.0', '0.5', '1.0'], ['0', '5e-4'])
    """
    largest = max(abs(v) for v in values)
    step = min((b - a for a, b in pairwise(values)), default=largest)
    if largest >= 1e12 or (largest and largest < 1e-2):
        return [short(v) for v in values]
    unit, suffix = next(((u, s) for u, s in _SUFFIXES if largest >= 2 * u), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9)) if step else 0
    return [f"{v / unit:.{decimals}f}{suffix}" if v else (f"{0:.{decimals}f}" if not suffix else "0") for v in values]


def short(value: float) -> str:
    """Four significant digits.

    >>> short(0.00025), short(12.34567), short(48000)
    ('2.5e-4', '12.35', '48,000')
    """
    if value and not 1e-2 <= abs(value) < 1e9:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
