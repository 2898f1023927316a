/*
 * A small WebGPU for Node, for what a real one does not do on demand: no memory, a lost device, minutes without work.
 * Buffers have no content but `value`, set by writeBuffer and clearBuffer as the queue comes to them. A realm for
 * attach({target}).
 */
export function makeRealm() {
  const realm = { created: 0, destroyed: 0, alive: 0, bytes: 0, submits: 0, busy: null };

  class GPUOutOfMemoryError {
    constructor(message) { this.message = message; }
  }
  class GPUValidationError {
    constructor(message) { this.message = message; }
  }

  class GPUBuffer {
    #label;
    constructor(device, { size, usage, label = "" }, valid) {
      this.inside = { device, valid, destroyed: false, value: 0, size, usage, mapped: "unmapped" };
      Object.defineProperty(this, "inside", { enumerable: false });
      this.#label = label;
      realm.created += 1;
      realm.alive += 1;
      realm.bytes += valid ? size : 0;
    }
    get size() { return this.inside.size; }
    get usage() { return this.inside.usage; }
    get mapState() { return this.inside.mapped; }
    get label() { return this.#label; }
    set label(value) { this.#label = `${value}`; }
    destroy() {
      const { inside } = this;
      if (inside.destroyed) return;
      inside.destroyed = true;
      realm.destroyed += 1;
      realm.alive -= 1;
      realm.bytes -= inside.valid ? inside.size : 0;
    }
    async mapAsync() {
      this.inside.mapped = "mapped";
    }
    unmap() { this.inside.mapped = "unmapped"; }
    getMappedRange() { return new ArrayBuffer(this.inside.size); }
  }

  class GPUCommandEncoder {
    constructor(device) {
      Object.defineProperty(this, "inside", { value: { device, commands: [], valid: true } });
    }
    use(...buffers) {
      for (const buffer of buffers) {
        if (!(buffer instanceof GPUBuffer) || !("inside" in buffer)) throw new TypeError("not of type 'GPUBuffer'");
        if (!buffer.inside.valid) this.inside.valid = false;
      }
    }
    clearBuffer(buffer, offset = 0, size = undefined) {
      this.use(buffer);
      this.inside.commands.push({ buffers: [buffer], run() { buffer.inside.value = 0; }, offset, size });
    }
    copyBufferToBuffer(from, ...rest) {
      const to = rest.find((value) => typeof value === "object");
      this.use(from, to);
      this.inside.commands.push({ buffers: [from, to], run() { to.inside.value = from.inside.value; } });
    }
    beginComputePass() { return new GPUComputePassEncoder(this); }
    finish() {
      const { device, commands, valid } = this.inside;
      if (!valid) device.raise(new GPUValidationError("[Invalid CommandEncoder]"));
      return { commands, valid };
    }
  }

  class GPUComputePassEncoder {
    constructor(encoder) { Object.defineProperty(this, "encoder", { value: encoder }); }
    setBindGroup(index, group) {
      if (group !== null) this.encoder.inside.commands.push({ buffers: group.buffers, run() {} });
    }
    dispatchWorkgroups() {}
    end() {}
  }

  class GPUQueue {
    constructor(device) { Object.defineProperty(this, "device", { value: device }); }
    async onSubmittedWorkDone() { while (realm.busy) await realm.busy; }
    submit(list) {
      realm.submits += 1;
      const all = [...list];
      const commands = all.flatMap((found) => found.commands);
      const dead = commands.flatMap(({ buffers }) => buffers).some(({ inside }) => inside.destroyed);
      const refused = dead || all.some(({ valid }) => !valid);
      if (refused) this.device.raise(new GPUValidationError("used in submit while destroyed"));
      else for (const command of commands) command.run();
    }
    writeBuffer(buffer, offset, data) {
      if (!("inside" in buffer)) throw new TypeError("not of type 'GPUBuffer'");
      if (buffer.inside.destroyed) this.device.raise(new GPUValidationError("used in submit while destroyed"));
      else buffer.inside.value = data[0];
    }
  }

  class GPUDevice {
    constructor() {
      this.inside = { scopes: [], listeners: new Set(), failing: 0 };
      this.queue = new GPUQueue(this);
      this.limits = { maxBufferSize: 2 ** 30 };
      this.lost = new Promise((resolve) => { this.inside.lose = resolve; });
    }
    raise(error) {
      const kind = error instanceof GPUOutOfMemoryError ? "out-of-memory" : "validation";
      const scope = this.inside.scopes.findLast(({ filter }) => filter === kind);
      if (scope) scope.error ??= error;
      else for (const listener of this.inside.listeners) listener({ error });
    }
    createBuffer(descriptor) {
      const fails = this.inside.failing > 0;
      if (fails) this.inside.failing -= 1;
      if (fails) this.raise(new GPUOutOfMemoryError("no memory"));
      return new GPUBuffer(this, descriptor, !fails);
    }
    createBindGroup({ entries }) {
      const buffers = [...entries].map(({ resource }) => resource.buffer ?? resource);
      if (buffers.some((buffer) => !("inside" in buffer))) throw new TypeError("not of type 'GPUBuffer'");
      return { buffers };
    }
    createCommandEncoder() { return new GPUCommandEncoder(this); }
    pushErrorScope(filter) { this.inside.scopes.push({ filter, error: null }); }
    async popErrorScope() {
      if (this.inside.scopes.length === 0) throw new Error("OperationError");
      return this.inside.scopes.pop().error;
    }
    addEventListener(type, listener) { this.inside.listeners.add(listener); }
    removeEventListener(type, listener) { this.inside.listeners.delete(listener); }
    destroy() { this.inside.lose({ reason: "destroyed" }); }
  }

  return Object.assign(realm, {
    GPUDevice, GPUQueue, GPUBuffer, GPUCommandEncoder, GPUComputePassEncoder, GPUOutOfMemoryError, GPUValidationError,
  });
}

/** Timers that run when the test says so. */
export class Clock {
  now = 0;
  #timers = new Map();
  #next = 1;
  setTimeout = (act, ms) => {
    this.#timers.set(this.#next, { act, due: this.now + ms });
    return this.#next++;
  };
  clearTimeout = (id) => this.#timers.delete(id);
  get pending() { return this.#timers.size; }
  advance(ms) {
    const end = this.now + ms;
    for (;;) {
      const next = [...this.#timers].filter(([, { due }]) => due <= end).sort((a, b) => a[1].due - b[1].due)[0];
      if (next === undefined) break;
      this.now = next[1].due;
      this.#timers.delete(next[0]);
      next[1].act();
    }
    this.now = end;
  }
}

export const DATA = 0x8c; // STORAGE | COPY_SRC | COPY_DST
export const settle = () => new Promise((resolve) => { setImmediate(resolve); });

/** Buffers of one size: created, submitted and destroyed, and what is free is known to be valid. */
export async function leave(device, count = 1, size = 256) {
  const buffers = Array.from({ length: count }, () => device.createBuffer({ size, usage: DATA }));
  device.queue.submit([]);
  await settle();
  for (const buffer of buffers) buffer.destroy();
  await settle();
  return buffers;
}
