export const [MAP_READ, MAP_WRITE, COPY_SRC, COPY_DST, INDEX, VERTEX] = [1, 2, 4, 8, 16, 32];
export const [UNIFORM, STORAGE, INDIRECT, QUERY_RESOLVE] = [64, 128, 256, 512];
export const DATA = STORAGE | COPY_SRC | COPY_DST;
export const ALL = DATA | INDEX | VERTEX | UNIFORM | INDIRECT | QUERY_RESOLVE;
const GARBAGE = 0xdeadbeef;
export const SIZE = 256;

export const LENGTHS = `
@group(0) @binding(0) var<storage, read_write> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(1) fn main() { y[0] = arrayLength(&x); y[1] = x[0]; y[2] = x[arrayLength(&x) - 1]; }`;
export const TOUCH = `
@group(0) @binding(0) var<storage, read_write> x: array<u32>;
@compute @workgroup_size(1) fn main() { x[0] += 7; }`;
/** What a case works with. */
export class Bench {
  constructor(device) {
    this.device = device;
    this.queue = device.queue;
  }

  create(usage = DATA, size = SIZE, label = "") {
    return this.device.createBuffer({ size, usage, label });
  }

  /** Until what was asked of the browser so far is done, the pool's proofs included. */
  async settle() {
    for (let i = 0; i < 2; i += 1) {
      await this.queue.onSubmittedWorkDone();
      this.device.pushErrorScope("internal");
      await this.device.popErrorScope();
    }
  }

  /** Buffers that were full of garbage and are destroyed: what comes next of this size may be one of them. */
  async leave(count = 1, usage = DATA, size = SIZE) {
    const buffers = Array.from({ length: count }, () => this.create(usage, size, "left"));
    for (const buffer of buffers) this.queue.writeBuffer(buffer, 0, new Uint32Array(size / 4).fill(GARBAGE));
    await this.settle();
    for (const buffer of buffers) buffer.destroy();
    return buffers;
  }

  /** A buffer that was somebody else's, if there is a pool. */
  async second(usage = DATA, size = SIZE, label = "") {
    await this.leave(1, usage, size);
    return this.create(usage, size, label);
  }

  async read(buffer, size = buffer.size) {
    const staging = this.create(MAP_READ | COPY_DST, size);
    this.submit((encoder) => encoder.copyBufferToBuffer(buffer, 0, staging, 0, size));
    await staging.mapAsync(1);
    const words = [...new Uint32Array(staging.getMappedRange())];
    staging.destroy();
    return words;
  }

  encode(record) {
    const encoder = this.device.createCommandEncoder();
    record(encoder);
    return encoder.finish();
  }

  submit(record) {
    this.queue.submit([this.encode(record)]);
  }

  pipeline(code) {
    const module = this.device.createShaderModule({ code });
    return this.device.createComputePipeline({ layout: "auto", compute: { module } });
  }

  group(pipeline, ...resources) {
    return this.device.createBindGroup({
      layout: pipeline.getBindGroupLayout(0),
      entries: resources.map((resource, binding) => ({ binding, resource })),
    });
  }

  dispatch(encoder, pipeline, group, begin = (pass) => pass.dispatchWorkgroups(1)) {
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    begin(pass);
    pass.end();
  }

  /** The errors of each kind, by the first line of their message, while `act` runs. */
  async errors(act) {
    const filters = ["validation", "out-of-memory", "internal"];
    for (const filter of filters) this.device.pushErrorScope(filter);
    await act();
    const found = [];
    for (const _ of filters) found.push(this.device.popErrorScope());
    const text = (error) => error && `${error.constructor.name}: ${error.message.split("\n")[0]}`;
    return (await Promise.all(found)).map(text);
  }
}

export function thrown(act) {
  try {
    const result = act();
    return `returned ${typeof result}`;
  } catch (error) {
    return `${error.name}: ${error.message}`;
  }
}

export async function rejected(promise) {
  try {
    return `resolved ${typeof await promise}`;
  } catch (error) {
    return `${error.name}`;
  }
}
