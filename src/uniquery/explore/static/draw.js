// Pictures with masks and heat maps over them.

import { isEdge, paintIds } from "./masks.js";

/** Okabe and Ito's colors, which color-blind people can tell apart; the text beside them says the same. */
export const KIND_COLORS = {
  correct: [0, 158, 115], leaked: [230, 159, 0], "wrong class": [204, 121, 167], merged: [0, 114, 178],
  split: [86, 180, 233], "poor mask": [240, 228, 66], missed: [213, 94, 0], duplicate: [225, 225, 225],
  background: [213, 94, 0], ignored: [150, 150, 150],
};
const NO_KIND = [150, 150, 150];
const FILL = 100, EDGE = 255;

export const cssColor = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;
export const kindColor = (kind) => KIND_COLORS[kind] ?? NO_KIND;

/** The size of an image inside a square. */
export function fit(width, height, longest) {
  const scale = Math.min(longest / width, longest / height);
  return { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) };
}

/**
 * Draws a picture and instances; gives what is at each pixel, for clicks.
 * @param {HTMLCanvasElement} canvas of its final size
 * @param {CanvasImageSource | null} picture
 * @param {{height: number, width: number}} image
 * @param {{masks: [number, string][], color: (index: number) => number[], filled: boolean}[]} layers bottom first
 * @returns {Uint16Array[]} the index + 1 of the instance at each pixel, for each layer
 */
export function drawLayers(canvas, picture, image, layers) {
  const context = canvas.getContext("2d");
  if (!context) return [];
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (picture) context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return drawOver(canvas, image, layers);
}

/** The same over what the canvas shows. @returns {Uint16Array[]} */
export function drawOver(canvas, image, layers) {
  const context = canvas.getContext("2d");
  return layers.map((layer) => {
    const ids = paintIds(layer.masks, image, canvas);
    if (layer.masks.length) compose(context, colorize(ids, canvas, layer), !layer.filled);
    return ids;
  });
}

function colorize(ids, { width, height }, { color, filled }) {
  const content = new ImageData(width, height);
  const colors = new Map();
  for (let index = 0, y = 0; y < height; y++) {
    for (let x = 0; x < width; x++, index++) {
      const id = ids[index];
      if (!id) continue;
      const edge = isEdge(ids, index, x, width, height);
      if (!edge && !filled) continue;
      if (!colors.has(id)) colors.set(id, color(id - 1));
      const [red, green, blue] = colors.get(id);
      content.data.set([red, green, blue, edge ? EDGE : FILL], index * 4);
    }
  }
  return content;
}

/** With a dark halo, white outlines are seen on bright pictures too. */
function compose(context, content, halo) {
  const layer = new OffscreenCanvas(content.width, content.height);
  layer.getContext("2d")?.putImageData(content, 0, 0);
  context.shadowColor = "#000";
  context.shadowBlur = halo ? 3 : 0;
  context.drawImage(layer, 0, 0);
  context.shadowBlur = 0;
}

/**
 * A gray picture with a response over it.
 * @param {HTMLCanvasElement} canvas
 * @param {CanvasImageSource} picture
 * @param {{map: string, height: number, width: number, rows: number, columns: number}} response
 */
export function drawHeat(canvas, picture, response) {
  const context = canvas.getContext("2d");
  if (!context) return;
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "saturation";
  context.fillStyle = "#000";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalCompositeOperation = "source-over";
  const values = Uint8Array.from(atob(response.map), (letter) => letter.charCodeAt(0));
  const heat = new ImageData(response.width, response.height);
  values.forEach((value, index) => heat.data.set([...heatColor(value / 255), Math.min(235, value * 1.6)], index * 4));
  const layer = new OffscreenCanvas(response.width, response.height);
  layer.getContext("2d")?.putImageData(heat, 0, 0);
  const cellX = canvas.width / response.columns, cellY = canvas.height / response.rows;
  context.drawImage(layer, 0, 0, response.width * cellX, response.height * cellY);
}

const HEAT = [[60, 10, 90], [190, 55, 84], [249, 142, 9], [252, 255, 164]]; // brighter is more, as in matplotlib's inferno

/** @param {number} value 0 to 1 */
export function heatColor(value) {
  const position = Math.min(0.9999, Math.max(0, value)) * (HEAT.length - 1), low = Math.floor(position);
  return HEAT[low].map((part, i) => Math.round(part + (HEAT[low + 1][i] - part) * (position - low)));
}
