// A grid of any length, of which only the rows in sight exist.

import { h } from "./dom.js";
import { forgetWaiting } from "./store.js";
import { Tile } from "./tile.js";

const GAP = 8, CAPTION = 42, LEAST = 150;
const KEYS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

export class VirtualGrid {
  constructor() {
    this.space = h("div", { class: "grid-space" });
    this.element = h("div", { class: "grid", role: "group", "aria-label": "Images", tabindex: -1 }, this.space);
    /** @type {number[]} */
    this.indices = [];
    /** @type {Map<number, Tile>} position → tile */
    this.tiles = new Map();
    this.active = 0;
    this.element.addEventListener("scroll", () => this.render(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.observer = new ResizeObserver(() => {
      if (this.measure()) this.clear();
      this.render();
    });
    this.observer.observe(this.element);
    this.side = 0;
    this.measure();
  }

  /** Whether the size of tiles has changed. */
  measure() {
    const before = this.side;
    const width = this.element.clientWidth || 800;
    this.columns = Math.max(1, Math.floor((width + GAP) / (LEAST + GAP)));
    this.side = Math.floor((width - GAP * (this.columns - 1)) / this.columns);
    this.rowHeight = this.side + CAPTION + GAP;
    return this.side !== before;
  }

  /** @param {number[]} indices */
  show(indices) {
    this.indices = indices;
    forgetWaiting();
    this.measure();
    this.active = Math.min(this.active, Math.max(0, indices.length - 1));
    this.clear();
    this.render();
  }

  /** New numbers below the pictures. */
  describe() {
    for (const tile of this.tiles.values()) tile.describe();
  }

  redraw() {
    forgetWaiting();
    for (const tile of this.tiles.values()) tile.draw();
  }

  clear() {
    for (const tile of this.tiles.values()) tile.remove();
    this.tiles.clear();
  }

  render() {
    this.space.style.height = `${Math.ceil(this.indices.length / this.columns) * this.rowHeight}px`;
    const height = this.element.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - 1) * this.columns;
    const last = Math.min(this.indices.length, (Math.ceil((this.element.scrollTop + height) / this.rowHeight) + 1) * this.columns);
    for (const [position, tile] of this.tiles) {
      if (position < first || position >= last) { tile.remove(); this.tiles.delete(position); }
    }
    for (let position = first; position < last; position++) {
      if (this.tiles.has(position)) continue;
      const tile = new Tile(this.indices[position], this.side, CAPTION);
      tile.place((position % this.columns) * (this.side + GAP), Math.floor(position / this.columns) * this.rowHeight);
      tile.element.tabIndex = position === this.active ? 0 : -1;
      tile.element.addEventListener("focus", () => this.activate(position));
      this.tiles.set(position, tile);
      this.space.append(tile.element);
      tile.draw();
    }
    const tabbable = this.tiles.get(this.active) ?? this.tiles.values().next().value;
    if (tabbable) tabbable.element.tabIndex = 0;
  }

  activate(position) {
    const before = this.tiles.get(this.active);
    if (before) before.element.tabIndex = -1;
    this.active = position;
    const now = this.tiles.get(position);
    if (now) now.element.tabIndex = 0;
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const steps = { ...KEYS, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.focus(Math.min(this.indices.length - 1, Math.max(0, this.active + steps[event.key])));
  }

  /** Scrolls to a tile and focuses it. */
  focus(position) {
    const top = Math.floor(position / this.columns) * this.rowHeight, view = this.element;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + this.rowHeight > view.scrollTop + view.clientHeight) view.scrollTop = top + this.rowHeight - view.clientHeight;
    this.render();
    this.activate(position);
    this.tiles.get(position)?.element.focus({ preventScroll: true });
  }

  close() {
    this.observer.disconnect();
    this.clear();
  }
}
