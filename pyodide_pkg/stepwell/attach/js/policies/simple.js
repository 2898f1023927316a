import { FreeLists } from "./free_lists.js";

/** Exact sizes, reused after the flush, never given up. */
export class Simple {
  #free = new FreeLists();
  #pending = []; // [bytes, id]

  acquire(size) {
    return this.#free.pop(size);
  }

  release(id, size) {
    this.#pending.push([size, id]);
    return [];
  }

  flush() {
    for (const [size, id] of this.#pending) this.#free.push(size, id);
    this.#pending = [];
    return [];
  }

  beginRun() {
    return [];
  }

  reclaim(nbytes) {
    return this.#free.reclaim(nbytes);
  }

  drain() {
    this.flush();
    return this.#free.drain();
  }
}
