"""Charts as inline SVG: lines, bars, stacked bars; the page's style sheet colors them, so they follow its theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from markupsafe import Markup

from uniquery.report.scales import Points, short, span, thin, tick_texts, ticks, visible_range

TONES = 8  # how many colors the style sheet has: .tone0 to .tone7
_MOST_DOTS = 60  # a curve with fewer points shows each of them, with its value on hover
_TOP, _RIGHT, _BOTTOM = 22.0, 14.0, 38.0  # margins in pixels: unit of the y axis, half a tick, ticks and x axis


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: for the legend.
        points: (N, 2) of x, y in order of x; nan in y is a gap.
        tone: which of the page's colors.
        dashed: drawn in dashes.
        faint: drawn thin behind the others and left out of the legend.
    """

    name: str
    points: Points
    tone: int = 0
    dashed: bool = False
    faint: bool = False


@dataclass(frozen=True)
class _Frame:
    """Where values lie on the picture: x, y in pixels of the plot's own corner."""

    xs: tuple[float, float]
    ys: tuple[float, float]
    width: float
    height: float

    def place(self, points: Points) -> Points:
        x = (points[:, 0] - self.xs[0]) / (self.xs[1] - self.xs[0]) * self.width
        # Far outside is as good as outside, and browsers cannot draw a coordinate of 1e30.
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
    """A figure with its title, axes, curves and, of several curves, a legend; says so if there is nothing to draw.

    Args:
        series: the curves; the first is drawn undermost.
        title: above the chart.
        x_label: under the horizontal axis.
        y_label: above the vertical axis.
        size: width and height in pixels at full size.

    >>> chart = line_chart([Series("AP", np.array([[0.0, 1.0], [10.0, 2.0]]))], title="AP <val>")
    >>> "AP &lt;val&gt;" in chart, chart.count("<circle")
    (True, 2)
    """
    known = [one for one in series if np.isfinite(one.points[:, 1]).any()]
    body = _plot(known, x_label, y_label, size) if known else _nothing(size)
    return Markup('<figure class="chart"><figcaption>{}</figcaption>{}{}</figure>').format(title, body, legend(known))


def legend(series: Sequence[Series]) -> Markup:
    """A list of names with their strokes; empty for fewer than two."""
    named = [one for one in series if not one.faint]
    if len(named) < 2:
        return Markup("")
    stroke = Markup('<svg viewBox="0 0 22 8" aria-hidden="true"><path class="line tone{}{}" d="M0 4H22"/></svg>')
    rows = [
        Markup("<li>{}{}</li>").format(stroke.format(one.tone % TONES, " dashed" if one.dashed else ""), one.name)
        for one in named
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(rows))


def _nothing(size: tuple[int, int]) -> Markup:
    return Markup(
        '<svg class="plot" viewBox="0 0 {0} {1}" role="img"><rect class="empty" x="1" y="1" width="{2}" height="{3}" '
        'rx="6"/><text class="hint" x="{4}" y="{5}" text-anchor="middle">no data yet</text></svg>'
    ).format(*size, size[0] - 2, size[1] - 2, size[0] / 2, size[1] / 2 + 4)


def _plot(series: Sequence[Series], x_label: str, y_label: str, size: tuple[int, int]) -> Markup:
    steps = np.concatenate([one.points[:, 0] for one in series])
    xs = span(float(steps.min()), float(steps.max()))
    y_ticks = ticks(*span(*visible_range(np.concatenate([one.points[:, 1] for one in series]))))
    y_texts = tick_texts(y_ticks)
    left = 14 + 6.6 * max(len(text) for text in y_texts)
    frame = _Frame(xs, (y_ticks[0], y_ticks[-1]), size[0] - left - _RIGHT, size[1] - _TOP - _BOTTOM)
    curves = Markup("").join(_curve(one, frame) for one in sorted(series, key=lambda s: not s.faint))
    dots = Markup("").join(_dots(one, frame) for one in series if not one.faint)
    # An svg inside cuts off outliers; it is a stroke taller than the frame so that a curve on its edge is whole.
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
    rows = frame.place(np.array([[frame.xs[0], value] for value in values]))[:, 1]
    line = Markup(
        '<line class="rule" x1="0" x2="{0:.1f}" y1="{1:.1f}" y2="{1:.1f}"/>'
        '<text x="-8" y="{2:.1f}" text-anchor="end">{3}</text>'
    )
    return Markup("").join(line.format(frame.width, y, y + 4, text) for y, text in zip(rows, texts, strict=True))


