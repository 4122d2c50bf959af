"""The numbers of a chart: axis ranges, round ticks and their labels, smoothing, fewer points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]  # (N, 2) of x, y; y is nan in a gap

_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def as_points(pairs: Sequence[tuple[float, float | None]]) -> Points:
    """(N, 2), with nan for every y that is missing, infinite or too large to add up.

    >>> as_points([(0, 1.5), (1, None), (2, float("inf"))]).tolist()
    [[0.0, 1.5], [1.0, nan], [2.0, nan]]
    """
    points = np.array([(x, np.nan if y is None else y) for x, y in pairs], np.float64).reshape(-1, 2)
    points[~(np.abs(points[:, 1]) < 1e300), 1] = np.nan
    return points


def smooth(points: Points, share: float = 0.04) -> Points:
    """A moving average over a share of the curve; a curve of few points stays as it is, and so do gaps.

    >>> smooth(np.array([[0, 0.0], [1, 3.0], [2, 0.0]]), share=0.7)[:, 1].tolist()
    [1.5, 1.0, 1.5]
    """
    half = round(len(points) * share / 2)
    is_finite = np.isfinite(points[:, 1])
    window = np.ones(2 * half + 1)
    middle = slice(half, half + len(points))
    # Not by differences of a cumulative sum: after one loss of 1e30 they would have no correct digit left.
    sums = np.convolve(np.where(is_finite, points[:, 1], 0.0), window)[middle] if len(points) else points[:, 1]
    counts = np.convolve(is_finite, window)[middle] if len(points) else points[:, 1]
    return np.stack([points[:, 0], np.where(is_finite, sums / np.maximum(counts, 1), np.nan)], axis=1)


def thin_out(points: Points, max_points: int = 600) -> Points:
    """Fewer points that look the same: the lowest and the highest of each section, and any gap.

    Gaps may make them a few more than `max_points`.

    >>> thin_out(np.array([[0, 1.0], [1, 9.0], [2, 2.0], [3, 0.0]]), max_points=2).tolist()
    [[1.0, 9.0], [3.0, 0.0]]
    """
    if len(points) <= max_points:
        return points
    kept: set[int] = set()
    for section in np.array_split(np.arange(len(points)), max(1, max_points // 2)):
        ys = points[section, 1]
        if np.isnan(ys).any():
            kept.add(int(section[np.isnan(ys).argmax()]))
        if not np.isnan(ys).all():
            kept |= {int(section[np.nanargmin(ys)]), int(section[np.nanargmax(ys)])}
    return points[sorted(kept)]


def visible_range(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Lowest and highest value, without the few outliers that would flatten the rest; (0, 1) if there is no value.

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
    spread = last - first
    if spread and len(values) >= 100:
        low = low if first - low <= 2 * spread else first - spread / 4
        high = high if high - last <= 2 * spread else last + spread / 4
    return low, high


def axis_range(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty, and starts at zero if `low` is near zero.

    >>> axis_range(0.2, 1.0), axis_range(3.0, 3.0), axis_range(0.0, 0.0), axis_range(0.9, 1.0)
    ((0.0, 1.0), (2.7, 3.3), (0.0, 1.0), (0.9, 1.0))
    """
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        margin = abs(high) * 0.1
        return (low - margin, high + margin) if margin > 1e-300 else (0.0, 1.0)
    return (0.0, high) if 0 <= low <= 0.5 * high else (low, high)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers at steps of 1, 2 or 5 times a power of ten, from `low` or below to `high` or above.

    >>> ticks(0.3, 9.6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.7)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Multiplying by a power of ten leaves 0.30000000000000004; ten significant digits are enough for an axis.
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Short texts for the ticks of one axis, all in the same unit.

    >>> tick_labels([0, 5000, 10000]), tick_labels([0.0, 0.5, 1.0]), tick_labels([0.0, 0.0005])
    (['0', '5k', '10k'], ['0.0', '0.5', '1.0'], ['0', '5e-4'])
    """
    largest = max(abs(v) for v in values)
    step = min((b - a for a, b in pairwise(values)), default=largest)
    if largest >= 1e12 or (largest and largest < 1e-2):
        return [format_number(v) for v in values]
    unit, suffix = next(((u, s) for u, s in _SUFFIXES if largest >= 2 * u), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9)) if step else 0
    return [f"{v / unit:.{decimals}f}{suffix}" if v else (f"{0:.{decimals}f}" if not suffix else "0") for v in values]


def format_number(value: float) -> str:
    """The number with four significant digits.

    >>> format_number(0.00025), format_number(12.34567), format_number(48000)
    ('2.5e-4', '12.35', '48,000')
    """
    if value and not 1e-2 <= abs(value) < 1e9:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
