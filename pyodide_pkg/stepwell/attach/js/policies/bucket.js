export const ORT_LIMITS = new Map([
  [64, 250],
  [128, 200],
  [256, 200],
  [512, 200],
  [2048, 230],
  [4096, 200],
  [8192, 50],
  [16384, 50],
  [32768, 50],
  [65536, 50],
  [131072, 50],
  [262144, 50],
  [524288, 50],
  [1048576, 50],
  [2097152, 30],
  [4194304, 20],
  [8388608, 10],
  [12582912, 10],
  [16777216, 10],
  [26214400, 15],
  [33554432, 22],
  [44236800, 2],
  [58982400, 6],
  [67108864, 6],
  [134217728, 6],
  [167772160, 6],
]);
export const ERAS = ["A", "B", "C"];

/**
 * A fixed number of free buffers of each size in the table `limits`; other sizes are never kept. `era`: when a released
 * buffer can serve again, as in ONNX Runtime (memory/policies/bucket.py has the history).
 */
export class Bucket {
  #limits;
  #era;
  #free = new Map(); // bytes -> ids, ascending
  #pending = []; // [bytes, id]

  constructor({ limits = ORT_LIMITS, era = "B" } = {}) {
    this.#limits = limits;
    this.#era = era;
    for (const size of [...limits.keys()].sort((a, b) => a - b)) this.#free.set(size, []);
  }

  acquire(size) {
    return this.#free.get(size)?.pop() ?? 0;
  }

  release(id, size, recorded) {
    const waits = this.#era === "A" || (this.#era === "C" && recorded);
    if (!waits && this.#keep(id, size)) return [];
    if (this.#era === "C" && !recorded) return [id];
    this.#pending.push([size, id]);
    return [];
  }

  flush() {
    const pending = this.#pending.splice(0);
    return pending.filter(([size, id]) => !this.#keep(id, size)).map(([, id]) => id);
  }

  beginRun() {
    return [];
  }

  reclaim(nbytes) {
    const givenUp = [];
    for (const [size, free] of [...this.#free].reverse()) {
      const taken = free.splice(0, Math.max(0, Math.ceil(nbytes / size)));
      givenUp.push(...taken);
      nbytes -= taken.length * size;
    }
    return givenUp;
  }

  drain() {
    const kept = [...this.#free.values()].flatMap((free) => free.splice(0));
    return [...kept, ...this.#pending.splice(0).map(([, id]) => id)];
  }

  #keep(id, size) {
    const free = this.#free.get(size);
    if (free === undefined || free.length >= this.#limits.get(size)) return false;
    free.push(id);
    return true;
  }
}
