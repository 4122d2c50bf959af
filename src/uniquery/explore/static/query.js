// The response of one query: on its own image, on the most responsive other images, and in numbers.

import { fetchJson } from "./api.js";
import { histogram } from "./charts.js";
import { h, percent } from "./dom.js";
import { drawHeat, drawOver, fit } from "./draw.js";
import { indexOf, masks, start, thumbnails } from "./store.js";

const RETRY_MILLISECONDS = 3000;

/** @param {HTMLElement} main @param {string[]} rest @returns {() => void} */
export function showQuery(main, [image, source, instance]) {
  const id = Number(image), index = indexOf(id);
  if (index === undefined) throw new Error(`There is no image with the id ${image}.`);
  const columns = start.runs.map((name, run) => new QueryColumn(run, name, { id, source, instance }));
  const what = source === "truth" ? "instance of the ground truth" : `prediction of ${start.runs[Number(source)] ?? "a run"}`;
  main.replaceChildren(
    h("h2", {}, `Query of ${what} number ${Number(instance) + 1} in ${start.images.name[index]}`),
    h("div", { class: "bar" }, h("a", { href: `#image/${id}` }, "← Image")),
    h("p", { class: "note" }, "For each run: the query that is matched to this mask, and its response ⟨q, I⟩ as a probability. Brighter is more."),
    h("div", { class: "side-by-side" }, ...columns.map((column) => column.element)));
  main.scrollTop = 0;
  columns.forEach((column) => column.load());
  return () => columns.forEach((column) => column.close());
}

class QueryColumn {
  constructor(run, name, asked) {
    Object.assign(this, { run, asked, timer: 0, isClosed: false });
    this.body = h("div", {}, h("p", { class: "note" }, "Computing…"));
    this.element = h("section", { class: "panel", "aria-label": name }, h("h3", {}, name), this.body);
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
  }

  async load() {
    const { id, source, instance } = this.asked;
    try {
      const found = await fetchJson(`api/query?run=${this.run}&image=${id}&source=${encodeURIComponent(source)}&instance=${encodeURIComponent(instance)}`);
      if (this.isClosed) return;
      this.show(found);
      if (found.preparing) this.timer = window.setTimeout(() => this.load(), RETRY_MILLISECONDS);
    } catch (error) {
      if (!this.isClosed) this.body.replaceChildren(h("p", { class: "error" }, String(error?.message ?? error)));
    }
  }

  /** The clicked mask, in white. */
  async outline(canvas) {
    const { id, source, instance } = this.asked;
    const known = await masks.get(id);
    const counts = source === "truth" ? known.truth[instance]?.[1] : known.runs[Number(source)]?.predictions[instance]?.[2];
    const [height, width] = start.images.size[indexOf(id)];
    if (counts) drawOver(canvas, { height, width }, [{ masks: [[0, counts]], color: () => [255, 255, 255], filled: false }]);
  }

  show(found) {
    const own = h("canvas", { role: "img", "aria-label": `Response on the own image, at most ${found.own.max.toFixed(2)}` });
    heat(own, found.own, 220).then(() => this.outline(own));
    const others = found.others.map((other) => {
      const canvas = h("canvas", { "aria-hidden": "true" });
      heat(canvas, other, 120);
      return h("li", {}, h("a", { href: `#image/${other.image}`, title: start.images.name[indexOf(other.image)] },
        canvas, `mean ${percent(other.mean)}, top ${other.max.toFixed(2)}`));
    });
    const preparing = found.preparing ? `; ${found.preparing} more are being prepared` : "";
    const shares = ["own", "same class", "other class"].map((name) => ({ name: name === "own" ? "own instance" : `${name}, other images`, values: found.numbers[name].histogram }));
    this.body.replaceChildren(
      h("div", { class: "own" }, own, numbers(found.numbers)),
      h("h3", {}, `The ${others.length} most responsive other images`),
      h("p", { class: "note" }, `By mean response, of ${found.searched} searched${preparing}.`),
      h("ul", { class: "heats" }, ...others),
      histogram("Share of instance pixels by response", shares));
    this.element.dataset.loaded = "1";
  }
}

async function heat(canvas, response, longest) {
  const [height, width] = start.images.size[indexOf(response.image)];
  Object.assign(canvas, fit(width, height, longest));
  try {
    drawHeat(canvas, await thumbnails.get(response.image), response);
  } catch { /* the picture cannot be read: the numbers say what there is */ }
}

const GROUPS = [["own", "own instance"], ["others", "instances of other images"], ["same class", "… same class"], ["other class", "… other class"], ["inside the own footprint", "… inside the own footprint"], ["outside of it", "… outside of it"]];

function numbers(groups) {
  const rows = GROUPS.map(([key, text]) => h("tr", {}, h("td", {}, text), h("td", {}, percent(groups[key].mean, 2)), h("td", {}, percent(groups[key].above_half, 2)),
    h("td", {}, groups[key].p99 == null ? "n/a" : groups[key].p99.toFixed(3)), h("td", {}, groups[key].pixels)));
  return h("div", { class: "table-wrap" }, h("table", {}, h("caption", { class: "visually-hidden" }, "Response on groups of pixels"),
    h("thead", {}, h("tr", {}, ...["Response on", "mean", "above 0.5", "99 %", "pixels"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, ...rows)));
}
