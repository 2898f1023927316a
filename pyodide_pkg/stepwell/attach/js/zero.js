/**
 * Native buffers that were handed out again and still have what was in them.
 *
 * They are cleared by a submit of its own before the next one of the application. It is not part of the application's:
 * where that is refused, a clear that went with it would be lost.
 */
export class Clears {
  cleared = 0; // buffers, and their bytes
  clearedBytes = 0;
  #device;
  #queue;
  #native;
  #pending = new Set();

  constructor(device, queue, native) {
    this.#device = device;
    this.#queue = queue;
    this.#native = native;
  }

  /** Note that a native buffer must be zero when it is used next. */
  add(kept) {
    this.#pending.add(kept);
  }

  has(kept) {
    return this.#pending.has(kept);
  }

  /** Forget a buffer: it was written as a whole, or no alias has it any more. */
  remove(kept) {
    this.#pending.delete(kept);
  }

  get pending() {
    return this.#pending.size;
  }

  flush() {
    if (this.#pending.size === 0) return;
    const clear = this.#native["GPUCommandEncoder.clearBuffer"];
    const encoder = this.#native["GPUDevice.createCommandEncoder"].call(this.#device);
    for (const { native, size } of this.#pending) {
      clear.call(encoder, native, 0, size);
      this.clearedBytes += size;
    }
    this.cleared += this.#pending.size;
    this.#pending.clear();
    this.#native["GPUQueue.submit"].call(this.#queue, [this.#native["GPUCommandEncoder.finish"].call(encoder)]);
  }

  /** Forget all buffers: the device is gone. */
  drop() {
    this.#pending.clear();
  }
}
