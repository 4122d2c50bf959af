// Curves and histograms as SVG.

import { h, svg } from "./dom.js";

const WIDTH = 520, HEIGHT = 200, LEFT = 44, RIGHT = 10, TOP = 10, BOTTOM = 26;

/** Round numbers between two values. */
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw) ?? raw;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(6)));
  return found;
}

function frame(label, [x0, x1], [y0, y1], showX, showY) {
  const x = (value) => LEFT + (value - x0) / (x1 - x0 || 1) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value - y0) / (y1 - y0 || 1) * (HEIGHT - TOP - BOTTOM);
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const value of ticks(y0, y1)) {
    chart.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, showY(value)));
  }
  for (const value of ticks(x0, x1, 5)) chart.append(svg("text", { x: x(value), y: HEIGHT - 8, "text-anchor": "middle" }, showX(value)));
  return { chart, x, y };
}

const short = (value) => (Math.abs(value) >= 10000 ? `${value / 1000}k` : String(value));

/**
 * @param {string} label
 * @param {{name: string, x: number[], y: (number|null)[], dots?: boolean}[]} series
 */
export function lineChart(label, series) {
  const xs = series.flatMap((one) => one.x), ys = series.flatMap((one) => one.y.filter((value) => value != null));
  if (!ys.length) return h("p", { class: "note" }, `${label}: nothing yet`);
  const { chart, x, y } = frame(label, [0, Math.max(...xs, 1)], [Math.min(0, ...ys), Math.max(...ys, 1e-9)], short, short);
  series.forEach((one, number) => {
    const points = one.x.map((value, i) => [value, one.y[i]]).filter(([, value]) => value != null);
    chart.append(svg("polyline", { class: `curve s${number % 6} dash${Math.floor(number / 2) % 3}`, points: points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
    if (one.dots) for (const [a, b] of points) chart.append(svg("circle", { class: `dot s${number % 6}`, cx: x(a), cy: y(b), r: 3 }));
  });
  return h("figure", { class: "figure" }, h("figcaption", { class: "note" }, label), chart, legend(series.map((one) => one.name)));
}

/**
 * Shares in bins of 0 to 1, groups beside each other.
 * @param {string} label @param {{name: string, values: number[]}[]} groups
 */
export function histogram(label, groups) {
  const bins = groups[0].values.length, top = Math.max(0.01, ...groups.flatMap((group) => group.values));
  const { chart, x, y } = frame(label, [0, 1], [0, top], (v) => String(v), (v) => `${Math.round(100 * v)} %`);
  groups.forEach((group, number) => group.values.forEach((value, bin) => {
    const width = (WIDTH - LEFT - RIGHT) / bins / groups.length;
    chart.append(svg("rect", { class: `column s${number}`, x: x(bin / bins) + number * width, width: Math.max(1, width - 0.8), y: y(value), height: Math.max(0, y(0) - y(value)) }));
  }));
  return h("figure", { class: "figure" }, h("figcaption", { class: "note" }, label), chart, legend(groups.map((group) => group.name)));
}

function legend(names) {
  return h("ul", { class: "legend" }, ...names.map((name, number) => h("li", {}, h("span", { class: `key s${number % 6} dash${Math.floor(number / 2) % 3}` }), name)));
}
