import { poolLayer } from "./intercept.js";
import { Shims } from "./shims.js";
import { openEncoders } from "./uses.js";

/**
 * Serves pooled buffers that outlive their attachment. Only shims know them, so the objects of their device keep
 * theirs, each for itself, until the last such buffer is destroyed. The prototypes are the browser's again.
 */
export class Caretaker {
  #pools = new Set();
  #shims = null;

  /**
   * @param {import("./pool.js").DevicePool} pool which serves no more
   * @param {import("./natives.js").Natives} natives
   * @param {(queue: GPUQueue) => import("./pool.js").DevicePool | null} poolOfQueue
   */
  take(pool, natives, poolOfQueue) {
    this.#pools.add(pool);
    const none = () => null;
    this.#shims ??= new Shims(natives, poolLayer({ serve: none, poolOf: none, poolOfQueue, onSubmit: none }), []);
    pool.retire(() => this.#leave(pool));
  }

  /** Serve the devices that no attachment serves, and no others. */
  tend(isServed) {
    let orphans = 0;
    for (const { device, queue } of this.#pools) {
      const served = isServed(device);
      orphans += served ? 0 : 1;
      for (const object of [device, queue]) {
        if (served) this.#shims.disown(object);
        else this.#shims.adopt(object);
      }
    }
    if (orphans > 0) for (const encoder of openEncoders()) this.#shims.adopt(encoder);
  }

  #leave(pool) {
    if (!this.#pools.delete(pool)) return;
    const stays = [...this.#pools].some(({ device }) => device === pool.device);
    if (!stays) for (const object of [pool.device, pool.queue]) this.#shims.disown(object);
    if (this.#pools.size > 0) return;
    this.#shims.uninstall();
    this.#shims = null;
  }
}
