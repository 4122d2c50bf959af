// The prediction on g(I) beside g of the prediction on I.

import { fetchJson, loadImage } from "./api.js";
import { runSelect } from "./controls.js";
import { checkbox, debounced, h, percent, slider } from "./dom.js";
import { cssColor, drawLayers, fit } from "./draw.js";
import { indexOf, settings, shown, start } from "./store.js";

const choice = { flip: true, crop: 1, angle: 0, scale: 1 };
const SIDE = 460;

/** @param {HTMLElement} main @param {string[]} rest @returns {() => void} */
export function showEquivariance(main, [text]) {
  const id = text ? Number(text) : start.images.id[shown[0] ?? 0], index = indexOf(id);
  if (index === undefined) throw new Error(`There is no image with the id ${text}.`);
  let isClosed = false, number = 0, run = settings.run;
  const result = h("div", { "aria-live": "polite" }, h("p", { class: "note" }, "Computing…"));
  const compute = async () => {
    const own = ++number;
    const query = new URLSearchParams({ run: String(run), image: String(id), flip: choice.flip ? "1" : "0", crop: String(choice.crop), angle: String(choice.angle), scale: String(choice.scale) });
    try {
      const [found, picture] = await Promise.all([fetchJson(`api/equivariance?${query}`), loadImage(`api/view?${query}`)]);
      if (!isClosed && own === number) result.replaceChildren(...resultOf(found, picture));
    } catch (error) {
      if (!isClosed && own === number) result.replaceChildren(h("p", { class: "error" }, String(error?.message ?? error)));
    }
  };
  const soon = debounced(compute, 200);
  const slide = (label, key, limits, show) => slider(label, { ...limits, value: choice[key], show, input: (value) => { choice[key] = value; soon(); } });
  main.replaceChildren(
    h("h2", {}, `Equivariance: ${start.images.name[index]}`),
    h("div", { class: "bar" }, h("a", { href: `#image/${id}` }, "← Image"), h("span", { class: "note" }, "Choose another image in the gallery.")),
    h("div", { class: "bar" },
      runSelect("Run", run, (value) => { run = value; soon(); }),
      checkbox("Flip", choice.flip, (flip) => { choice.flip = flip; soon(); }),
      slide("Crop", "crop", { min: 0.25, max: 1, step: 0.05 }, (v) => `${Math.round(100 * v)} %`),
      slide("Rotation", "angle", { min: -180, max: 180, step: 5 }, (v) => `${v}°`),
      slide("Scale", "scale", { min: 0.5, max: 2, step: 0.05 }, (v) => `× ${v.toFixed(2)}`)),
    result);
  compute();
  return () => { isClosed = true; };
}

function resultOf(found, picture) {
  const owner = new Map(found.partners.map((partner, i) => [partner, i]));
  const colors = start.colors;
  const moved = panel("g of the prediction on I", picture, found, found.moved, (i) => colors[i % colors.length]);
  const view = panel("Prediction on g(I)", picture, found, found.view, (i) => (owner.has(i) ? colors[owner.get(i) % colors.length] : [150, 150, 150]));
  const rows = found.moved.map(([name, score], i) => {
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = cssColor(colors[i % colors.length]);
    return h("tr", {}, h("td", {}, swatch, ` ${name}`), h("td", {}, score.toFixed(2)), h("td", {}, found.partners[i] < 0 ? "not found" : percent(found.ious[i])));
  });
  return [
    h("p", { id: "equivariance-summary" }, `Mean IoU ${percent(found.mean_iou)} over ${found.moved.length} confident instances · feature distance ${percent(found.feature_error)} of the features' variance`),
    h("div", { class: "side-by-side" }, moved, view),
    h("div", { class: "table-wrap panel", tabindex: 0, role: "region", "aria-label": "IoU of each instance" }, h("table", {}, h("caption", { class: "visually-hidden" }, "IoU of each instance"),
      h("thead", {}, h("tr", {}, ...["Instance", "score", "IoU"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, ...rows))),
  ];
}

function panel(title, picture, found, rows, color) {
  const canvas = h("canvas", { ...fit(found.width, found.height, SIDE), role: "img", "aria-label": title });
  drawLayers(canvas, picture, found, [{ masks: rows.map((row, i) => [i, row[2]]).reverse(), color, filled: true }]);
  return h("section", { class: "panel" }, h("h3", {}, title), canvas);
}
