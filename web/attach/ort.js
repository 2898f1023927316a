// Decodes with onnxruntime-web as transformers.js does, on the models of harness/site/onnx_models.py: K and V stay on the GPU,
// present.* is the next step's past, and the old past is disposed of when a step's result is back.  Whether something is
// attached under the runtime is the caller's business: nothing here knows of it.
import { HEAD_DIM, HEADS, TENSORS } from "../models/onnx/models.js"; // written by the site build

const VENDOR = new URL("../vendor/onnxruntime-web/", import.meta.url);
const MODELS = new URL("../models/onnx/", import.meta.url);
const LANES = HEADS * HEAD_DIM;
const POSITION_BYTES = 4 * LANES;

/** The runtime's module; its binary is fetched with the first session. */
export async function loadRuntime() {
  const ort = await import(new URL("ort.webgpu.bundle.min.mjs", VENDOR).href);
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  return ort;
}

/** A step's row: whole numbers below 256, so that sums of thousands of them are exact in f32. */
export function row(step) {
  return Float32Array.from({ length: LANES }, (_, lane) => ((step + 1) * 193 + lane * 31) % 256);
}

/** The values of tensor `index` in position 0 of its first head before the first step; all else in it is 0. */
export function mark(index) {
  return Float32Array.from({ length: HEAD_DIM }, (_, lane) => (index + 1) * 16 + (lane % 16));
}

/** FNV-1a over the words of some values or bytes: equal bits, equal digest. */
export function digest({ buffer, byteOffset, byteLength }, seed = 0x811c9dc5) {
  const words = new Uint32Array(buffer, byteOffset, byteLength / 4);
  let hash = seed;
  for (let i = 0; i < words.length; i++) hash = Math.imul(hash ^ words[i], 0x01000193);
  return hash >>> 0;
}

/** The inputs of a step (`feeds`), and the values that it must read from K and V (`expected`; null: unknown). */
const KINDS = {
  filling: {
    feeds(ort, step, positions) {
      const shape = BigInt64Array.of(1n, BigInt(HEADS), BigInt(positions + 1), BigInt(HEAD_DIM));
      return {
        row: new ort.Tensor("float32", row(step), [1, HEADS, 1, HEAD_DIM]),
        probe: new ort.Tensor("int32", Int32Array.of(step ? (step * 977) % positions : 0), [1]),
        shape: new ort.Tensor("int64", shape, [4]),
      };
    },
    expected(decoder, step) {
      const total = decoder.total;
      row(step).forEach((value, lane) => (total[lane] += value));
      return concatenated(decoder.names.map((_, index) => marked(Float32Array.from(total), index)));
    },
  },
  appending: {
    feeds(ort, step, positions) {
      const probes = Int32Array.of(0, (step * 977) % positions, positions);
      return {
        row: new ort.Tensor("float32", row(step), [1, HEADS, 1, HEAD_DIM]),
        probe: new ort.Tensor("int32", probes, [probes.length]),
      };
    },
    expected(decoder, step, positions) {
      const { start } = decoder;
      const at = (index, position) => {
        if (position >= start) return row(position - start);
        return position ? new Float32Array(LANES) : marked(new Float32Array(LANES), index);
      };
      const probes = [0, (step * 977) % positions, positions];
      return concatenated(decoder.names.map((_, index) => byHead(probes.map((position) => at(index, position)))));
    },
  },
  attention: {
    feeds(ort, step, positions) {
      const scaled = row(step).map((value) => value / 256);
      return {
        row: new ort.Tensor("float32", scaled, [1, 1, LANES]),
        last_position: new ort.Tensor("int32", Int32Array.of(positions), [1]),
        positions: new ort.Tensor("int32", Int32Array.of(positions + 1), [1]),
      };
    },
    expected: () => null,
  },
};

function kindOf(inputs) {
  if (inputs.includes("shape")) return KINDS.filling;
  return inputs.includes("probe") ? KINDS.appending : KINDS.attention;
}

function marked(values, index) {
  mark(index).forEach((value, lane) => (values[lane] += value));
  return values;
}

function concatenated(arrays) {
  const all = new Float32Array(arrays.reduce((length, array) => length + array.length, 0));
  let offset = 0;
  for (const array of arrays) {
    all.set(array, offset);
    offset += array.length;
  }
  return all;
}

/** Rows of [heads, 64], as one array of [heads, rows, 64]. */
function byHead(rows) {
  const heads = Array.from({ length: HEADS }, (_, head) => head * HEAD_DIM);
  return concatenated(heads.flatMap((from) => rows.map((values) => values.subarray(from, from + HEAD_DIM))));
}

/**
 * The steps of one run, each as Decoder.next() gives it with its `index`; everything is given back at the end, also when
 * the caller leaves the loop early.  `options`: as of Decoder.open().
 */
export async function* decode(ort, options) {
  const decoder = await Decoder.open(ort, options);
  try {
    for (let index = 0; index < options.steps; index++) yield { index, ...(await decoder.next()) };
  } finally {
    await decoder.close();
  }
}

/** Bytes of K and V at the end of a run: the last step's past and present, before any pool adds to it. */
export function bytesNeeded({ model = "kv64", start = 1, steps = 64 } = {}) {
  return 2 * TENSORS[model] * (start + steps) * POSITION_BYTES;
}

