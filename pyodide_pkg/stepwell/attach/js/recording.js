import { EventLog, OP, packExtra, ROLE_NAMES, roleOf } from "./event_log.js";
import { TokenTable } from "./tokens.js";

/** Events that are kept by default: 50 MiB, an hour of a runtime that does 60 things to memory in 100 ms. */
export const RECORDING_LIMIT = 1 << 21;
const MOST_LABELS = 1 << 12;
const MAP_MODE_READ = 1;

/** Columns of a token's row: how often each op happened, the sum of its values, and these. */
export const COLUMN_VALUES = OP.COUNT;
export const COLUMN_CREATE_MS = 2 * OP.COUNT;
export const COLUMN_MS = COLUMN_CREATE_MS + 1;
export const COLUMN_SERVED = COLUMN_CREATE_MS + 2; // buffers created that a pool would serve, and their bytes
export const COLUMN_SERVED_BYTES = COLUMN_CREATE_MS + 3;
export const COLUMN_COUNT = COLUMN_CREATE_MS + 4;

/**
 * Watches what a program asks of WebGPU and keeps it in a bounded log: an observer of `shims.js` that changes nothing.
 *
 * Only createBuffer, submit, mapAsync and token ends are timed; other events have the time of the last of these. What
 * is done to buffers that were created before recording began is counted as unknown.
 */
export class Recording {
  log;
  tokens = new TokenTable(COLUMN_COUNT);
  totals = new Float64Array(COLUMN_COUNT); // since recording began
  setup = null; // the totals at the first token's end
  loggedTokens = 0; // that are in the log from beginning to end
  live = new Float64Array(ROLE_NAMES.length);
  peak = new Float64Array(ROLE_NAMES.length + 1); // by role, and of all together
  marks = 0;
  unknownDestroys = 0;
  unknownBytes = 0;
  devices = []; // { number, ref: WeakRef, adapter, largest: bytes of a buffer, live: bytes by role, gone }
  labels = [""];
  costs = null; // of costs.js, once measured
  runtime;
  #now;
  #start;
  #time = 0;
  #createStart = 0;
  #buffers = new WeakMap(); // GPUBuffer → { number, bytes, role, owner, live }
  #known = new WeakMap(); // GPUDevice → its entry of `devices`
  #labelNumbers = new Map([["", 0]]);
  #created = 0;
  #liveBytes = 0;
  #tokenStart = new Float64Array(COLUMN_COUNT);

  /** @param {{limit?: number, runtime?: string, now?: () => number}} options `runtime`: what is recorded, a label */
  constructor({ limit = RECORDING_LIMIT, runtime = "", now = () => performance.now() } = {}) {
    this.log = new EventLog(limit);
    this.runtime = runtime;
    this.#now = now;
    this.#start = now();
  }

  /** Milliseconds since recording began. */
  get elapsedMs() {
    return this.#now() - this.#start;
  }

  // ---- buffers ----------------------------------------------------------------------------------------------------

  createBegins() {
    this.#createStart = this.#now();
  }

