// Which images the gallery shows, and in which order.

/**
 * @param {any} start see `Gallery.start`
 * @param {({ap: (number|null)[], counts: (number[]|null)[]}|null|undefined)[]} analyses of each run
 * @param {{text: string, cls: string, kind: string, kindRun: number, sort: string, descending: boolean, run: number}} settings
 * @returns {number[]} indices
 */
export function filterAndSort(start, analyses, settings) {
  const { images } = start;
  const text = settings.text.trim().toLowerCase();
  const cls = settings.cls === "" ? null : Number(settings.cls);
  const kind = settings.kind === "" ? -1 : Object.keys(start.kinds).indexOf(settings.kind);
  const kindOf = (index) => analyses[settings.kindRun]?.counts[index]?.[kind] ?? 0;
  const kept = [];
  for (let index = 0; index < images.id.length; index++) {
    if (text && !images.name[index].toLowerCase().includes(text) && String(images.id[index]) !== text) continue;
    if (cls != null && !images.classes[index].includes(cls)) continue;
    if (kind >= 0 && !kindOf(index)) continue;
    kept.push(index);
  }
  const value = sortValue(images, analyses, settings, kindOf);
  if (!value) return settings.descending ? kept.reverse() : kept;
  const sign = settings.descending ? -1 : 1;
  const values = new Map(kept.map((index) => [index, value(index)]));
  return kept.sort((a, b) => {
    const first = values.get(a), second = values.get(b);
    if (first == null || second == null) return Number(first == null) - Number(second == null) || a - b; // unknown last
    return sign * (first - second) || a - b;
  });
}

/** What images are sorted by; null for the order of the data. */
function sortValue(images, analyses, settings, kindOf) {
  if (settings.sort === "ap") return (index) => analyses[settings.run]?.ap[index] ?? null;
  if (settings.sort === "errors") return kindOf;
  if (settings.sort === "instances") return (index) => images.instances[index];
  if (settings.sort.startsWith("difference")) {
    const other = Number(settings.sort.slice("difference".length));
    return (index) => difference(analyses, other, index);
  }
  return null;
}

/** AP of a run minus AP of the first run; null where one of them is not known. */
export function difference(analyses, run, index) {
  const before = analyses[0]?.ap[index], after = analyses[run]?.ap[index];
  return before == null || after == null ? null : after - before;
}
