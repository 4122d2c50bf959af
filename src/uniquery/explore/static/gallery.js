// The gallery: filters at the side, and a grid that holds only the tiles in sight.

import { drawingControls, runSelect } from "./controls.js";
import { checkbox, debounced, field, h, select } from "./dom.js";
import { filterAndSort } from "./filter.js";
import { VirtualGrid } from "./grid.js";
import { analyses, last as lastViewed, set, setShown, settings, shown, start, state, subscribe } from "./store.js";

/** @param {HTMLElement} main @returns {() => void} ends the view */
export function showGallery(main) {
  const count = h("p", { class: "count", "aria-live": "polite" });
  const grid = new VirtualGrid();
  const filters = h("details", { class: "filters", open: !matchMedia("(max-width: 720px)").matches },
    h("summary", {}, "Filters and drawing"), ...filterControls());
  main.replaceChildren(h("div", { class: "gallery" }, filters, h("div", { class: "grid-column" }, count, grid.element)));

  const update = () => {
    setShown(filterAndSort(start, analyses, settings));
    const run = state.runs[settings.kindRun], total = start.images.id.length;
    const analyzing = run && !start.panoptic && run.analyzed < total ? ` · ${run.analyzed} of ${total} analyzed` : "";
    count.textContent = `${shown.length} of ${total} images${analyzing}`;
    const meaning = document.getElementById("kind-meaning");
    if (meaning) meaning.textContent = start.kinds[settings.kind] ?? "";
    const isSame = grid.indices.length === shown.length && shown.every((index, i) => index === grid.indices[i]);
    if (isSame && shown.length) grid.describe(); // the focus stays where it is
    else grid.show(shown);
    return isSame;
  };
  const soon = debounced(update, 300);
  update();
  const position = lastViewed.image == null ? -1 : shown.indexOf(lastViewed.image);
  if (position >= 0) grid.focus(position);
  const filterKeys = ["text", "cls", "kind", "kindRun", "sort", "descending", "run"];
  let last = filterKeys.map((key) => settings[key]).join();
  const end = subscribe((what) => {
    if (what === "analysis") soon();
    if (what === "masks") grid.redraw();
    if (what !== "settings") return;
    const now = filterKeys.map((key) => settings[key]).join();
    if (now === last) grid.redraw();
    else { last = now; if (update()) grid.redraw(); }
  });
  return () => { end(); grid.close(); };
}

function filterControls() {
  const search = h("input", {
    type: "search", id: "search", placeholder: "name or id", oninput: debounced(() => set({ text: search.value }), 120),
  });
  search.value = settings.text;
  const classes = start.classes.map((name, label) => [String(label), name]);
  const groups = [
    h("fieldset", {}, h("legend", {}, "Find"),
      field("Search", search),
      select("Class", [["", "any"], ...classes], settings.cls, (cls) => set({ cls }))),
    h("fieldset", {}, h("legend", {}, "Draw"),
      runSelect("Predictions of", settings.run, (run) => set({ run, kindRun: run })), ...drawingControls()),
  ];
  const sorts = [["order", "order of the data"], ["instances", "number of instances"]];
  if (start.runs.length && !start.panoptic) {
    sorts.push(["ap", "AP of the image"], ["errors", "errors of the kind"]);
    start.runs.slice(1).forEach((name, i) => sorts.push([`difference${i + 1}`, `AP of ${name} − ${start.runs[0]}`]));
    const kinds = Object.keys(start.kinds).map((kind) => [kind, kind]);
    groups[0].append(select("Kind of error", [["", "any"], ...kinds], settings.kind, (kind) => set({ kind })),
      h("p", { class: "note", id: "kind-meaning" }));
  }
  groups.splice(1, 0, h("fieldset", {}, h("legend", {}, "Sort"),
    select("By", sorts, settings.sort, (sort) => set({ sort })),
    checkbox("Largest first", settings.descending, (descending) => set({ descending }))));
  return groups;
}
