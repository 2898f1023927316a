// The JS half of the seam: turns the ints that Python decided on into WebGPU calls. It decides nothing.
//
// The last of the files of js_device.py's script (see program.js): its value is the object at the end.
// Errors carry the name of a class in stepwell/errors.py, which js_device.py raises. What WebGPU reports late is kept in
// `failure` and thrown by the next awaited method, so that no error is ever silent.

const SCOPES = ["validation", "out-of-memory", "internal"];
const UPLOAD_BLOCK = 4 << 20; // bytes gathered before one writeBuffer
const UPLOAD_IN_FLIGHT = 64 << 20; // staging of writeBuffer piles up in the GPU process: wait this often

const roundUp4 = (nbytes) => (nbytes + 3) & ~3;

class Executor {
  constructor(device) {
    this.device = device;
    this.tables = new Tables();
    this.profile = new DeviceProfile(device);
    this.program = new Uint32Array(1 << 14);
    this.failure = null;
    this.deliver = null;
    this.openScopes();
    device.lost.then(({ reason, message }) => {
      if (reason !== "destroyed") this.fail("DeviceLost", message || "the GPU device was lost");
    });
  }

  fail(name, message) {
    // a loss outranks what it caused
    if (!this.failure || name === "DeviceLost") this.failure = { name, message };
  }

  // One error scope of each kind is always open, so that late errors arrive in order and none is missed: an
  // uncapturederror event may come after the promises of the work that caused it.
  openScopes() {
    for (const kind of SCOPES) this.device.pushErrorScope(kind);
  }

  // Resolves once every error of the calls so far is in `failure`.
  collect() {
    const errors = SCOPES.map(() => this.device.popErrorScope());
    this.openScopes();
    return Promise.allSettled(errors).then((results) => {
      for (const { value: error } of results) if (error) this.fail(kindOf(error), error.message);
    });
  }

  // Throws what went wrong since the last time.
  throwFailure() {
    this.throwIfLost();
    if (this.failure) {
      const { name, message } = this.failure;
      this.failure = null;
      throw failed(name, message);
    }
  }

  // ---- objects -------------------------------------------------------------------------------------------------

  createBuffer(size, usage, label) {
    this.throwIfLost();
    return this.tables.add(this.tables.buffers, this.device.createBuffer({ size, usage, label }));
  }

  async createPipeline(code, label, first, immediateSize, ...types) {
    const { device } = this;
    const visibility = GPUShaderStage.COMPUTE;
    const entries = types.map((type, index) => ({ binding: first + index, visibility, buffer: { type } }));
    device.pushErrorScope("validation");
    const module = device.createShaderModule({ code, label });
    const layout = device.createBindGroupLayout({ entries, label });
    const invalid = device.popErrorScope();
    let pipeline;
    try {
      pipeline = await device.createComputePipelineAsync({
        label,
        layout: device.createPipelineLayout({ bindGroupLayouts: [layout], immediateSize }),
        compute: { module, entryPoint: "main" },
      });
    } catch (error) {
      this.throwIfLost();
      const { messages } = await module.getCompilationInfo();
      const lines = code.split("\n");
      const report = messages.filter((m) => m.type === "error")
        .map((m) => `${m.lineNum}:${m.linePos} ${m.message}\n    ${lines[m.lineNum - 1] ?? ""}`);
      throw failed("ShaderError", `${label}: ${report.length ? report.join("\n") : error.message}`);
    }
    const problem = await invalid;
    if (problem) throw failed("ShaderError", `${label}: ${problem.message}`);
    return this.tables.add(this.tables.pipelines, { pipeline, layout, first, count: types.length });
  }

