const COPY_DST = 0x8;

/** Makes destroyed native buffers to use in place of dead aliases: the browser says of them what it always says. */
export class Tombstones {
  made = 0;
  poisoned = 0; // submits that were refused by means of one
  #device;
  #native;

  constructor(device, native) {
    this.#device = device;
    this.#native = native;
  }

  /** A destroyed buffer with the size, usage and label of `lease`, which is dead. */
  of(lease) {
    this.made += 1;
    return this.#destroyed(lease.size, lease.usage, lease.label);
  }

  /**
   * A command buffer with which no submit is accepted: for commands that use the buffer of `lease`, and that were encoded
   * before it was destroyed.
   */
  poison(lease) {
    this.poisoned += 1;
    const encoder = this.#native["GPUDevice.createCommandEncoder"].call(this.#device);
    this.#native["GPUCommandEncoder.clearBuffer"].call(encoder, this.#destroyed(4, COPY_DST, lease.label), 0, 4);
    return this.#native["GPUCommandEncoder.finish"].call(encoder);
  }

  /** A new buffer, destroyed; no error of it gets into the application's error scopes. */
  #destroyed(size, usage, label) {
    const native = this.#native;
    native["GPUDevice.pushErrorScope"].call(this.#device, "out-of-memory");
    const buffer = native["GPUDevice.createBuffer"].call(this.#device, { size, usage, label });
    native["GPUDevice.popErrorScope"].call(this.#device).catch(() => {});
    native["GPUBuffer.destroy"].call(buffer);
    return buffer;
  }
}
