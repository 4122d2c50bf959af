// COCO's run-length masks, decoded and painted in the browser.

/**
 * The run lengths behind COCO's compressed text, of zeros first.
 * @param {string} text
 * @returns {number[]}
 */
export function runLengths(text) {
  const runs = [];
  let position = 0;
  while (position < text.length) {
    let value = 0, shift = 0, digit = 0;
    do {
      digit = text.charCodeAt(position++) - 48;
      value += (digit & 31) * 2 ** shift;
      shift += 5;
    } while (digit & 32);
    if (digit & 16) value -= 2 ** shift;
    runs.push(runs.length > 2 ? value + runs[runs.length - 2] : value);
  }
  return runs;
}

/**
 * Which instance each pixel of a canvas shows: 0 for none, i + 1 for the i-th; later masks are painted over earlier.
 * @param {[number, string][]} masks index and compressed run lengths
 * @param {{height: number, width: number}} image size of the masks
 * @param {{height: number, width: number}} canvas
 * @returns {Uint16Array}
 */
export function paintIds(masks, image, canvas) {
  const ids = new Uint16Array(canvas.width * canvas.height);
  const scaleX = canvas.width / image.width, scaleY = canvas.height / image.height;
  for (const [index, counts] of masks) {
    let start = 0, isMask = false;
    for (const run of runLengths(counts)) {
      if (isMask) paintRun(ids, canvas, start, start + run, image.height, scaleX, scaleY, index + 1);
      start += run;
      isMask = !isMask;
    }
  }
  return ids;
}

/** A run goes down a column and may go on in the next ones. */
function paintRun(ids, canvas, start, end, height, scaleX, scaleY, value) {
  while (start < end) {
    const x = Math.floor(start / height), top = start - x * height;
    const bottom = Math.min(height, top + end - start);
    const left = Math.max(0, Math.ceil(x * scaleX - 0.5)), right = Math.min(canvas.width, Math.ceil((x + 1) * scaleX - 0.5));
    if (left < right) {
      const first = Math.max(0, Math.ceil(top * scaleY - 0.5)), last = Math.min(canvas.height, Math.ceil(bottom * scaleY - 0.5));
      for (let y = first; y < last; y++) ids.fill(value, y * canvas.width + left, y * canvas.width + right);
    }
    start += bottom - top;
  }
}

/** Whether a pixel is at the edge of its instance. */
export function isEdge(ids, index, x, width, height) {
  const id = ids[index];
  return x === 0 || x === width - 1 || index < width || index >= width * (height - 1)
    || ids[index - 1] !== id || ids[index + 1] !== id || ids[index - width] !== id || ids[index + width] !== id;
}
