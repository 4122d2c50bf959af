"""Charts as inline SVG: lines, bars, stacked bars. The style sheet of the page colors them, in light and dark mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from markupsafe import Markup

from uniquery.report.scales import Points, axis_range, format_number, thin_out, tick_labels, ticks, visible_range

NUM_COLORS = 8  # colors in the style sheet: .color0 to .color7
_MAX_DOTS = 60  # a curve with at most this many points shows each of them, with its value on hover
_TOP, _RIGHT, _BOTTOM = 22.0, 14.0, 38.0  # margins in pixels, for the labels of the axes


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: name in the legend.
        points: (N, 2) of x, y in order of x; nan in y is a gap.
        color: index of a color of the style sheet.
        dashed: drawn in dashes.
        background: drawn thin and pale behind the others, and not in the legend.
        marker: points drawn as large dots without a line, and not in the legend.
    """

    name: str
    points: Points
    color: int = 0
    dashed: bool = False
    background: bool = False
    marker: bool = False

    @property
    def css_class(self) -> str:
        """Its classes in the style sheet."""
        styles = (" dashed" if self.dashed else "", " background" if self.background else "")
        return f"color{self.color % NUM_COLORS}{''.join(styles)}"


@dataclass(frozen=True)
class _Frame:
    """The axis ranges and the size of a plot in pixels."""

    xs: tuple[float, float]
    ys: tuple[float, float]
    width: float
    height: float

    def to_pixels(self, points: Points) -> Points:
        """(N, 2): x, y of each point in pixels, from the top left corner of the plot."""
        x = (points[:, 0] - self.xs[0]) / (self.xs[1] - self.xs[0]) * self.width
        # Clipped far outside of the plot, since browsers cannot draw a coordinate of 1e30.
        y = np.clip((self.ys[1] - points[:, 1]) / (self.ys[1] - self.ys[0]), -9, 9) * self.height
        return np.stack([x, y], axis=1)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "step",
    y_label: str = "",
    size: tuple[int, int] = (520, 260),
) -> Markup:
    """A figure with title, axes, curves, and a legend if there are several curves; says so if there is no data.

    Args:
        series: the curves; later ones are drawn over earlier ones.
        title: above the chart.
        x_label: under the horizontal axis.
        y_label: above the vertical axis.
        size: width and height in pixels at full size.

    >>> chart = line_chart([Series("AP", np.array([[0.0, 1.0], [10.0, 2.0]]))], title="AP <val>")
    >>> "AP &lt;val&gt;" in chart, chart.count("<circle")
    (True, 2)
    """
    series = [curve for curve in series if np.isfinite(curve.points[:, 1]).any()]
    body = _plot(series, x_label, y_label, size) if series else _empty_plot(size)
    return Markup('<figure class="chart"><figcaption>{}</figcaption>{}{}</figure>').format(title, body, legend(series))


def legend(series: Sequence[Series]) -> Markup:
    """The names of the curves with a sample of their lines; empty for fewer than two curves."""
    named = [curve for curve in series if not curve.background and not curve.marker]
    if len(named) < 2:
        return Markup("")
    sample = Markup('<svg viewBox="0 0 22 8" aria-hidden="true"><path class="line {}" d="M0 4H22"/></svg>')
    rows = [Markup("<li>{}{}</li>").format(sample.format(curve.css_class), curve.name) for curve in named]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(rows))


def _empty_plot(size: tuple[int, int]) -> Markup:
    return Markup(
        '<svg class="plot" viewBox="0 0 {0} {1}" role="img"><rect class="empty" x="1" y="1" width="{2}" height="{3}" '
        'rx="6"/><text class="hint" x="{4}" y="{5}" text-anchor="middle">no data yet</text></svg>'
    ).format(*size, size[0] - 2, size[1] - 2, size[0] / 2, size[1] / 2 + 4)


