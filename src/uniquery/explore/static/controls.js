// The controls that several views share.

import { checkbox, h, select, slider } from "./dom.js";
import { KIND_COLORS, cssColor } from "./draw.js";
import { set, settings, start } from "./store.js";

/** Toggles, colors and thresholds of predictions. @returns {HTMLElement[]} */
export function drawingControls() {
  const controls = [checkbox("Ground truth", settings.truth, (truth) => set({ truth }))];
  if (!start.runs.length) return controls;
  const legend = kindLegend();
  legend.hidden = settings.color !== "kind";
  controls.push(
    checkbox("Predictions", settings.predictions, (predictions) => set({ predictions })),
    slider("Score at least", { min: 0.05, max: 1, step: 0.01, value: settings.score, input: (score) => set({ score }) }),
    maskSlider(settings.mask, (mask) => set({ mask })),
    select("Color by", [["instance", "instance"], ["class", "class"], ["kind", "kind of error"]], settings.color,
      (color) => { legend.hidden = color !== "kind"; set({ color }); }),
    legend,
  );
  return controls;
}

function kindLegend() {
  return h("ul", { class: "legend" }, ...Object.entries(KIND_COLORS).map(([kind, color]) => {
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = cssColor(color);
    return h("li", {}, swatch, ` ${kind}`);
  }));
}

/** 0 is the run's own threshold. */
export function maskSlider(value, input) {
  const thresholds = start.thresholds;
  return slider("Mask threshold", {
    min: 0, max: thresholds.length, step: 1, value: value == null ? 0 : thresholds.indexOf(value) + 1,
    show: (v) => (v === 0 ? "run's own" : thresholds[v - 1].toFixed(1)),
    input: (v) => input(v === 0 ? null : thresholds[v - 1]),
  });
}

/** Which run, as a select; nothing if there is only one. */
export function runSelect(label, value, change) {
  if (start.runs.length < 2) return h("span", { class: "visually-hidden" }, start.runs[0] ?? "");
  return select(label, start.runs.map((name, number) => [String(number), name]), value, (v) => change(Number(v)));
}
