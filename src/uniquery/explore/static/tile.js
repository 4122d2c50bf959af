// One image of the gallery.

import { h } from "./dom.js";
import { drawLayers, fit } from "./draw.js";
import { difference } from "./filter.js";
import { layersOf } from "./layers.js";
import { analyses, masks, predictionsOf, settings, start, thumbnails } from "./store.js";

export class Tile {
  /** @param {number} index of the image @param {number} side in pixels @param {number} caption height */
  constructor(index, side, caption = 0) {
    this.index = index;
    this.id = start.images.id[index];
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.canvas.style.height = `${side}px`;
    this.name = h("span", {}, start.images.name[index]);
    this.text = h("span", { class: "sub" });
    this.element = h("button", { type: "button", class: "tile", onclick: () => { location.hash = `#image/${this.id}`; } },
      this.canvas, this.name, this.text);
    this.element.style.width = `${side}px`;
    this.element.style.height = `${side + caption}px`;
    const scale = Math.min(2, window.devicePixelRatio || 1);
    this.canvas.width = this.canvas.height = Math.round(side * scale);
    this.draws = 0;
    this.isRemoved = false;
  }

  place(left, top) {
    this.element.style.transform = `translate(${left}px, ${top}px)`;
  }

  remove() {
    this.isRemoved = true;
    this.element.remove();
  }

  async draw() {
    const number = ++this.draws;
    this.describe();
    try {
      const [picture, known] = await Promise.all([thumbnails.get(this.id), masks.get(this.id)]);
      const isCurrent = () => !this.isRemoved && number === this.draws;
      const stored = known.runs[settings.run]?.predictions ?? null;
      if (isCurrent() && (settings.mask == null || !this.element.dataset.drawn)) this.paint(picture, known, stored);
      if (settings.mask == null || !stored) return;
      const predictions = await predictionsOf(settings.run, this.id, known);
      if (isCurrent()) this.paint(picture, known, predictions);
    } catch (error) {
      if (!this.isRemoved && number === this.draws) this.text.textContent = String(error?.message ?? error);
    }
  }

  paint(picture, known, predictions) {
    const [height, width] = start.images.size[this.index];
    const size = fit(width, height, this.canvas.width);
    const layer = h("canvas", { width: size.width, height: size.height });
    drawLayers(layer, picture, { height, width }, layersOf(known, settings.run, predictions));
    const context = this.canvas.getContext("2d");
    context?.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context?.drawImage(layer, (this.canvas.width - size.width) / 2, (this.canvas.height - size.height) / 2);
    this.element.dataset.drawn = "1";
  }

  describe() {
    const { instances } = start.images;
    const parts = [`${instances[this.index]} instance${instances[this.index] === 1 ? "" : "s"}`];
    const ap = analyses[settings.run]?.ap[this.index];
    if (ap != null) parts.push(`AP ${(100 * ap).toFixed(0)}`);
    const change = settings.run ? difference(analyses, settings.run, this.index) : null;
    if (change != null) parts.push(`${change < 0 ? "−" : "+"}${Math.abs(100 * change).toFixed(0)}`);
    this.text.textContent = parts.join(" · ");
    this.element.title = errorsOf(this.index);
  }
}

/** The errors of an image in words. */
export function errorsOf(index) {
  const counts = analyses[settings.run]?.counts[index];
  if (!counts) return "";
  const kinds = Object.keys(start.kinds);
  return counts.map((count, i) => (count ? `${count} ${kinds[i]}` : "")).filter(Boolean).join(", ") || "no errors";
}
