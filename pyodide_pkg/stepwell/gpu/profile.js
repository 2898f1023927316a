// Measuring: what the thread spends on encoding and on queue.submit, and what the GPU spends on each compute pass.

const [ENCODE, SUBMITTING] = [0, 1]; // the names of spans, as js_device.py has them
const QUERIES = 4096; // the most that one GPUQuerySet may have; two per pass

class DeviceProfile {
  constructor(device) {
    this.device = device;
    this.spans = this.passes = false;
    this.taken = []; // kind, start, end of each span, ms
    this.mark = 0;
    this.sets = []; // { querySet, used } with timestamps since the last take
    this.free = []; // query sets without
  }

  set(spans, passes) {
    this.spans = spans;
    this.passes = passes;
  }

  beginSpan() {
    this.mark = performance.now();
  }

  endSpan(kind) {
    const now = performance.now();
    this.taken.push(kind, this.mark, now);
    this.mark = now;
  }

  // The descriptor of a compute pass that the GPU times.
  timedPass() {
    let set = this.sets.at(-1);
    if (!set || set.used === QUERIES) {
      const querySet = this.free.pop() ?? this.device.createQuerySet({ type: "timestamp", count: QUERIES });
      this.sets.push(set = { querySet, used: 0 });
    }
    const first = set.used;
    set.used += 2;
    const { querySet } = set;
    return { timestampWrites: { querySet, beginningOfPassWriteIndex: first, endOfPassWriteIndex: first + 1 } };
  }

  // One array: the time now, the number of spans, each span's kind, start and end, then the microseconds of each pass.
  async take() {
    const { sets, taken } = this;
    this.sets = [];
    this.taken = [];
    const passes = [];
    for (const set of sets) passes.push(...await this.passTimes(set));
    this.free.push(...sets.map((set) => set.querySet));
    return new Float64Array([performance.now(), taken.length / 3, ...taken, ...passes]);
  }

  async passTimes({ querySet, used }) {
    const { device } = this;
    const size = 8 * used;
    const resolved = device.createBuffer({ size, usage: GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC });
    const staging = device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    try {
      const encoder = device.createCommandEncoder();
      encoder.resolveQuerySet(querySet, 0, used, resolved, 0);
      encoder.copyBufferToBuffer(resolved, 0, staging, 0, size);
      device.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      const nanoseconds = new BigUint64Array(staging.getMappedRange());
      return Array.from({ length: used / 2 }, (_, i) => Number(nanoseconds[2 * i + 1] - nanoseconds[2 * i]) / 1e3);
    } finally {
      resolved.destroy();
      staging.destroy();
    }
  }
}