def _plot(series: Sequence[Series], x_label: str, y_label: str, size: tuple[int, int]) -> Markup:
    steps = np.concatenate([curve.points[:, 0] for curve in series])
    xs = axis_range(float(steps.min()), float(steps.max()))
    y_ticks = ticks(*axis_range(*visible_range(np.concatenate([curve.points[:, 1] for curve in series]))))
    y_texts = tick_labels(y_ticks)
    left = 14 + 6.6 * max(len(text) for text in y_texts)
    frame = _Frame(xs, (y_ticks[0], y_ticks[-1]), size[0] - left - _RIGHT, size[1] - _TOP - _BOTTOM)
    lines = sorted((curve for curve in series if not curve.marker), key=lambda s: not s.background)
    curves = Markup("").join(_curve(curve, frame) for curve in lines)
    dots = Markup("").join(_dots(curve, frame) for curve in series if not curve.background)
    # An inner svg cuts off outliers. It is 4 pixels taller than the plot, so that a line on its edge is not cut.
    window = Markup('<svg y="-2" width="{0:.1f}" height="{1:.1f}" viewBox="0 -2 {0:.1f} {1:.1f}">{2}</svg>')
    return Markup(
        '<svg class="plot" viewBox="0 0 {} {}" role="img"><text x="0" y="12">{}</text>'
        '<g transform="translate({:.1f} {})">{}{}{}</g><text x="{:.1f}" y="{}" text-anchor="middle">{}</text></svg>'
    ).format(
        *size,
        y_label,
        left,
        _TOP,
        _y_axis(y_ticks, y_texts, frame) + _x_axis(frame),
        window.format(frame.width, frame.height + 4, curves),
        dots,
        left + frame.width / 2,
        size[1] - 4,
        x_label,
    )


def _y_axis(values: Sequence[float], texts: Sequence[str], frame: _Frame) -> Markup:
    rows = frame.to_pixels(np.array([[frame.xs[0], value] for value in values]))[:, 1]
    line = Markup(
        '<line class="gridline" x1="0" x2="{0:.1f}" y1="{1:.1f}" y2="{1:.1f}"/>'
        '<text x="-8" y="{2:.1f}" text-anchor="end">{3}</text>'
    )
    return Markup("").join(line.format(frame.width, y, y + 4, text) for y, text in zip(rows, texts, strict=True))


