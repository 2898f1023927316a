import { Boundaries } from "./boundaries.js";
import { Caretaker } from "./caretaker.js";
import { Idle } from "./idle.js";
import { poolLayer } from "./intercept.js";
import { Keeper } from "./keeper.js";
import { AttachError, Natives } from "./natives.js";
import { POLICIES } from "./policies/index.js";
import { DevicePool } from "./pool.js";
import { Recorder } from "./recorder.js";
import { Shims } from "./shims.js";

const MAP_MODE_READ = 1;
const OPTIONS = ["target", "policy", "budget", "zero", "record", "options", "keeper", "runtime", "limit", "timers"];

let current = null; // the attachment of this realm
const caretaker = new Caretaker();
const queues = new WeakMap(); // → DevicePool, the last one of its device
const poolOfQueue = (queue) => queues.get(queue) ?? null;

/** The names that `policy` may have. */
export const policies = Object.keys(POLICIES);

/**
 * Put a pool under the WebGPU runtimes of this page or worker, or record what they do, or both.
 *
 * @param {object} [choices]
 * @param {GPUDevice | object} [choices.target] one device; else every device of this realm (or of a window)
 * @param {string} [choices.policy] "adaptive", unless `record` is on: then no pool, unless a policy is named
 * @param {number} [choices.budget] bytes that the pool may reserve on a device
 * @param {"always" | "never"} [choices.zero] whether buffers that are handed out again are cleared
 * @param {boolean} [choices.record] keep what happens, for `trace()` and `summary()`
 * @param {object} [choices.options] of the policy
 * @param {() => object} [choices.keeper] makes what decides for a device, in place of keeper.js
 * @param {string} [choices.runtime] what is recorded: a label
 * @param {number} [choices.limit] events that are kept of it (two million)
 * @param {object} [choices.timers] {setTimeout, clearTimeout}
 * @returns {Attachment}
 */
export function attach(choices = {}) {
  if (current !== null) throw new AttachError("stepwell is attached already. Call detach() of that attachment first.");
  current = new Attachment(choices);
  return current;
}

class Attachment {
  #natives;
  #device = null; // the only one that is served
  #shims;
  #makeKeeper;
  #zero;
  #served = new WeakMap(); // devices → DevicePool
  #pools = []; // WeakRefs of these, so that a device that the application drops can be collected
  #idle = null;
  #boundaries;
  #recorder = null;
  #pooled = null; // how: for the trace