  // operands: buffer, offset, size (0 = to the end), …
  createBindGroup(pipeline, ...operands) {
    const { tables } = this;
    const { layout, first, count } = tables.pipeline(pipeline);
    if (operands.length !== 3 * count) {
      throw failed("UsageError", `pipeline ${pipeline} has ${count} bindings, ${operands.length / 3} given`);
    }
    const entries = [];
    const buffers = [];
    for (let index = 0; index < count; index++) {
      const handle = operands[3 * index];
      const resource = { buffer: tables.buffer(handle), offset: operands[3 * index + 1] };
      const size = operands[3 * index + 2];
      if (size) resource.size = size;
      entries.push({ binding: first + index, resource });
      buffers.push(handle);
    }
    return tables.add(tables.bindGroups, { group: this.device.createBindGroup({ layout, entries }), buffers });
  }

  // The plan of the `count` words that were assigned.
  createPlan(count) {
    this.throwIfLost();
    return this.tables.addPlan(this.program.slice(0, count));
  }

  destroy(handle) {
    this.tables.destroy(handle);
  }

  // ---- work ----------------------------------------------------------------------------------------------------

  // The array that Python assigns the next program to; valid until the next call.
  words(count) {
    if (count > this.program.length) this.program = new Uint32Array(2 * count);
    return this.program.subarray(0, count);
  }

  submit(count) {
    this.throwIfLost();
    const { program, tables } = this;
    const objects = new Array(count).fill(null);
    if (resolve(program, count, objects, tables)) objects[STAGING] = tables.buffer(program[STAGING]);
    execute(this.device, program, count, objects, this.profile);
  }

  replay(handle, position, rows, length, draw, staging) {
    this.throwIfLost();
    const { words, objects, copiesOut } = this.tables.plan(handle);
    words[1] = position;
    words[2] = rows;
    words[3] = length;
    words[4] = draw;
    if (copiesOut) objects[STAGING] = this.tables.buffer(staging);
    execute(this.device, words, words.length, objects, this.profile);
  }

  writeBuffer(handle, offset, bytes) {
    this.throwIfLost();
    this.device.queue.writeBuffer(this.tables.buffer(handle), offset, bytes);
  }

  // deliver(ticket, bytes, error) is Python's, one of the two undefined; it is there until `close`.
  setDeliver(deliver) {
    this.deliver = deliver;
  }

  // Delivers bytes (4 as a number) or what went wrong. An error leaves `failure` for the next awaited method: only who
  // awaits the read, and says so by `acknowledge`, has heard of it.
  readBuffer(ticket, handle, offset, nbytes) {
    this.read(handle, offset, nbytes).then(
      (bytes) => this.deliver?.(ticket, bytes, undefined),
      (error) => this.deliver?.(ticket, undefined, error),
    );
  }

  async read(handle, offset, nbytes) {
    this.throwIfLost();
    const buffer = this.tables.buffer(handle);
    const mapped = buffer.mapAsync(GPUMapMode.READ, offset, nbytes);
    const collected = this.collect();
    let bytes = null;
    let problem = null;
    try {
      await mapped;
      const range = buffer.getMappedRange(offset, nbytes);
      bytes = nbytes === 4 ? new Uint32Array(range)[0] : new Uint8Array(range.slice(0));
      buffer.unmap();
    } catch (error) {
      problem = failed("UsageError", `read of buffer ${handle}: ${error.message}`);
    }
    await collected;
    if (this.failure) throw Object.assign(failed(this.failure.name, this.failure.message), { failure: this.failure });
    if (problem) throw problem;
    return bytes;
  }

  // A read that was awaited has raised `error`.
  acknowledge({ failure }) {
    if (failure && failure === this.failure && failure.name !== "DeviceLost") this.failure = null;
  }

  async wait() {
    const collected = this.collect();
    await this.device.queue.onSubmittedWorkDone();
    await collected;
    this.throwFailure();
  }

  throwIfLost() {
    if (this.failure?.name === "DeviceLost") throw failed("DeviceLost", this.failure.message);
  }