  created(device, descriptor, buffer) {
    const end = this.#now();
    this.#time = end - this.#start;
    this.totals[COLUMN_CREATE_MS] += end - this.#createStart;
    const bytes = buffer.size;
    const mapped = descriptor.mappedAtCreation === true;
    const role = roleOf(buffer.usage, mapped, bytes);
    const owner = this.#known.get(device) ?? this.#meet(device);
    if (bytes === 0 || bytes > owner.largest) return; // it has no memory
    const number = this.#created;
    this.#created = number + 1;
    this.#buffers.set(buffer, { number, bytes, role, owner, live: true });
    this.#note(
      OP.CREATE,
      number,
      bytes,
      packExtra(buffer.usage, mapped, owner.number, this.#labelNumber(descriptor.label)),
    );
    if (role === 0) {
      this.totals[COLUMN_SERVED] += 1;
      this.totals[COLUMN_SERVED_BYTES] += bytes;
    }
    owner.live[role] += bytes;
    this.live[role] += bytes;
    this.#liveBytes += bytes;
    if (this.live[role] > this.peak[role]) this.peak[role] = this.live[role];
    if (this.#liveBytes > this.peak[ROLE_NAMES.length]) this.peak[ROLE_NAMES.length] = this.#liveBytes;
  }

  destroyed(buffer) {
    const lease = this.#buffers.get(buffer);
    if (lease === undefined) {
      if (buffer.size === 0) return;
      this.unknownDestroys += 1;
      this.unknownBytes += buffer.size;
      this.#buffers.set(buffer, { live: false });
      return;
    }
    if (!lease.live || lease.owner.gone) return;
    lease.live = false;
    this.#note(OP.DESTROY, lease.number, lease.bytes, 0);
    lease.owner.live[lease.role] -= lease.bytes;
    this.live[lease.role] -= lease.bytes;
    this.#liveBytes -= lease.bytes;
  }

  /** Note that the device is lost or destroyed, and its buffers with it. */
  deviceGone(device) {
    const owner = this.#known.get(device);
    if (owner === undefined || owner.gone) return;
    owner.gone = true;
    this.#note(OP.GONE, owner.number, 0, 0);
    for (let role = 0; role < owner.live.length; role += 1) {
      this.live[role] -= owner.live[role];
      this.#liveBytes -= owner.live[role];
    }
  }

  // ---- the queue and encoders -------------------------------------------------------------------------------------

  submitted(commandBuffers) {
    this.#time = this.#now() - this.#start;
    this.#note(OP.SUBMIT, 0, commandBuffers?.length ?? 0, 0);
  }

  mapped(buffer, mode, offset, size) {
    this.#time = this.#now() - this.#start;
    const reading = (mode & MAP_MODE_READ) !== 0;
    this.#note(reading ? OP.READBACK : OP.MAP_WRITE, 0, size ?? Math.max(0, buffer.size - (offset ?? 0)), 0);
  }

  /** Note anything else: `op` is of event_log.js, `value` an amount (bytes, workgroups, entries). */
  did(op, value) {
    this.#note(op, 0, value, 0);
  }

  // ---- tokens -----------------------------------------------------------------------------------------------------

  /** Note that a token ends and another begins; everything before the first end is set-up. */
  boundary(cause) {
    const time = this.#now() - this.#start;
    const totals = this.totals;
    this.#time = time;
    totals[COLUMN_MS] = time;
    if (this.setup === null) this.setup = totals.slice();
    else {
      this.tokens.add(totals, this.#tokenStart);
      if (!this.log.dropped) this.loggedTokens = this.tokens.added;
    }
    this.#tokenStart.set(totals);
    if (cause === "mark") this.marks += 1;
    this.#note(OP.BOUNDARY, this.tokens.added + 1, cause === "mark" ? 1 : 0, 0);
  }

  // ---- inside -----------------------------------------------------------------------------------------------------

  #note(op, subject, value, extra) {
    this.totals[op] += 1;
    this.totals[COLUMN_VALUES + op] += value;
    this.log.add(op, subject, value, extra, this.#time);
  }

  #meet(device) {
    const largest = device.limits?.maxBufferSize ?? Infinity;
    const live = new Float64Array(ROLE_NAMES.length);
    const ref = new WeakRef(device); // a device that the application drops can be collected
    const entry = { number: this.devices.length, ref, adapter: device.adapterInfo, largest, live, gone: false };
    this.devices.push(entry);
    this.#known.set(device, entry);
    device.lost?.then(() => this.deviceGone(device));
    return entry;
  }

  #labelNumber(label) {
    if (!label) return 0;
    const text = String(label);
    let number = this.#labelNumbers.get(text);
    if (number === undefined) {
      if (this.labels.length >= MOST_LABELS) return 0; // labels that never repeat say nothing
      number = this.labels.length;
      this.#labelNumbers.set(text, number);
      this.labels.push(text);
    }
    return number;
  }
}
