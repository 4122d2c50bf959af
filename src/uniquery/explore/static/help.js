// What the keys do.

import { h } from "./dom.js";

const KEYS = [
  ["arrows", "in the gallery: from image to image; in an image: the one before, the next"],
  ["Enter", "open the image, or the query of the instance"],
  ["Esc", "from a query to its image, from an image to the gallery"],
  ["/", "search"],
  ["g", "ground truth on or off"],
  ["p", "predictions on or off"],
  ["1 2 …", "predictions of the first run, of the second, …"],
  ["?", "this help"],
];

export function showHelp() {
  const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("help"));
  if (dialog.open) return;
  const rows = KEYS.flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]);
  dialog.replaceChildren(
    h("h2", { id: "help-title" }, "Keyboard"), h("dl", { class: "keys" }, ...rows),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.showModal();
}
