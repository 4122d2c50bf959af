// Requests to the server, whose address (with the token) is that of the page.

/** An answer that is one sentence about what is wrong. */
export class ServerError extends Error {}

const GONE = "The server does not answer: it was stopped or restarted. Open the address that it prints.";

/** @param {string} path @param {RequestInit} [options] @returns {Promise<any>} */
export async function fetchJson(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ServerError(GONE);
  }
  let content = null;
  try {
    content = await response.json();
  } catch {
    throw new ServerError(`The server's answer cannot be read (status ${response.status}).`);
  }
  if (!response.ok) throw new ServerError(content?.error ?? `The server refused (status ${response.status}).`);
  return content;
}

/** The address of an image of the data. */
export const pictureAddress = (id, size = "picture") => `api/images/${id}?size=${size}`;

/** @param {string} address @returns {Promise<HTMLImageElement>} */
export function loadImage(address) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => reject(new ServerError("The picture cannot be read."));
    image.src = address;
  });
}

/** A cache of promises, bounded in entries; failures are not kept. */
export class PromiseCache {
  /** @param {number} limit @param {(key: any) => Promise<any>} make */
  constructor(limit, make) {
    this.limit = limit;
    this.make = make;
    /** @type {Map<any, Promise<any>>} */
    this.entries = new Map();
  }

  get(key) {
    let found = this.entries.get(key);
    if (found) this.entries.delete(key);
    else {
      found = this.make(key);
      found.catch(() => this.entries.delete(key));
    }
    this.entries.set(key, found);
    if (this.entries.size > this.limit) this.entries.delete(this.entries.keys().next().value);
    return found;
  }

  clear() { this.entries.clear(); }
}
