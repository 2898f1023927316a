/** No reuse: a release gives the buffer up. */
export class Disabled {
  acquire() {
    return 0;
  }

  release(id) {
    return [id];
  }

  flush() {
    return [];
  }

  beginRun() {
    return [];
  }

  reclaim() {
    return [];
  }

  drain() {
    return [];
  }
}