def _x_axis(frame: _Frame) -> Markup:
    inside = [v for v in ticks(*frame.xs, max(2, int(frame.width // 60))) if frame.xs[0] <= v <= frame.xs[1]]
    columns = frame.to_pixels(np.array([[value, frame.ys[0]] for value in inside]))[:, 0]
    line = Markup(
        '<line class="axis" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>'
        '<text x="{0:.1f}" y="{3:.1f}" text-anchor="middle">{4}</text>'
    )
    marks = [
        line.format(x, frame.height, frame.height + 4, frame.height + 17, text)
        for x, text in zip(columns, tick_labels(inside), strict=True)
    ]
    base = Markup('<line class="axis" x1="0" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    return base.format(frame.width, frame.height, frame.height) + Markup("").join(marks)


def _curve(curve: Series, frame: _Frame) -> Markup:
    """The path of a curve, broken at its gaps; the svg around it cuts off what lies outside."""
    commands, is_drawing = [], False
    for x, y in frame.to_pixels(thin_out(curve.points)):
        if np.isnan(y):
            is_drawing = False
            continue
        commands.append(f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}")
        is_drawing = True
    last = curve.points[np.isfinite(curve.points[:, 1])][-1]
    return Markup('<path class="line {}" d="{}"><title>{}: {} at {}</title></path>').format(
        curve.css_class, "".join(commands), curve.name, format_number(last[1]), format_number(last[0])
    )


def _dots(curve: Series, frame: _Frame) -> Markup:
    """Each point of a short curve; of a long curve only the points between two gaps, which have no line."""
    is_finite = np.isfinite(curve.points[:, 1])
    padded = np.pad(is_finite, 1)
    has_dot = is_finite if is_finite.sum() <= _MAX_DOTS else is_finite & ~padded[:-2] & ~padded[2:]
    dot = Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}: {} at {}</title></circle>')
    inside = has_dot & (curve.points[:, 1] >= frame.ys[0]) & (curve.points[:, 1] <= frame.ys[1])
    positions, radius = frame.to_pixels(curve.points[inside]), 6 if curve.marker else 2 if curve.dashed else 3
    return Markup("").join(
        dot.format(curve.css_class, x, y, radius, curve.name, format_number(value), format_number(step))
        for (x, y), (step, value) in zip(positions, curve.points[inside], strict=True)
    )


def bar(value: float | None, maximum: float, color: int = 0) -> Markup:
    """A horizontal bar, full if the value is `maximum`, and empty if there is no value.

    >>> 'class="fill color0" width="50.00"' in bar(25.0, 50.0)
    True
    """
    share = 100 * min(max(value / maximum, 0.0), 1.0) if value is not None and maximum > 0 else 0.0
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="8"/><rect class="fill color{}" width="{:.2f}" height="8"/></svg>'
    ).format(color % NUM_COLORS, share)


def stacked_bar(segments: Sequence[tuple[str, float]], maximum: float, width: int = 1040) -> Markup:
    """One horizontal bar of colored segments. Its full width stands for `maximum`, so that bars can be compared.

    A segment shows its share of the bar if it is wide enough, and its name and time in milliseconds on hover.

    Args:
        segments: (name, seconds).
        maximum: seconds of a bar of full width.
        width: width in pixels.
    """
    total = sum(seconds for _, seconds in segments)
    if total <= 0 or maximum <= 0:
        return Markup("")
    ends = [width * end / maximum for end in accumulate((seconds for _, seconds in segments), initial=0.0)]
    block = Markup(
        '<g><title>{}: {:.1f} ms, {:.0%}</title><rect class="fill color{}" x="{:.1f}" width="{:.1f}" height="34"/>'
        '<text class="share" x="{:.1f}" y="22" text-anchor="middle">{}</text></g>'
    )
    blocks = []
    for i, ((name, seconds), (left, right)) in enumerate(zip(segments, pairwise(ends), strict=True)):
        share = f"{seconds / total:.0%}" if right - left > 44 else ""
        position = (left, right - left, (left + right) / 2)
        blocks.append(block.format(name, seconds * 1e3, seconds / total, i % NUM_COLORS, *position, share))
    return Markup('<svg class="stack" viewBox="0 0 {} 34" role="img">{}</svg>').format(width, Markup("").join(blocks))


@dataclass(frozen=True)
class Interval:
    """A value with the interval around it, as a row of `interval_chart`; without an interval it is a dot."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    color: int = 0


def interval_chart(intervals: Sequence[Interval], *, title: str, x_label: str, width: int = 640) -> Markup:
    """Rows of values with horizontal intervals around them, and a vertical line at 0.

    >>> chart = interval_chart([Interval("a", 1.0, -0.5, 2.5)], title="difference", x_label="AP")
    >>> chart.count("<circle"), "a: 1 (-0.5 to 2.5)" in chart
    (1, True)
    """
    ends = [v for i in intervals for v in (0.0, i.value, i.low, i.high) if v is not None]
    x_ticks = ticks(*axis_range(min(ends, default=0.0), max(ends, default=1.0)))
    low, high = min(x_ticks[0], 0.0), max(x_ticks[-1], 0.0)
    left = 14 + 6.2 * max((len(i.name) for i in intervals), default=0)
    height = 26 * len(intervals)

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - 14)

    line = Markup(
        '<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="4" y2="{}"/>'
        '<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>'
    )
    grid = Markup("").join(
        line.format("gridline" if tick else "axis", x(tick), x(tick), height + 4, x(tick), height + 18, text)
        for tick, text in zip(x_ticks, tick_labels(x_ticks), strict=True)
    )
    rows = Markup("").join(_interval_row(one, x, 17 + 26 * i, left) for i, one in enumerate(intervals))
    body = Markup(
        '<svg class="plot" viewBox="0 0 {} {}" role="img">{}{}'
        '<text x="{:.1f}" y="{}" text-anchor="middle">{}</text></svg>'
    ).format(width, height + 40, grid, rows, (left + width) / 2, height + 34, x_label)
    return Markup('<figure class="chart"><figcaption>{}</figcaption>{}</figure>').format(title, body)


def _interval_row(one: Interval, x: Callable[[float], float], y: float, left: float) -> Markup:
    text, bar = format_number(one.value), Markup("")
    if one.low is not None and one.high is not None:
        text = f"{text} ({format_number(one.low)} to {format_number(one.high)})"
        bar = Markup('<line class="line color{}" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>').format(
            one.color % NUM_COLORS, x(one.low), x(one.high), y, y
        )
    return Markup(
        '<g><title>{}: {}</title><text x="{:.1f}" y="{}" text-anchor="end">{}</text>{}'
        '<circle class="dot color{}" cx="{:.1f}" cy="{}" r="4"/></g>'
    ).format(one.name, text, left - 8, y + 4, one.name, bar, one.color % NUM_COLORS, x(one.value), y)