def _x_axis(frame: _Frame) -> Markup:
    about = max(2, int(frame.width // 60))
    inside = [v for v in ticks(*frame.xs, about) if frame.xs[0] <= v <= frame.xs[1]]
    columns = frame.place(np.array([[value, frame.ys[0]] for value in inside]))[:, 0]
    line = Markup(
        '<line class="axis" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>'
        '<text x="{0:.1f}" y="{3:.1f}" text-anchor="middle">{4}</text>'
    )
    marks = [
        line.format(x, frame.height, frame.height + 4, frame.height + 17, text)
        for x, text in zip(columns, tick_texts(inside), strict=True)
    ]
    base = Markup('<line class="axis" x1="0" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    return base.format(frame.width, frame.height, frame.height) + Markup("").join(marks)


def _curve(one: Series, frame: _Frame) -> Markup:
    """The path of one curve, broken at its gaps; what exceeds the frame is cut off by the svg around it."""
    pieces, pen_down = [], False
    for x, y in frame.place(thin(one.points)):
        if np.isnan(y):
            pen_down = False
            continue
        pieces.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
    last = one.points[np.isfinite(one.points[:, 1])][-1]
    kind = f"line tone{one.tone % TONES}{' faint' if one.faint else ''}{' dashed' if one.dashed else ''}"
    return Markup('<path class="{}" d="{}"><title>{}: {} at {}</title></path>').format(
        kind, "".join(pieces), one.name, short(last[1]), short(last[0])
    )


def _dots(one: Series, frame: _Frame) -> Markup:
    """Each point of a short curve, or else only those that stand alone between gaps and have no line to show them."""
    known = np.isfinite(one.points[:, 1])
    around = np.pad(known, 1)
    shown = known if known.sum() <= _MOST_DOTS else known & ~around[:-2] & ~around[2:]
    dot = Markup('<circle class="dot tone{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}: {} at {}</title></circle>')
    inside = shown & (one.points[:, 1] >= frame.ys[0]) & (one.points[:, 1] <= frame.ys[1])
    places = frame.place(one.points[inside])
    return Markup("").join(
        dot.format(one.tone % TONES, x, y, 2 if one.dashed else 3, one.name, short(value), short(step))
        for (x, y), (step, value) in zip(places, one.points[inside], strict=True)
    )


def bar(value: float | None, most: float, tone: int = 0) -> Markup:
    """A horizontal bar as wide as its place if the value is `most`; only its track if there is no value.

    >>> 'class="fill tone0" width="50.00"' in bar(25.0, 50.0)
    True
    """
    share = 100 * min(max(value / most, 0.0), 1.0) if value is not None and most > 0 else 0.0
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="8"/><rect class="fill tone{}" width="{:.2f}" height="8"/></svg>'
    ).format(tone % TONES, share)


def stacked_bar(parts: Sequence[tuple[str, float]], most: float, width: int = 1040) -> Markup:
    """One horizontal bar of colored parts; its full width stands for `most`, so several bars can be compared.

    A part shows its share of the bar where there is room, and its name and amount (seconds, in milliseconds) on hover.
    """
    total = sum(amount for _, amount in parts)
    if total <= 0 or most <= 0:
        return Markup("")
    ends = [width * end / most for end in accumulate((amount for _, amount in parts), initial=0.0)]
    block = Markup(
        '<g><title>{}: {:.1f} ms, {:.0%}</title><rect class="fill tone{}" x="{:.1f}" width="{:.1f}" height="34"/>'
        '<text class="share" x="{:.1f}" y="22" text-anchor="middle">{}</text></g>'
    )
    blocks = []
    for i, ((name, amount), (left, right)) in enumerate(zip(parts, pairwise(ends), strict=True)):
        share = f"{amount / total:.0%}" if right - left > 44 else ""
        place = (left, right - left, (left + right) / 2)
        blocks.append(block.format(name, amount * 1e3, amount / total, i % TONES, *place, share))
    return Markup('<svg class="stack" viewBox="0 0 {} 34" role="img">{}</svg>').format(width, Markup("").join(blocks))
