// What the page knows: the images, what is analyzed so far, and the settings of the user.

import { PromiseCache, fetchJson, loadImage, pictureAddress } from "./api.js";

const CACHED = 400;

/** @typedef {{truth: (string|null)[], predictions: [number, number, string, string|null][]}} RunMasks */
/** @typedef {{truth: [number, string][], runs: (RunMasks|null)[]}} ImageMasks */

/** @type {any} what never changes, see `Gallery.start` */
export let start = null;
/** @type {any} what changes, see `Gallery.state` */
export let state = { runs: [] };
/** @type {({ap: (number|null)[], counts: (number[]|null)[]}|null)[]} of each run */
export const analyses = [];
/** @type {number[]} indices of the images that the gallery shows, in its order */
export let shown = [];
/** The image that was looked at last: the gallery returns to it. */
export const last = { image: /** @type {number|null} */ (null) };
export const setShown = (indices) => { shown = indices; };

/** The settings of the user. */
export const settings = {
  truth: true, predictions: true, run: 0, score: 0.5, mask: /** @type {number|null} */ (null), color: "instance",
  text: "", cls: "", kind: "", kindRun: 0, sort: "order", descending: false,
};

const listeners = new Set();

/** Calls a function whenever something changes; gives a function that ends it. @param {(what: string) => void} call */
export function subscribe(call) {
  listeners.add(call);
  return () => listeners.delete(call);
}

/** @param {string} what "settings", "analysis", "masks" or "messages" */
export function changed(what) {
  for (const call of [...listeners]) call(what);
}

export function set(values) {
  Object.assign(settings, values);
  changed("settings");
}

/** Index of an image by its id. */
let positions = new Map();
export const indexOf = (id) => positions.get(id);

export async function loadStart() {
  start = await fetchJson("api/start");
  positions = new Map(start.images.id.map((id, index) => [id, index]));
  setShown(start.images.id.map((_, index) => index));
  settings.predictions = start.runs.length > 0;
}

/** Reads the state; fetches what is new. */
export async function refresh() {
  const before = state;
  state = await fetchJson("api/state");
  let isNew = false;
  await Promise.all(state.runs.map(async (run, number) => {
    const old = before.runs[number];
    const isAnalyzed = run.analyzed === run.predicted && old?.analyzed !== run.analyzed; // masks now have their kinds
    if (!old || old.version !== run.version || old.predicted !== run.predicted || isAnalyzed) isNew = true;
    if (!old || old.version !== run.version || old.analyzed !== run.analyzed) {
      analyses[number] = await fetchJson(`api/runs/${number}/analysis`);
      changed("analysis");
    }
  }));
  if (isNew) { masks.clear(); predictionsAt.clear(); changed("masks"); }
  changed("messages");
}

// Masks of several images are asked for in one request.
let wanted = new Map();
/** @type {PromiseCache} id → Promise<ImageMasks> */
export const masks = new PromiseCache(CACHED, (id) => new Promise((resolve, reject) => {
  if (!wanted.size) queueMicrotask(requestMasks);
  wanted.set(id, [resolve, reject]);
}));

async function requestMasks() {
  const batch = wanted;
  wanted = new Map();
  const ids = [...batch.keys()];
  for (let first = 0; first < ids.length; first += 50) {
    const some = ids.slice(first, first + 50);
    try {
      const found = await fetchJson(`api/masks?images=${some.join(",")}`);
      for (const id of some) batch.get(id)[0](found[id]);
    } catch (error) {
      for (const id of some) batch.get(id)[1](error);
    }
  }
}

export const thumbnails = new PromiseCache(CACHED, (id) => loadImage(pictureAddress(id, "thumbnail")));

// Each takes the model of a run: two at a time, the newest first, and none for what is not shown any more.
const AT_ONCE = 2;
let running = 0;
/** @type {{path: string, resolve: (rows: any) => void, reject: (error: Error) => void}[]} */
let waiting = [];

/** "run/id/threshold" → predictions */
export const predictionsAt = new PromiseCache(1000, (key) => {
  const [run, id, mask] = key.split("/");
  return new Promise((resolve, reject) => {
    waiting.push({ path: `api/images/${id}/predictions?run=${run}&mask=${mask}`, resolve, reject });
    next();
  });
});

function next() {
  if (running >= AT_ONCE || !waiting.length) return;
  running++;
  const { path, resolve, reject } = /** @type {any} */ (waiting.pop());
  fetchJson(path).then(resolve, reject).finally(() => { running--; next(); });
}

/** Drops what was asked for and has not begun. */
export function forgetWaiting() {
  const dropped = waiting;
  waiting = [];
  for (const { reject } of dropped) reject(new Error("not shown any more"));
}

/**
 * The predictions of an image at the mask threshold of the user.
 * @param {number} run
 * @param {number} id
 * @param {ImageMasks} known
 * @returns {Promise<[number, number, string, string|null][]>} label, score, run lengths, kind
 */
export async function predictionsOf(run, id, known) {
  if (settings.mask == null || !state.runs[run]?.has_model) return known.runs[run]?.predictions ?? [];
  const found = await predictionsAt.get(`${run}/${id}/${settings.mask}`);
  return found.map((row) => [...row, null]);
}

/** The color of an instance. */
export function instanceColor(index, label, kind, kindColor) {
  if (settings.color === "class") return start.colors[label % start.colors.length];
  if (settings.color === "kind") return kindColor(kind);
  return start.colors[index % start.colors.length];
}