  // `table` holds (source offset, bytes, buffer, buffer offset) per chunk, in file order. The bytes go from the stream
  // to the queue; `progress(done, total)` is called after each block.
  async upload(source, table, progress) {
    const chunks = [];
    for (let i = 0; i < table.length; i += 4) chunks.push(table.slice(i, i + 4));
    if (!chunks.length) return;
    const total = chunks.reduce((sum, [, nbytes]) => sum + nbytes, 0);
    const [lastOffset, lastBytes] = chunks[chunks.length - 1];
    const bytes = new ByteStream(await source.stream(chunks[0][0], lastOffset + lastBytes), chunks[0][0], source.name);
    const block = new Uint8Array(UPLOAD_BLOCK);
    let done = 0;
    let inFlight = 0;
    try {
      for (const [offset, nbytes, handle, target] of chunks) {
        await bytes.skipTo(offset);
        for (let written = 0; written < nbytes;) {
          const size = Math.min(UPLOAD_BLOCK, nbytes - written);
          await bytes.fill(block, size);
          block.fill(0, size, roundUp4(size));
          this.throwIfLost();
          this.device.queue.writeBuffer(this.tables.buffer(handle), target + written, block, 0, roundUp4(size));
          written += size;
          done += size;
          inFlight += size;
          progress?.(done, total);
          if (inFlight >= UPLOAD_IN_FLIGHT) {
            await this.device.queue.onSubmittedWorkDone();
            inFlight = 0;
          }
        }
      }
    } finally {
      await bytes.close();
    }
    await this.collect();
    this.throwFailure();
  }

  setProfile(spans, passes) {
    this.profile.set(spans, passes);
  }

  async takeProfile() {
    this.throwIfLost();
    const taken = this.profile.take();
    await Promise.allSettled([taken]); // if it failed, `failure` knows better why
    await this.collect();
    this.throwFailure();
    return taken;
  }

  // What the device was opened with, as a JSON string.
  granted() {
    const { limits, features } = this.device;
    const language = [...navigator.gpu.wgslLanguageFeatures ?? []];
    const immediateBytes = language.includes("immediate_address_space") ? limits.maxImmediateSize : 0;
    return JSON.stringify({ limits: limitsOf(limits), features: [...features], language, immediateBytes });
  }

  sizes() {
    return this.tables.sizes();
  }

  close() {
    this.deliver = null;
    this.tables.clear();
    this.device.destroy();
    this.fail("DeviceLost", "the device was closed");
  }
}

// Limits are accessors of the prototype: neither JSON nor spreading sees them.
function limitsOf(limits) {
  const values = {};
  for (const name in limits) values[name] = limits[name];
  return values;
}

function kindOf(error) {
  if (error instanceof GPUOutOfMemoryError) return "OutOfMemory";
  return error instanceof GPUValidationError ? "UsageError" : "DeviceError";
}

// ---- adapter and device ------------------------------------------------------------------------------------------

// An adapter as plain data (a JSON string), and a way to open it.
async function openAdapter() {
  if (!globalThis.navigator?.gpu) {
    throw failed("NoWebGPU", "navigator.gpu is missing: use Chrome 113 or newer, on https or localhost.");
  }
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) {
    throw failed("NoWebGPU", "WebGPU is there, but no adapter: see chrome://gpu; a blocklisted or missing GPU driver is the usual cause.");
  }
  const { vendor, architecture, description, isFallbackAdapter, subgroupMinSize, subgroupMaxSize } = adapter.info;
  const facts = {
    vendor, architecture, description, subgroupMinSize, subgroupMaxSize, limits: limitsOf(adapter.limits),
    isFallback: Boolean(isFallbackAdapter ?? adapter.isFallbackAdapter), features: [...adapter.features],
  };
  const openDevice = async (requestJson) => {
    const device = await adapter.requestDevice(JSON.parse(requestJson));
    return new Executor(device);
  };
  return { facts: JSON.stringify(facts), openDevice };
}

({ openAdapter, urlSource, fileSource, opfsSource });
