// One image: ground truth and the predictions of every run side by side; instances can be clicked.

import { fetchJson, loadImage, pictureAddress } from "./api.js";
import { drawingControls } from "./controls.js";
import { h } from "./dom.js";
import { cssColor, drawLayers, fit, kindColor } from "./draw.js";
import { layersOf, truthLayer } from "./layers.js";
import { analyses, indexOf, instanceColor, last, masks, predictionsAt, predictionsOf, settings, shown, start, subscribe } from "./store.js";

const SIDE = 720;

/** @param {HTMLElement} main @param {string[]} rest @returns {() => void} */
export function showImage(main, [text]) {
  const id = Number(text), index = indexOf(id);
  if (index === undefined) throw new Error(`There is no image with the id ${text}.`);
  last.image = index;
  const panels = start.runs.length ? start.runs.map((name, run) => new ImagePanel(id, index, run, name)) : [new ImagePanel(id, index, null, "ground truth")];
  const position = shown.indexOf(index);
  const neighbor = (step) => { const next = shown[position + step]; if (next !== undefined) location.hash = `#image/${start.images.id[next]}`; };
  const [height, width] = start.images.size[index];
  const links = [h("a", { href: "#gallery" }, "← Gallery")];
  if (start.runs.length) links.push(h("a", { href: `#equivariance/${id}` }, "Equivariance of this image"));
  main.replaceChildren(
    h("h2", {}, start.images.name[index]),
    h("div", { class: "bar" }, ...links,
      h("button", { type: "button", onclick: () => neighbor(-1), "aria-label": "Previous image" }, "←"),
      h("button", { type: "button", onclick: () => neighbor(1), "aria-label": "Next image" }, "→"),
      h("span", { class: "note" }, `id ${id} · ${width} × ${height} · ${position + 1} of ${shown.length}`)),
    h("div", { class: "bar" }, ...drawingControls()),
    h("p", { class: "note" }, start.runs.length ? "Click an instance to see where its query responds. White outlines are the ground truth." : ""),
    h("div", { class: "side-by-side image" }, ...panels.map((panel) => panel.element)));
  main.scrollTop = 0;
  const draw = () => panels.forEach((panel) => panel.draw());
  draw();
  const onKey = (event) => {
    if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) return;
    if (event.key === "ArrowLeft") neighbor(-1);
    if (event.key === "ArrowRight") neighbor(1);
  };
  document.addEventListener("keydown", onKey);
  const end = subscribe((what) => { if (what === "settings" || what === "masks" || what === "analysis") draw(); });
  return () => { end(); document.removeEventListener("keydown", onKey); panels.forEach((panel) => { panel.isClosed = true; }); };
}

class ImagePanel {
  constructor(id, index, run, name) {
    Object.assign(this, { id, index, run, isClosed: false, draws: 0, ids: [], predictions: [], signature: "" });
    const [height, width] = start.images.size[index];
    this.image = { height, width };
    const size = fit(width, height, SIDE);
    this.canvas = h("canvas", { ...size, class: run == null ? "" : "clickable", role: "img", "aria-label": `${start.images.name[index]}: ${name}`, onclick: (event) => this.onClick(event) });
    this.caption = h("p", { class: "note" });
    this.list = h("ul", { class: "instances", "aria-label": `Instances of ${name}`, tabindex: 0 });
    this.element = h("section", { class: "panel" }, h("h3", {}, name), this.canvas, this.caption, this.list);
    this.picture = loadImage(pictureAddress(id));
    if (run != null) fetchJson(`api/prepare?run=${run}&image=${id}`).catch(() => {}); // the query view says what is wrong
  }

  async draw() {
    const number = ++this.draws;
    try {
      const [picture, known] = await Promise.all([this.picture, masks.get(this.id)]);
      const predictions = this.run == null ? null : await predictionsOf(this.run, this.id, known);
      if (this.isClosed || number !== this.draws) return;
      this.known = known;
      this.predictions = predictions ?? [];
      const layers = this.run == null ? [truthLayer(known.truth)] : layersOf(known, this.run, predictions);
      if (settings.mask != null && this.run != null) this.fetchOthers();
      this.ids = drawLayers(this.canvas, picture, this.image, this.run == null && !settings.truth ? [] : layers);
      this.describe();
    } catch (error) {
      this.caption.textContent = String(error?.message ?? error);
    }
  }

  /** All thresholds, so that the slider acts at once from its second move on. */
  fetchOthers() {
    for (const mask of start.thresholds) predictionsAt.get(`${this.run}/${this.id}/${mask}`).catch(() => {});
  }

  describe() {
    const ap = this.run == null ? null : analyses[this.run]?.ap[this.index];
    const isMissing = this.run != null && !this.known.runs[this.run];
    const count = this.predictions.filter((row) => row[1] >= settings.score).length;
    const parts = [`${this.known.truth.length} in the ground truth`];
    if (this.run != null) parts.push(isMissing ? "not predicted yet" : `${count} predicted`);
    if (ap != null) parts.push(`AP ${(100 * ap).toFixed(1)}`);
    this.caption.textContent = parts.join(" · ");
    const rows = this.rows(), signature = JSON.stringify(rows);
    if (signature === this.signature) return; // the focus stays where it is
    this.signature = signature;
    this.list.replaceChildren(...rows.map((row) => this.button(row)));
  }

  /** What the list below the picture shows. */
  rows() {
    const kinds = this.run == null ? [] : this.known.runs[this.run]?.truth ?? [];
    const rows = [];
    if (settings.predictions && this.run != null) {
      this.predictions.forEach(([label, score, , kind], i) => {
        if (score >= settings.score) rows.push({ source: String(this.run), position: i, text: `${start.classes[label]} ${score.toFixed(2)}`, kind, color: instanceColor(i, label, kind, kindColor) });
      });
    }
    if (settings.truth) this.known.truth.forEach(([label], i) => rows.push({ source: "truth", position: i, text: `truth: ${start.classes[label]}`, kind: kinds[i], color: [255, 255, 255] }));
    return rows;
  }

  button({ source, position, text, kind, color }) {
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = cssColor(color);
    const words = kind && kind !== "correct" ? `${text} · ${kind}` : text;
    if (this.run == null) return h("li", {}, h("span", {}, swatch, " ", words));
    return h("li", {}, h("button", { type: "button", onclick: () => this.open(source, position) }, swatch, words));
  }

  open(source, position) {
    const isChanged = source !== "truth" && settings.mask != null;
    if (isChanged) { this.caption.textContent = "Set the mask threshold to the run's own to see the query of a prediction."; return; }
    location.hash = `#query/${this.id}/${source}/${position}`;
  }

  onClick(event) {
    if (this.run == null) return;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / box.width * this.canvas.width), y = Math.floor((event.clientY - box.top) / box.height * this.canvas.height);
    const found = this.ids.map((ids) => ids[y * this.canvas.width + x]);
    const sources = [];
    if (settings.predictions) sources.push(String(this.run));
    if (settings.truth) sources.push("truth");
    const layer = found.findIndex((id) => id > 0);
    if (layer >= 0) this.open(sources[layer], found[layer] - 1);
  }
}
