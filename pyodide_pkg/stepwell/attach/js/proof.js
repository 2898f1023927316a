/**
 * Proves that new native buffers are valid before one of them is kept.
 *
 * createBuffer returns an object also when there was no memory for it, and what the browser says of it belongs to the
 * application's error scopes. So all new buffers of a task are cleared in one encoder, inside an error scope of ours;
 * it is finished and never submitted. Where that fails, each is tried alone.
 */
export class Proof {
  #device;
  #native;
  #settled;
  #fresh = [];

  /** @param {(kept: object, valid: boolean) => void} settled */
  constructor(device, native, settled) {
    this.#device = device;
    this.#native = native;
    this.#settled = settled;
  }

  add(kept) {
    this.#fresh.push(kept);
    if (this.#fresh.length === 1) queueMicrotask(() => this.#begin());
  }

  async #begin() {
    const batch = this.#fresh;
    this.#fresh = [];
    const valid = await this.#isValid(batch);
    const each = valid || batch.length === 1 ? batch.map(() => valid) : batch.map((kept) => this.#isValid([kept]));
    const verdicts = await Promise.all(each);
    batch.forEach((kept, index) => this.#settled(kept, verdicts[index]));
  }

  /** Whether the whole `batch` is valid. Never rejects: what cannot be proved, as on a lost device, is not. */
  async #isValid(batch) {
    const native = this.#native;
    const device = this.#device;
    try {
      native["GPUDevice.pushErrorScope"].call(device, "validation");
      const encoder = native["GPUDevice.createCommandEncoder"].call(device);
      const clear = native["GPUCommandEncoder.clearBuffer"];
      for (const kept of batch) clear.call(encoder, kept.native, 0, 4);
      native["GPUCommandEncoder.finish"].call(encoder);
      return (await native["GPUDevice.popErrorScope"].call(device)) === null;
    } catch {
      return false;
    }
  }
}
