// A picture of the user: drop, paste or choose it; thresholds act at once.

import { PromiseCache, fetchJson, loadImage } from "./api.js";
import { maskSlider, runSelect } from "./controls.js";
import { h, slider } from "./dom.js";
import { drawLayers, fit } from "./draw.js";
import { settings, start } from "./store.js";

const SIDE = 900;

/** @param {HTMLElement} main @returns {() => void} */
export function showTry(main) {
  const view = new TryView(main);
  return () => view.close();
}

class TryView {
  constructor(main) {
    Object.assign(this, { run: settings.run, score: 0.5, mask: null, found: null, levels: null, picture: null, file: null });
    const input = h("input", { type: "file", accept: "image/*", id: "try-file", class: "visually-hidden", onchange: () => { if (input.files[0]) this.send(input.files[0]); } });
    this.drop = h("div", { class: "drop" }, h("p", {}, "Drop a picture here, paste one, or choose a file."), h("label", { class: "file" }, input, "Choose a picture"));
    this.status = h("p", { class: "note", role: "status" });
    this.canvas = h("canvas", { role: "img", "aria-label": "The picture with predictions" });
    this.downloads = h("div", { class: "bar" });
    this.result = h("section", { class: "panel", hidden: true }, this.canvas, this.downloads);
    main.replaceChildren(h("h2", {}, "Try it"),
      h("div", { class: "bar" },
        runSelect("Run", this.run, (run) => { this.run = run; if (this.file) this.send(this.file); }),
        slider("Score at least", { min: 0.05, max: 1, step: 0.01, value: this.score, input: (score) => { this.score = score; this.draw(); } }),
        maskSlider(null, (mask) => { this.mask = mask; this.draw(); })),
      this.drop, this.status, this.result);
    this.onPaste = (event) => { const file = [...event.clipboardData.files][0]; if (file) this.send(file); };
    this.onOver = (event) => { event.preventDefault(); this.drop.classList.toggle("over", event.type === "dragover"); };
    this.onDrop = (event) => { this.onOver(event); const file = event.dataTransfer.files[0]; if (file) this.send(file); };
    document.addEventListener("paste", this.onPaste);
    for (const type of ["dragover", "dragleave"]) document.addEventListener(type, this.onOver);
    document.addEventListener("drop", this.onDrop);
  }

  close() {
    document.removeEventListener("paste", this.onPaste);
    for (const type of ["dragover", "dragleave"]) document.removeEventListener(type, this.onOver);
    document.removeEventListener("drop", this.onDrop);
  }

  async send(file) {
    this.file = file;
    this.status.textContent = "Predicting…";
    try {
      const found = await fetchJson(`api/uploads?run=${this.run}`, { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } });
      this.picture = await loadImage(`api/uploads/${found.upload}/picture.jpg`);
      this.found = found;
      this.levels = new PromiseCache(20, (mask) => fetchJson(`api/uploads/${found.upload}/predictions?mask=${mask}`));
      this.result.hidden = false;
      await this.draw();
      for (const mask of start.thresholds) if (this.found === found) await this.levels.get(mask); // the slider then acts at once
    } catch (error) {
      this.status.textContent = String(error?.message ?? error);
    }
  }

  async draw() {
    if (!this.found) return;
    const { found, mask } = this;
    const all = mask == null ? found.predictions : await this.levels.get(mask);
    if (found !== this.found || mask !== this.mask) return;
    const rows = all.filter((row) => row[1] >= this.score);
    Object.assign(this.canvas, fit(found.width, found.height, Math.min(SIDE, Math.max(found.width, found.height, 480))));
    drawLayers(this.canvas, this.picture, found, [{ masks: rows.map((row, i) => [i, row[2]]).reverse(), filled: true, color: (i) => start.colors[i % start.colors.length] }]);
    const counts = new Map();
    for (const [label] of rows) counts.set(label, (counts.get(label) ?? 0) + 1);
    this.status.textContent = `${rows.length} instances${rows.length ? ": " : ""}${[...counts].map(([label, count]) => `${count} ${found.classes[label]}`).join(", ")}`;
    const query = new URLSearchParams({ score: String(this.score), ...(mask == null ? {} : { mask: String(mask) }) });
    const files = [["results.json", "COCO json"], ["labels.png", "label PNG"], ["overlay.png", "overlay"]];
    this.downloads.replaceChildren("Download:", ...files.map(([name, text]) => h("a", { href: `api/uploads/${found.upload}/${name}?${query}`, download: name }, text)));
  }
}
