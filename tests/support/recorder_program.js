/* A fake of WebGPU that does nothing but count, and a program on it: 64 growing KV tensors as a runtime runs them. A
   classic script, for Node: joined behind the modules under test (see tests/unit/attach/test_recorder_in_node.py). */
class GPUBuffer {
  constructor(device, { size, usage, label = "" }) {
    Object.assign(this, { device, size, usage, label, mapState: "unmapped" });
  }
  destroy() {}
  unmap() {}
  async mapAsync() {
    clock.ms += 0.2;
  }
}
class GPUComputePassEncoder {
  setBindGroup() {}
  dispatchWorkgroups() {}
  end() {}
}
class GPUCommandEncoder {
  constructor(device) {
    this.device = device;
  }
  beginComputePass() {
    return new GPUComputePassEncoder();
  }
  clearBuffer(buffer) {
    clock.ms += 0.01;
    if (buffer.fresh) clock.ms += (100 + 80 * (buffer.size / 2 ** 20)) / 1000; // the price comes with the first use
    buffer.fresh = false;
  }
  copyBufferToBuffer() {}
  finish() {
    return {};
  }
}
class GPUQueue {
  submit() {}
  writeBuffer() {}
}
class GPUDevice {
  constructor() {
    this.queue = new GPUQueue();
    this.limits = { maxBufferSize: 2 ** 30 };
    this.adapterInfo = { vendor: "fake", architecture: "", device: "", description: "a fake" };
    this.lost = new Promise((resolve) => (this.lose = resolve));
    this.scopes = 0;
    this.failing = false;
  }
  createBuffer(descriptor) {
    clock.ms += 0.004;
    return Object.assign(new GPUBuffer(this, descriptor), { fresh: true });
  }
  createBindGroup() {
    return {};
  }
  createCommandEncoder() {
    return new GPUCommandEncoder(this);
  }
  pushErrorScope(filter) {
    this.scopes += 1;
    this.filter = filter;
  }
  async popErrorScope() {
    this.scopes -= 1;
    return this.failing && this.filter === "out-of-memory" ? { message: "no memory" } : null;
  }
  destroy() {
    this.lose({ reason: "destroyed" });
  }
}
const clock = { ms: 1000 };
const now = () => clock.ms;
const STORAGE = 0x8c; // STORAGE | COPY_SRC | COPY_DST
const UNIFORM = 0x48;
const READ = 0x9; // MAP_READ | COPY_DST

/** Puts an observer's functions around the methods of the fake, as shims.js does; returns the methods before. */
function watch(observer) {
  const methods = {};
  for (const type of [GPUDevice, GPUBuffer, GPUQueue, GPUCommandEncoder, GPUComputePassEncoder]) {
    for (const method of Object.getOwnPropertyNames(type.prototype)) {
      if (method === "constructor") continue;
      const name = `${type.name}.${method}`;
      const native = (methods[name] = type.prototype[method]);
      type.prototype[method] = function (...args) {
        observer.before[name]?.(this, args);
        const result = native.apply(this, args);
        observer.after[name]?.(this, args, result);
        return result;
      };
    }
  }
  return methods;
}

/** One decode step of a runtime: `tensors` are created, the past ones destroyed once the result is asked for. */
async function step(device, past, { tensors, bytes, downloads = 1 }) {
  const params = device.createBuffer({ size: 32, usage: UNIFORM, label: "params" });
  device.queue.writeBuffer(params, 0, new Uint32Array(8), 2, 4); // 16 B
  const present = [];
  for (let i = 0; i < tensors; i += 1) present.push(device.createBuffer({ size: bytes, usage: STORAGE, label: "kv" }));
  for (let part = 0; part < 2; part += 1) {
    const encoder = device.createCommandEncoder();
    if (tensors) encoder.clearBuffer(present[0]);
    const pass = encoder.beginComputePass();
    for (let i = 0; i < tensors; i += 1) {
      device.createBindGroup({ layout: null, entries: [{ binding: 0, resource: { buffer: present[i] } }] });
      pass.dispatchWorkgroups(8, 2);
    }
    pass.end();
    device.queue.submit([encoder.finish()]);
  }
  const staging = device.createBuffer({ size: 64, usage: READ });
  for (let i = 0; i < downloads; i += 1) {
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(present[0] ?? params, 0, staging, 0, 64);
    device.queue.submit([encoder.finish()]);
    await staging.mapAsync(1);
    staging.unmap();
  }
  for (const buffer of [...past, params, staging]) buffer.destroy();
  clock.ms += 10;
  return present;
}
