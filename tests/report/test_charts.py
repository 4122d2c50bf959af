"""Charts are drawn from anything: no point, one, many, gaps, constants, outliers."""

import re

import numpy as np
import pytest

from uniquery.report.charts import Series, bar, line_chart, stacked_bar
from uniquery.report.scales import as_points, axis_range, smooth, thin_out, tick_labels, ticks, visible_range


def chart(*pairs, **options):
    return line_chart([Series("curve", as_points(pairs), **options)], title="Title")


def coordinates(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]


def paths(text):
    return re.findall(r'<path class="line[^"]*" d="([^"]*)"><title>', text)


class TestLineChart:
    def test_no_point(self):
        assert "no data yet" in chart()
        assert "no data yet" in line_chart([], title="Title")
        assert "no data yet" in chart((0, None), (1, float("nan")))

    def test_one_point_is_a_dot(self):
        assert chart((100, 2.5)).count("<circle") == 1

    def test_many_points_are_a_thinned_line(self):
        (path,) = paths(chart(*((i, np.sin(i / 500)) for i in range(20_000))))
        assert 300 < len(coordinates(path)) <= 601

    def test_higher_values_are_higher_up_and_later_steps_further_right(self):
        (path,) = paths(chart((0, 1.0), (10, 2.0)))
        (x0, y0), (x1, y1) = coordinates(path)
        assert x1 > x0
        assert y1 < y0

    def test_a_marker_is_a_large_dot_outside_of_the_legend(self):
        curve = Series("curve", as_points([(i, i % 7) for i in range(100)]))
        marker = Series("chosen", as_points([(50, 3.0)]), marker=True)
        text = line_chart([curve, marker], title="Title")
        assert text.count("<circle") == text.count('r="6"') == 1
        assert "<li>" not in text
        assert len(paths(text)) == 1

    def test_gaps_break_the_line(self):
        (path,) = paths(chart((0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, 2.0)))
        assert path.count("M") == 2
        assert path.count("L") == 2

    def test_a_lonely_point_in_a_long_curve_still_shows(self):
        values = [(i, 1.0 + i % 2) for i in range(100)] + [(100, None), (101, 1.5), (102, None)]
        assert chart(*values).count("<circle") == 1

    @pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-12, 1e15, 5e-324, 1e299])
    def test_constant_curve(self, value):
        text = chart((0, value), (1, value), (2, value))
        assert "nan" not in text
        assert "inf" not in text

    def test_an_outlier_does_not_flatten_the_rest(self):
        values = [(i, 1e30 if i == 50 else 1.0 + i / 200) for i in range(200)]
        (path,) = paths(chart(*values))
        ys = [y for _, y in coordinates(path)]
        assert ys[0] - ys[-1] > 50
        assert min(ys) > -1e4

    def test_names_are_escaped(self):
        text = line_chart([Series("<b>&", as_points([(0, 1.0)]), color=i) for i in range(2)], title="<script>")
        assert "<script>" not in text
        assert "<b>" not in text
        assert text.count("&lt;b&gt;&amp;") >= 4

    def test_legend_lists_curves_but_not_background_ones(self):
        points = as_points([(0, 1.0), (1, 2.0)])
        text = line_chart([Series("raw", points, background=True), Series("a", points), Series("b", points)], title="t")
        assert re.findall(r"</svg>(\w+)</li>", text) == ["a", "b"]
        assert "legend" not in chart((0, 1.0))


class TestScales:
    @pytest.mark.parametrize(("low", "high"), [(0, 1), (0.3, 9.6), (-5, 5), (0, 90_000), (1e-6, 3e-6), (1e12, 3e12)])
    def test_ticks_cover_the_range_evenly(self, low, high):
        values = ticks(low, high)
        assert values[0] <= low
        assert values[-1] >= high
        assert 3 <= len(values) <= 10
        assert np.allclose(np.diff(values), values[1] - values[0])
        assert len(set(tick_labels(values))) == len(values)

    def test_span_is_never_empty(self):
        for value in (0.0, 1.0, -1.0, 1e-300, 1e300):
            low, high = axis_range(value, value)
            assert low < high

    def test_smoothing_keeps_a_constant_and_gaps_and_lowers_noise(self):
        steps = np.arange(1000.0)
        noise = np.random.default_rng(0).normal(size=1000)
        assert smooth(np.stack([steps, noise], 1))[:, 1].std() < 0.3
        assert np.allclose(smooth(np.stack([steps, np.full(1000, 3.0)], 1))[:, 1], 3.0)
        noise[500] = np.nan
        assert np.isnan(smooth(np.stack([steps, noise], 1))[:, 1]).nonzero()[0].tolist() == [500]
        assert smooth(np.zeros((0, 2))).shape == (0, 2)

    def test_smoothing_forgets_an_explosion(self):
        values = np.ones(1000)
        values[10] = 1e30
        assert np.allclose(smooth(np.stack([np.arange(1000.0), values], 1))[100:, 1], 1.0)

    def test_thinning_keeps_extremes_and_gaps(self):
        points = np.stack([np.arange(5000.0), np.zeros(5000)], 1)
        points[1234, 1], points[4321, 1], points[77, 1] = 9.0, -9.0, np.nan
        thinned = thin_out(points, 100)
        assert len(thinned) <= 110
        assert {9.0, -9.0} <= set(thinned[:, 1])
        assert np.isnan(thinned[:, 1]).any()

    def test_few_values_have_no_outliers(self):
        assert visible_range(np.array([0.0, 1.0, 1000.0])) == (0.0, 1000.0)


class TestBars:
    def test_missing_value_has_no_length(self):
        assert 'class="fill color0" width="0.00"' in bar(None, 10.0)
        assert 'class="fill color0" width="0.00"' in bar(5.0, 0.0)

    def test_parts_add_up(self):
        text = stacked_bar([("data", 0.010), ("forward", 0.030)], maximum=0.080, width=800)
        assert re.findall(r'x="([\d.]+)" width="([\d.]+)"', text) == [("0.0", "100.0"), ("100.0", "300.0")]
        assert "forward: 30.0 ms, 75%" in text

    def test_no_time_no_bar(self):
        assert stacked_bar([("data", 0.0)], maximum=0.0) == ""