  constructor(choices) {
    const { target, policy, zero = "always", record = false, keeper, runtime, limit } = checked(choices);
    const realm = typeof target?.GPUDevice === "function" ? target : globalThis;
    this.#natives = new Natives(realm);
    if (target instanceof realm.GPUDevice) this.#device = target;
    else if (!isWholeRealm(target, realm)) {
      throw new AttachError("target is a GPUDevice, or for all devices a window, navigator.gpu or GPUDevice.prototype.");
    }
    this.#zero = zero;
    this.#boundaries = new Boundaries((cause) => this.#onBoundary(cause));
    const pooled = (policy ?? keeper ?? null) !== null || !record;
    const layer = pooled ? this.#poolLayer(choices) : {};
    if (record) this.#recorder = new Recorder({ methods: this.#natives.methods, runtime, limit });
    const observers = [this.#recorder, boundaryHooks(this.#boundaries)].filter(Boolean);
    this.#shims = new Shims(this.#natives, layer, observers);
    this.#begin();
  }

  /** Say that a token ends here; from the first mark on only marks count. */
  mark(name) {
    this.#boundaries.mark(name);
  }

  /** The books of each device's pool. */
  stats() {
    return { devices: this.#each().map((pool) => pool.stats()) };
  }

  /** The recording, for `python -m stepwell.replay what-if`, with `metadata`. Null if nothing is recorded. */
  trace(metadata = {}) {
    return this.#recorder && this.#recorder.trace(this.#pooled ? { pool: this.#pooled, ...metadata } : metadata);
  }

  /** Figures per token, live and peak bytes, and whether a pool would help (summary.js). */
  summary() {
    return this.#recorder && this.#recorder.summary();
  }

  /** Every event as text: "lines" of JSON, or "chrome" for its trace viewer. */
  events(format) {
    return this.#recorder && this.#recorder.events(format);
  }

  /** Time the cost of creating a buffer here, for trace and summary: about 3 s (`mostMs`), when the GPU is idle. */
  async measureCosts(choices = {}) {
    return this.#recorder && (await this.#recorder.measureCosts(choices));
  }

  /** Give WebGPU back to the browser; free buffers are destroyed now, live ones when the application destroys them. */
  detach() {
    if (current !== this) return;
    current = null;
    this.#idle?.stop();
    this.#shims.uninstall();
    if (this.#device !== null) this.#own((object) => this.#shims.disown(object));
    for (const pool of this.#each()) caretaker.take(pool, this.#natives, poolOfQueue);
    caretaker.tend(() => false);
  }

  // ---- inside -------------------------------------------------------------------------------------------------------

  #poolLayer({ policy, budget, options = {}, keeper, timers = globalThis }) {
    const name = policy ?? "adaptive";
    this.#pooled = { policy: keeper && !policy ? "own" : name, options, budget, zero: this.#zero };
    this.#makeKeeper = keeper ?? (() => new Keeper({ policy: name, budget, options }));
    if (!keeper) this.#makeKeeper(); // a name that is wrong is an error now
    this.#idle = new Idle(timers, {
      hasFree: () => this.#each().some((pool) => pool.freeCount > 0),
      turn: () => this.#each().forEach((pool) => pool.beginRun()),
      drain: () => this.#each().forEach((pool) => pool.drain()),
      done: () => Promise.all(this.#each().map((pool) => pool.workDone())),
    });
    return poolLayer({
      serve: (device) => this.#served.get(device) ?? this.#meet(device),
      poolOf: (device) => this.#served.get(device) ?? null,
      poolOfQueue,
      onSubmit: () => this.#idle.wake(),
    });
  }

  #begin() {
    caretaker.tend((device) => this.#serves(device));
    if (this.#device === null) {
      this.#shims.install();
    } else {
      this.#shims.observeAliases();
      this.#own((object) => this.#shims.adopt(object));
    }
  }

  #own(act) {
    act(this.#device);
    act(this.#device.queue);
  }

  #serves(device) {
    return this.#device === null || this.#device === device;
  }

  #each() {
    return this.#pools.map((ref) => ref.deref()).filter((pool) => pool !== undefined);
  }

  #meet(device) {
    const isDevice = device instanceof this.#natives.prototypes.GPUDevice.constructor;
    if (current !== this || !this.#serves(device) || !isDevice) return null;
    const pool = new DevicePool(device, this.#natives, this.#makeKeeper(), this.#zero, () => this.#idle.watch());
    this.#served.set(device, pool);
    queues.set(pool.queue, pool);
    this.#pools = [...this.#pools.filter((ref) => ref.deref() !== undefined), new WeakRef(pool)];
    return pool;
  }

  #onBoundary(cause) {
    this.#recorder?.boundary(cause);
    for (const pool of this.#each()) pool.beginRun();
  }
}

function checked(choices) {
  const unknown = Object.keys(choices).filter((name) => !OPTIONS.includes(name));
  if (unknown.length > 0) {
    throw new AttachError(`attach() knows no ${unknown.join(", ")}; it has ${OPTIONS.join(", ")}.`);
  }
  if (!["always", "never", undefined].includes(choices.zero)) {
    throw new AttachError(`zero is "always" or "never", not ${JSON.stringify(choices.zero)}.`);
  }
  if (choices.limit !== undefined && !(choices.limit >= 1)) {
    throw new AttachError(`limit is a number of events, 1 or more, not ${choices.limit}.`);
  }
  return choices;
}

function isWholeRealm(target, realm) {
  const whole = [undefined, null, realm, realm.GPUDevice.prototype, realm.GPU?.prototype];
  return whole.includes(target) || (realm.GPU !== undefined && target instanceof realm.GPU);
}

/** The observer that finds where tokens end. A pass counts as work: dispatches are many, and are not wrapped for this. */
function boundaryHooks(boundaries) {
  return {
    before: { "GPUBuffer.mapAsync": (buffer, [mode]) => { if (mode & MAP_MODE_READ) boundaries.readback(); } },
    after: {
      "GPUCommandEncoder.beginComputePass": () => boundaries.worked(),
      "GPUCommandEncoder.beginRenderPass": () => boundaries.worked(),
      "GPUQueue.submit": () => boundaries.submitted(),
    },
  };
}
