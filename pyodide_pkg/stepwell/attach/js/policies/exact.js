import { FreeLists } from "./free_lists.js";

export const CAP = 64;
export const LARGEST_BYTES = 64 * 2 ** 20;

/** Exact sizes, at most `cap` free buffers of each; those of more than `largest_bytes` are never kept. */
export class Exact {
  #free = new FreeLists();
  #cap;
  #largestBytes;

  constructor({ cap = CAP, largest_bytes = LARGEST_BYTES } = {}) {
    this.#cap = cap;
    this.#largestBytes = largest_bytes;
  }

  acquire(size) {
    return this.#free.pop(size);
  }

  release(id, size) {
    if (size > this.#largestBytes || this.#free.count(size) >= this.#cap) return [id];
    this.#free.push(size, id);
    return [];
  }

  flush() {
    return [];
  }

  beginRun() {
    return [];
  }

  reclaim(nbytes) {
    return this.#free.reclaim(nbytes);
  }

  drain() {
    return this.#free.drain();
  }
}
