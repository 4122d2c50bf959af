// Runs while they train: curves, remaining time and current pictures, without a reload.

import { fetchJson } from "./api.js";
import { lineChart } from "./charts.js";
import { h, percent } from "./dom.js";
import { start, subscribe } from "./store.js";
import { Tile } from "./tile.js";

const POLL_MILLISECONDS = 2000, PICTURES = 6, PICTURE_SIDE = 150;

/** @param {HTMLElement} main @returns {() => void} */
export function showTraining(main) {
  let isClosed = false, timer = 0;
  const status = h("div", { class: "side-by-side" }), charts = h("div", { class: "side-by-side" }), diagnosis = h("div");
  const tiles = pictures();
  const update = async () => {
    const states = await Promise.all(start.runs.map((_, run) => fetchJson(`api/runs/${run}/training`).catch((error) => ({ error: String(error?.message ?? error) }))));
    if (isClosed) return;
    status.replaceChildren(...states.map((one, run) => statusOf(start.runs[run], one)));
    const known = states.map((one, run) => ({ ...one, name: start.runs[run] })).filter((one) => one.train_steps);
    if (known.length) charts.replaceChildren(...chartsOf(known));
    diagnosis.replaceChildren(...diagnosisOf(known));
    timer = window.setTimeout(update, POLL_MILLISECONDS);
  };
  main.replaceChildren(h("h2", {}, "Training"), status, charts,
    h("h3", {}, "Current predictions on some images"), h("div", { class: "bar" }, ...tiles.map((tile) => tile.element)), diagnosis);
  for (const tile of tiles) tile.draw();
  update();
  const end = subscribe((what) => { if (what === "masks" || what === "settings") tiles.forEach((tile) => tile.draw()); });
  return () => { isClosed = true; clearTimeout(timer); end(); };
}

function pictures() {
  const total = start.images.id.length, count = Math.min(PICTURES, total);
  return Array.from({ length: count }, (_, i) => {
    const tile = new Tile(Math.floor(i * total / count), PICTURE_SIDE, 42);
    tile.element.style.position = "static";
    return tile;
  });
}

const WORDS = { training: "training", finished: "finished", stopped: "not training" };

function statusOf(name, one) {
  if (!one || one.error) return h("section", { class: "panel" }, h("h3", {}, name), h("p", { class: "error" }, one?.error ?? "A model file, without a log of its training."));
  const steps = one.steps == null ? `${one.step} steps` : `step ${one.step} of ${one.steps}`;
  const parts = [WORDS[one.status], steps];
  if (one.remaining != null) parts.push(`${duration(one.remaining)} left`);
  if (one.status === "stopped") parts.push(`nothing written for ${duration(one.quiet)}`);
  if (one.skipped) parts.push(`${one.skipped} steps skipped`);
  const bar = one.steps == null ? null : h("progress", { max: one.steps, value: one.step, "aria-label": `Steps of ${name}` });
  return h("section", { class: "panel" }, h("h3", {}, name), h("p", { class: "note training-status" }, parts.join(" · ")), bar);
}

/** Seconds as h:mm:ss. */
export function duration(seconds) {
  const pad = (value) => String(value).padStart(2, "0");
  return `${Math.floor(seconds / 3600)}:${pad(Math.floor(seconds / 60) % 60)}:${pad(Math.floor(seconds) % 60)}`;
}

function chartsOf(known) {
  const headline = known[0].headline;
  const charts = [
    lineChart("Loss by step", known.map((one) => ({ name: one.name, x: one.train_steps, y: one.losses.total }))),
    lineChart(`${headline} by step`, known.map((one) => ({ name: one.name, x: one.eval_steps, y: one.scores, dots: true }))),
  ];
  for (const one of known) {
    const terms = Object.keys(one.losses).filter((name) => name !== "total").slice(0, 6);
    charts.push(lineChart(`Terms of the loss of ${one.name}`, terms.map((name) => ({ name: name.replace("loss_", ""), x: one.train_steps, y: one.losses[name] }))));
  }
  return charts.map((chart) => h("section", { class: "panel" }, chart));
}

function diagnosisOf(known) {
  const measured = known.filter((one) => one.diagnosis.cross_scene);
  if (!measured.length) return [h("p", { class: "note" }, "Run “uniquery diagnose” on a run folder to see its figures here.")];
  const keys = [["own", "own instance"], ["mean", "instances of other images"], ["p99", "… 99th percentile"], ["above_half", "… above 0.5"]];
  const rows = keys.map(([key, text]) => h("tr", {}, h("td", {}, text), ...measured.map((one) => h("td", {}, percent(one.diagnosis.cross_scene[key], 2)))));
  return [h("section", { class: "panel table-wrap" }, h("h3", {}, "uniquery diagnose: mean response of all queries"), h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Response on"), ...measured.map((one) => h("th", { scope: "col" }, one.name)))), h("tbody", {}, ...rows)))];
}
