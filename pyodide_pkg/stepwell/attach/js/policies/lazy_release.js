/** No reuse; released buffers are given up together at the flush. */
export class LazyRelease {
  #pending = [];

  acquire() {
    return 0;
  }

  release(id) {
    this.#pending.push(id);
    return [];
  }

  flush() {
    return this.drain();
  }

  beginRun() {
    return [];
  }

  reclaim() {
    return this.drain();
  }

  drain() {
    return this.#pending.splice(0);
  }
}