/** A session on one of the models, and its K and V. */
export class Decoder {
  /**
   * @param ort the runtime's module
   * @param {object} [options]
   * @param {string} [options.model] "kv64", "kv16", "append" or "gqa"
   * @param {number} [options.start] positions that there are before the first step: zeros, but for a mark per tensor
   * @param {"grow" | "static"} [options.kv] "static" is the control: the same commands on two sets of tensors that are
   *   allocated once
   * @param {number} [options.steps] the steps that "static" has room for
   * @param {string} [options.cache] the runtime's storageBufferCacheMode; else its default
   */
  static async open(ort, { model = "kv64", start = 1, kv = "grow", steps = 64, cache } = {}) {
    const url = new URL(`${model}.onnx`, MODELS).href;
    const file = new Uint8Array(await (await fetch(url)).arrayBuffer());
    const session = await ort.InferenceSession.create(file, {
      executionProviders: [{ name: "webgpu", storageBufferCacheMode: cache }],
      preferredOutputLocation: locations(TENSORS[model]),
    });
    const decoder = new Decoder(ort, session, start);
    decoder.device = await ort.env.webgpu.device;
    decoder.#allocate(kv === "static" ? start + steps : 0);
    return decoder;
  }

  /** The device that the runtime made. */
  device;
  /** Steps taken. */
  step = 0;
  #ort;
  #past = [];
  #sets = null;

  constructor(ort, session, start) {
    this.#ort = ort;
    this.session = session;
    this.start = start;
    this.kind = kindOf(session.inputNames);
    this.names = session.outputNames.filter((name) => name.startsWith("present.")).map((name) => name.slice(8));
    this.total = new Float32Array(LANES); // of the rows so far, where the model adds them up
  }

  /** Positions in K and V. */
  get positions() {
    return this.start + this.step;
  }

  /**
   * One step: `ms` from its feeds to the disposal of the old K and V, `digest` of its reads, and `wrong`: how many values
   * of them are not what they must be (null: of this model that is not known).
   */
  async next() {
    const { positions, step } = this;
    const began = performance.now();
    const feeds = this.kind.feeds(this.#ort, step, positions);
    this.names.forEach((name, index) => (feeds[`past_key_values.${name}`] = this.#past[index]));
    const outputs = await (this.#sets ? this.session.run(feeds, this.#targets()) : this.session.run(feeds));
    const reads = outputs.reads.data;
    const old = this.#past;
    this.#past = this.names.map((name) => outputs[`present.${name}`]);
    for (const tensor of old) tensor.dispose();
    const ms = performance.now() - began;
    this.step += 1;
    const wrong = differing(this.kind.expected(this, step, positions), reads);
    return { ms, positions: this.positions, digest: digest(reads), wrong };
  }

  /** A digest of all bits of K and V. */
  async digest() {
    const nbytes = this.positions * POSITION_BYTES;
    const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
    const staging = this.device.createBuffer({ label: "digest", size: nbytes, usage });
    let hash;
    for (const tensor of this.#past) {
      const encoder = this.device.createCommandEncoder();
      encoder.copyBufferToBuffer(tensor.gpuBuffer, 0, staging, 0, nbytes);
      this.device.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      hash = digest(new Uint8Array(staging.getMappedRange()), hash);
      staging.unmap();
    }
    staging.destroy();
    return hash;
  }

  /** Disposes of K and V and releases the session; the runtime keeps its device. */
  async close() {
    for (const tensor of this.#past) tensor.dispose();
    for (const buffer of this.#sets?.flat() ?? []) buffer.destroy();
    this.#past = [];
    await this.session.release();
  }

  #allocate(capacity) {
    const make = (positions, label) => {
      const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
      return this.device.createBuffer({ label, size: positions * POSITION_BYTES, usage });
    };
    if (capacity) this.#sets = [0, 1].map((set) => this.names.map((name) => make(capacity, `static.${set}.${name}`)));
    this.#past = this.names.map((name, index) => {
      const buffer = this.#sets ? this.#sets[0][index] : make(this.start, `start.${name}`);
      this.device.queue.writeBuffer(buffer, 0, mark(index));
      return this.#wrap(buffer, this.start, this.#sets ? undefined : () => buffer.destroy());
    });
  }

  #targets() {
    const set = this.#sets[(this.step + 1) % 2];
    const wrapped = this.names.map((name, index) => [`present.${name}`, this.#wrap(set[index], this.positions + 1)]);
    return { reads: null, ...Object.fromEntries(wrapped) };
  }

  #wrap(buffer, positions, dispose = () => {}) {
    const dims = [1, HEADS, positions, HEAD_DIM];
    return this.#ort.Tensor.fromGpuBuffer(buffer, { dataType: "float32", dims, dispose });
  }
}

/** Where outputs go: K and V stay on the GPU. */
function locations(tensors) {
  const names = Array.from({ length: tensors }, (_, i) => `present.${i >> 1}.${i % 2 ? "value" : "key"}`);
  return { reads: "cpu", ...Object.fromEntries(names.map((name) => [name, "gpu-buffer"])) };
}

function differing(expected, found) {
  if (!expected) return null;
  let wrong = Math.abs(expected.length - found.length);
  for (let i = 0; i < expected.length; i++) if (expected[i] !== found[i]) wrong += 1;
  return wrong;
}
