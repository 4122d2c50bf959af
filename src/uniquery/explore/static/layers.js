// The layers of an image: predictions, and the ground truth as white outlines.

import { kindColor } from "./draw.js";
import { instanceColor, settings } from "./store.js";

const WHITE = [255, 255, 255];

/**
 * @param {[number, number, string, string|null][]} predictions
 * @param {number} score the least
 */
export function predictionLayer(predictions, score) {
  const kept = [];
  predictions.forEach((row, index) => { if (row[1] >= score) kept.push([index, row[2]]); });
  kept.reverse(); // the best is painted last
  return {
    masks: kept, filled: true,
    color: (index) => instanceColor(index, predictions[index][0], predictions[index][3], kindColor),
  };
}

/** @param {[number, string][]} truth @param {(string|null)[]} [kinds] */
export function truthLayer(truth, kinds) {
  return {
    masks: truth.map(([, counts], index) => [index, counts]), filled: false,
    color: (index) => (settings.color === "kind" && kinds?.[index] ? kindColor(kinds[index]) : WHITE),
  };
}

/** Both layers, as the user's toggles say. */
export function layersOf(known, run, predictions) {
  const layers = [];
  if (settings.predictions && predictions) layers.push(predictionLayer(predictions, settings.score));
  if (settings.truth) layers.push(truthLayer(known.truth, known.runs[run]?.truth));
  return layers;
}
