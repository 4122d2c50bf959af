// Starts the page: views by address, keyboard, messages.

import { showEquivariance } from "./equivariance.js";
import { h } from "./dom.js";
import { showGallery } from "./gallery.js";
import { showHelp } from "./help.js";
import { showImage } from "./image.js";
import { showQuery } from "./query.js";
import { forgetWaiting, loadStart, refresh, set, settings, start, state } from "./store.js";
import { showTraining } from "./training.js";
import { showTry } from "./try.js";

const POLL_MILLISECONDS = 2000;
const VIEWS = { gallery: showGallery, image: showImage, query: showQuery, equivariance: showEquivariance, try: showTry, training: showTraining };
const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const messages = /** @type {HTMLElement} */ (document.getElementById("messages"));
let endView = () => {};
let lost = "";
let hasBegun = false;

function tabs() {
  const names = [["gallery", "Gallery"]];
  if (start.runs.length) names.push(["try", "Try it"], ["equivariance", "Equivariance"], ["training", "Training"]);
  document.getElementById("tabs")?.replaceChildren(...names.map(([key, text]) => h("a", { href: `#${key}`, id: `tab-${key}` }, text)));
}

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = name in VIEWS && (start.runs.length || name === "gallery" || name === "image") ? name : "gallery";
  endView();
  forgetWaiting();
  for (const tab of document.querySelectorAll("#tabs a")) tab.removeAttribute("aria-current");
  const tab = view === "image" || view === "query" ? "gallery" : view;
  document.getElementById(`tab-${tab}`)?.setAttribute("aria-current", "page");
  if (hasBegun) main.focus({ preventScroll: true });
  hasBegun = true;
  try {
    endView = VIEWS[view](main, rest) ?? (() => {});
  } catch (error) {
    main.replaceChildren(h("p", { class: "error" }, String(error?.message ?? error)));
    endView = () => {};
  }
}

function showMessages() {
  const texts = [lost, ...state.runs.map((run) => run.message)].filter(Boolean);
  const old = [...messages.children].map((child) => child.textContent);
  if (texts.join("\n") !== old.join("\n")) messages.replaceChildren(...texts.map((text) => h("p", { class: "message" }, text)));
}

async function poll() {
  try {
    if (!document.hidden) await refresh();
    lost = "";
  } catch (error) {
    lost = String(error?.message ?? error);
  }
  showMessages();
  window.setTimeout(poll, POLL_MILLISECONDS);
}

function onKey(event) {
  const typing = event.target instanceof HTMLElement && event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  if (event.key === "?") showHelp();
  else if (event.key === "/") {
    event.preventDefault();
    if (!document.getElementById("search")) location.hash = "#gallery";
    window.setTimeout(focusSearch, 0);
  } else if (event.key === "g") set({ truth: !settings.truth });
  else if (event.key === "p" && start.runs.length) set({ predictions: !settings.predictions });
  else if (/^[1-9]$/.test(event.key) && Number(event.key) <= start.runs.length) set({ run: Number(event.key) - 1, kindRun: Number(event.key) - 1 });
  else if (event.key === "Escape" && !document.querySelector("dialog[open]")) goUp();
}

/** From a query to its image, from anything else to the gallery. */
function goUp() {
  const [name, id] = location.hash.slice(1).split("/");
  if (name === "query") location.hash = `#image/${id}`;
  else if (name && name !== "gallery") location.hash = "#gallery";
}

function focusSearch() {
  const search = document.getElementById("search");
  const filters = search?.closest("details");
  if (filters) filters.open = true;
  search?.focus();
}

function theme() {
  const root = document.documentElement;
  const stored = localStorage.getItem("uniquery-theme");
  if (stored) root.dataset.theme = stored;
  document.getElementById("theme")?.addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("uniquery-theme", root.dataset.theme);
  });
}

async function begin() {
  theme();
  document.getElementById("help-button")?.addEventListener("click", showHelp);
  try {
    await loadStart();
  } catch (error) {
    main.replaceChildren(h("p", { class: "error" }, String(error?.message ?? error)));
    return;
  }
  tabs();
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", route);
  route();
  poll();
}

begin();
