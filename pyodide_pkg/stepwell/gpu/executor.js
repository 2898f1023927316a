// The JS half of the seam: turns the ints that Python decided on into WebGPU calls. It decides nothing.
//
// Evaluated once by js_device.py; its value is { openAdapter, urlSource, fileSource, opfsSource }.
// Errors carry the name of a class in stepwell/errors.py, which js_device.py raises. What WebGPU reports late is kept in
// `failure` and thrown by the next awaited method, so that no error is ever silent.
(() => {
  "use strict";

  const [BEGIN_PASS, END_PASS, DISPATCH, COPY, CLEAR, WRITE, SUBMIT] = [1, 2, 3, 4, 5, 6, 7]; // gpu/program.py
  const SCOPES = ["validation", "out-of-memory", "internal"];
  const UPLOAD_BLOCK = 4 << 20; // bytes gathered before one writeBuffer
  const UPLOAD_IN_FLIGHT = 64 << 20; // staging of writeBuffer piles up in the GPU process: wait this often

  const failed = (name, message) => Object.assign(new Error(message), { name });
  const roundUp4 = (nbytes) => (nbytes + 3) & ~3;

  class Executor {
    constructor(device) {
      this.device = device;
      this.nextHandle = 1; // never reused: Python keys its caches by these
      this.tables = { buffers: new Map(), pipelines: new Map(), bindGroups: new Map() };
      this.program = new Uint32Array(1 << 14);
      this.failure = null;
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

    add(table, object) {
      const handle = this.nextHandle++;
      table.set(handle, object);
      return handle;
    }

    // ---- objects -------------------------------------------------------------------------------------------------

    createBuffer(size, usage, label) {
      this.throwIfLost();
      return this.add(this.tables.buffers, this.device.createBuffer({ size, usage, label }));
    }

    async createPipeline(code, label, ...types) {
      const { device } = this;
      const entries = types.map((type, binding) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } }));
      device.pushErrorScope("validation");
      const module = device.createShaderModule({ code, label });
      const layout = device.createBindGroupLayout({ entries, label });
      const invalid = device.popErrorScope();
      let pipeline;
      try {
        pipeline = await device.createComputePipelineAsync({
          label,
          layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
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
      return this.add(this.tables.pipelines, { pipeline, layout, count: types.length });
    }

    // operands: buffer, offset, size (0 = to the end), …
    createBindGroup(pipeline, ...operands) {
      const { layout, count } = this.get("pipelines", pipeline);
      if (operands.length !== 3 * count) {
        throw failed("UsageError", `pipeline ${pipeline} has ${count} bindings, ${operands.length / 3} given`);
      }
      const entries = [];
      for (let binding = 0; binding < count; binding++) {
        const [handle, offset, size] = operands.slice(3 * binding, 3 * binding + 3);
        const buffer = this.get("buffers", handle);
        entries.push({ binding, resource: { buffer, offset, size: size || undefined } });
      }
      return this.add(this.tables.bindGroups, this.device.createBindGroup({ layout, entries }));
    }

    get(kind, handle) {
      const object = this.tables[kind].get(handle);
      if (object === undefined) throw failed("UsageError", `handle ${handle} is not one of the live ${kind}`);
      return object;
    }

    destroy(handle) {
      const { buffers, pipelines, bindGroups } = this.tables;
      const buffer = buffers.get(handle);
      if (buffer) {
        buffer.destroy();
        buffers.delete(handle);
      } else if (!pipelines.delete(handle) && !bindGroups.delete(handle)) {
        throw failed("UsageError", `handle ${handle} is not alive: destroyed twice, or never created`);
      }
    }

    // ---- work ----------------------------------------------------------------------------------------------------

    // The array that Python assigns the next program to; valid until the next call.
    words(count) {
      if (count > this.program.length) this.program = new Uint32Array(2 * count);
      return this.program.subarray(0, count);
    }

    submit(count) {
      this.throwIfLost();
      const { device, program: w } = this;
      const { pipelines, bindGroups } = this.tables;
      let encoder = null;
      let pass = null;
      let bound = 0;
      const encoding = () => (encoder ??= device.createCommandEncoder());
      const outside = (what) => {
        if (pass) throw failed("UsageError", `${what} inside an open compute pass`);
      };
      let i = 0;
      while (i < count) {
        switch (w[i]) {
          case DISPATCH: {
            if (!pass) throw failed("UsageError", "DISPATCH outside a compute pass");
            if (w[i + 1] !== bound) {
              bound = w[i + 1];
              pass.setPipeline((pipelines.get(bound) ?? this.get("pipelines", bound)).pipeline);
            }
            pass.setBindGroup(0, bindGroups.get(w[i + 2]) ?? this.get("bindGroups", w[i + 2]));
            pass.dispatchWorkgroups(w[i + 3], w[i + 4], w[i + 5]);
            i += 6;
            break;
          }
          case COPY:
            outside("COPY");
            encoding().copyBufferToBuffer(
              this.get("buffers", w[i + 1]), w[i + 2], this.get("buffers", w[i + 3]), w[i + 4], w[i + 5]);
            i += 6;
            break;
          case CLEAR:
            outside("CLEAR");
            encoding().clearBuffer(this.get("buffers", w[i + 1]), w[i + 2], w[i + 3]);
            i += 4;
            break;
          case WRITE: {
            const words = w[i + 3];
            if (i + 4 + words > count) throw failed("UsageError", "the program is cut off in a WRITE");
            device.queue.writeBuffer(this.get("buffers", w[i + 1]), w[i + 2], w, i + 4, words);
            i += 4 + words;
            break;
          }
          case BEGIN_PASS:
            outside("BEGIN_PASS");
            pass = encoding().beginComputePass();
            bound = 0;
            i += 1;
            break;
          case END_PASS:
            if (!pass) throw failed("UsageError", "END_PASS without an open compute pass");
            pass.end();
            pass = null;
            i += 1;
            break;
          case SUBMIT:
            outside("SUBMIT");
            if (encoder) device.queue.submit([encoder.finish()]);
            encoder = null;
            i += 1;
            break;
          default:
            throw failed("UsageError", `word ${i} of the program is ${w[i]}, which is no opcode`);
        }
      }
      if (i > count) throw failed("UsageError", "the program is cut off in its last instruction");
      if (encoder) throw failed("UsageError", "the program ends with work that it did not submit");
    }

    writeBuffer(handle, offset, bytes) {
      this.throwIfLost();
      this.device.queue.writeBuffer(this.get("buffers", handle), offset, bytes);
    }

    async readBuffer(handle, offset, nbytes) {
      const buffer = this.get("buffers", handle);
      this.throwIfLost();
      const mapped = buffer.mapAsync(GPUMapMode.READ, offset, nbytes);
      const collected = this.collect();
      let bytes;
      try {
        await mapped;
        bytes = new Uint8Array(buffer.getMappedRange(offset, nbytes).slice(0));
        buffer.unmap();
      } catch (error) {
        await collected;
        this.throwFailure();
        throw failed("UsageError", `read of buffer ${handle}: ${error.message}`);
      }
      await collected;
      this.throwFailure();
      return bytes;
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
            this.device.queue.writeBuffer(this.get("buffers", handle), target + written, block, 0, roundUp4(size));
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

    // What the device was opened with, as a JSON string.
    granted() {
      return JSON.stringify({ limits: limitsOf(this.device), features: [...this.device.features] });
    }

    sizes() {
      const { buffers, pipelines, bindGroups } = this.tables;
      return [buffers.size, pipelines.size, bindGroups.size];
    }

    close() {
      for (const buffer of this.tables.buffers.values()) buffer.destroy();
      for (const table of Object.values(this.tables)) table.clear();
      this.device.destroy();
      this.fail("DeviceLost", "the device was closed");
    }
  }

  // Reads a ReadableStream as exact runs of bytes.
  class ByteStream {
    constructor(stream, position, name) {
      this.reader = stream.getReader();
      this.position = position;
      this.name = name;
      this.rest = new Uint8Array(0);
    }

    async more() {
      if (this.rest.length) return;
      const { value, done } = await this.reader.read();
      if (done) throw failed("BadFile", `${this.name}: the file ends at byte ${this.position}`);
      this.rest = value;
    }

    take(nbytes) {
      const piece = this.rest.subarray(0, nbytes);
      this.rest = this.rest.subarray(piece.length);
      this.position += piece.length;
      return piece;
    }

    async skipTo(offset) {
      while (this.position < offset) {
        await this.more();
        this.take(offset - this.position);
      }
    }

    async fill(target, nbytes) {
      for (let have = 0; have < nbytes;) {
        await this.more();
        const piece = this.take(nbytes - have);
        target.set(piece, have);
        have += piece.length;
      }
    }

    async close() {
      await this.reader.cancel().catch(() => {});
    }
  }

  // Limits are accessors of the prototype: neither JSON nor spreading sees them.
  function limitsOf({ limits }) {
    const values = {};
    for (const name in limits) values[name] = limits[name];
    return values;
  }

  function kindOf(error) {
    if (error instanceof GPUOutOfMemoryError) return "OutOfMemory";
    return error instanceof GPUValidationError ? "UsageError" : "DeviceError";
  }

  // ---- byte sources: { name, size, read(from, to) -> Uint8Array, stream(from, to) -> ReadableStream } ----------------

  async function urlSource(url, name) {
    const get = async (headers) => {
      let response;
      try {
        response = await fetch(url, { headers });
      } catch (error) {
        throw failed("BadFile", `${name}: cannot be fetched from ${url}: ${error.message}`);
      }
      if (!response.ok) throw failed("BadFile", `${name}: the server answered ${response.status} for ${url}`);
      return response;
    };
    const probe = await get({ Range: "bytes=0-0" });
    await probe.body?.cancel();
    const ranged = probe.status === 206;
    const size = Number(ranged ? probe.headers.get("Content-Range")?.split("/")[1] : probe.headers.get("Content-Length"));
    if (!(size > 0)) throw failed("BadFile", `${name}: the server does not say how long ${url} is`);
    const stream = async (from, to) => {
      if (ranged) return (await get({ Range: `bytes=${from}-${to - 1}` })).body;
      const { body } = await get({}); // no ranges: read from the start and drop what comes before
      let skip = from;
      return body.pipeThrough(new TransformStream({
        transform(piece, controller) {
          const drop = Math.min(skip, piece.length);
          skip -= drop;
          if (drop < piece.length) controller.enqueue(piece.subarray(drop));
        },
      }));
    };
    const read = async (from, to) => {
      const end = Math.min(to, size);
      const bytes = new ByteStream(await stream(from, end), from, name);
      const target = new Uint8Array(end - from);
      await bytes.fill(target, target.length);
      await bytes.close();
      return target;
    };
    return { name, size, read, stream };
  }

  function fileSource(file) {
    return {
      name: file.name,
      size: file.size,
      read: async (from, to) => new Uint8Array(await file.slice(from, to).arrayBuffer()),
      stream: async (from, to) => file.slice(from, to).stream(),
    };
  }

  async function opfsSource(path) {
    const parts = path.split("/").filter(Boolean);
    try {
      let folder = await navigator.storage.getDirectory();
      for (const part of parts.slice(0, -1)) folder = await folder.getDirectoryHandle(part);
      return fileSource(await (await folder.getFileHandle(parts.at(-1))).getFile());
    } catch (error) {
      throw failed("BadFile", `${path}: not in the origin's private file system: ${error.message}`);
    }
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
      vendor, architecture, description, subgroupMinSize, subgroupMaxSize, limits: limitsOf(adapter),
      isFallback: Boolean(isFallbackAdapter ?? adapter.isFallbackAdapter), features: [...adapter.features],
    };
    const openDevice = async (requestJson) => {
      const device = await adapter.requestDevice(JSON.parse(requestJson));
      return new Executor(device);
    };
    return { facts: JSON.stringify(facts), openDevice };
  }

  return { openAdapter, urlSource, fileSource, opfsSource };
})();
