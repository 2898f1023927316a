import { asLabel, Lease, makeAlias } from "./alias.js";
import { AttachError } from "./natives.js";
import { Proof } from "./proof.js";
import { Tombstones } from "./tombstones.js";
import { Clears } from "./zero.js";

const [MAP_READ, MAP_WRITE, COPY_DST, STORAGE] = [0x1, 0x2, 0x8, 0x80];
const KNOWN_USAGES = 0x3ff; // up to QUERY_RESOLVE
const REQUIRED = STORAGE | COPY_DST; // COPY_DST: it can be cleared, by which it is also proved to be valid

/** A native buffer that the pool created. It is held by its lease while it is live, by the pool while it is free. */
class Kept {
  id = 0;
  valid = null; // until it is proved
  destroyed = false;

  constructor(native, size) {
    this.native = native;
    this.size = size;
    this.label = native.label;
  }

  setLabel(label) {
    if (label !== this.label) this.native.label = this.label = label;
  }
}

/** The pool under one device: serves createBuffer by aliases of native buffers, which the keeper decides to keep. */
export class DevicePool {
  device;
  queue;
  native; // WebGPU's methods below all shims
  keeper;
  clears;
  leases = 0; // live ones
  tombstones;
  counters = { created: 0, reused: 0, destroyed: 0 };
  #state = "serving"; // then "retired", "lost", or "failed"
  #zero;
  #proof;
  #free = new Map(); // id → Kept
  #live = new Set(); // ids, for the keeper's books
  #waiting = new Set(); // Kept that the application destroyed before they were proved to be valid
  #bufferPrototype;
  #largest;
  #onVacant = null;
  #onKept;
  #lastStats = null; // of a keeper that is closed
  #listener = ({ error }) => this.noteError(error);
  #collected = new FinalizationRegistry((id) => this.#lostTrack(id)); // buffers that were dropped, not destroyed

  /**
   * @param {GPUDevice} device
   * @param {import("./natives.js").Natives} natives
   * @param {object} keeper of keeper.js, or one with the same methods
   * @param {"always" | "never"} zero whether buffers that are handed out again are cleared
   * @param {() => void} onKept a buffer became free
   */
  constructor(device, natives, keeper, zero, onKept) {
    this.device = device;
    this.queue = device.queue;
    this.native = natives.methods;
    this.keeper = keeper;
    this.clears = new Clears(device, this.queue, natives.methods);
    this.tombstones = new Tombstones(device, natives.methods);
    this.#zero = zero === "always";
    this.#onKept = onKept;
    this.#proof = new Proof(device, natives.methods, (kept, valid) => this.#settle(kept, valid));
    this.#bufferPrototype = natives.prototypes.GPUBuffer;
    this.#largest = device.limits?.maxBufferSize ?? Infinity;
    device.lost?.then(() => this.lose());
    device.addEventListener?.("uncapturederror", this.#listener);
  }

  get freeCount() {
    return this.#free.size;
  }

  // ---- what the application does ----------------------------------------------------------------------------------

  /** An alias for what createBuffer was asked for; null if the browser serves it. */
  create(descriptor) {
    if (!this.#serving || typeof descriptor !== "object" || descriptor === null) return null;
    const { size, usage, label: given = "" } = descriptor;
    if (!this.#isPooled(size, usage) || descriptor.mappedAtCreation || typeof given === "symbol") return null;
    const label = asLabel(given);
    const id = this.#ask("acquire", usage, size);
    const kept = id > 0 ? this.#reissue(id, label) : this.#make(size, usage, descriptor);
    if (!this.#serving) {
      if (kept !== null) this.#destroy(kept);
      return null;
    }
    this.#live.add(kept.id);
    this.leases += 1;
    return makeAlias(new Lease(this, kept, size, usage, label), this.#bufferPrototype);
  }

  /** Take back the buffer of an alias that the application destroyed. */
  release(lease) {
    const { kept } = lease;
    this.leases -= 1;
    this.clears.remove(kept);
    if (!this.#serving || lease.tainted || kept.valid === false) this.#discard(kept);
    else if (kept.valid) this.#keep(kept);
    else this.#waiting.add(kept);
    if (this.leases === 0) this.#onVacant?.();
  }

  /** Call `write()`, which writes `size` bytes at `offset` of an alias: all of them make its clear needless. */
  writing(lease, queue, offset, size, write) {
    const pending = !lease.dead && queue === this.queue && this.clears.has(lease.kept);
    const whole = offset === 0 && size === lease.size;
    if (pending && !whole) this.clears.flush();
    write();
    if (pending && whole) this.clears.remove(lease.kept);
  }

  /** Clear what is pending: the application is about to submit. */
  submitting() {
    this.clears.flush();
  }

  submitted() {
    if (this.#serving) this.#destroyAll(this.#ask("flush"));
  }

  /** Give back what is free if `error`, which the application sees as well, says that memory is short. */
  noteError(error) {
    if (!this.#serving || error?.constructor?.name !== "GPUOutOfMemoryError") return;
    this.#destroyAll(this.#ask("shrink"));
    this.drain();
  }

  // ---- what time does ---------------------------------------------------------------------------------------------

  beginRun() {
    if (this.#serving) this.#destroyAll(this.#ask("begin_run"));
  }

  /** Give back everything that is free. */
  drain() {
    if (!this.#serving) return;
    this.#destroyAll(this.#ask("drain"));
    for (const kept of this.#waiting) this.#discard(kept);
    this.#waiting.clear();
  }

  /** A promise, resolved when the GPU is done with what was submitted so far. */
  workDone() {
    return this.native["GPUQueue.onSubmittedWorkDone"].call(this.queue);
  }

  /** Serve no more. `onVacant` is called when no alias is live, at once if there is none. */
  retire(onVacant) {
    if (this.#serving) {
      this.clears.flush(); // for live aliases: there is no later submit to do it
      this.drain();
      this.#state = "retired";
      this.device.removeEventListener?.("uncapturederror", this.#listener);
    }
    this.#onVacant = () => {
      this.#onVacant = null;
      onVacant();
      this.#close();
    };
    if (this.leases === 0) this.#onVacant();
  }

  /** Empty the books: the device is lost or destroyed, and all of its buffers with it. */
  lose() {
    if (this.#state === "lost") return;
    this.clears.drop();
    this.drain();
    this.#state = "lost";
    for (const id of this.#live) this.#ask("forget", id);
    this.#live.clear();
    this.#close();
  }

  /** What to give to the browser in place of a dead alias. */
  tombstoneOf(lease) {
    return lease.kept.destroyed ? lease.kept.native : this.tombstones.of(lease);
  }

  stats() {
    const { cleared, clearedBytes } = this.clears;
    const { made, poisoned } = this.tombstones;
    const native = { ...this.counters, cleared, cleared_bytes: clearedBytes, tombstones: made, poisoned };
    return { ...(this.#lastStats ?? JSON.parse(this.keeper.stats())), state: this.#state, native };
  }

  // ---- inside -----------------------------------------------------------------------------------------------------

  get #serving() {
    return this.#state === "serving";
  }

  /** The keeper's answer; "" if it fails. */
  #ask(method, ...args) {
    if (this.#state === "failed") return "";
    try {
      return this.keeper[method](...args);
    } catch (error) {
      this.#fail(error);
      return "";
    }
  }

  /** Serve no more, because the keeper is wrong: from then on the browser serves the application. */
  #fail(error) {
    globalThis.reportError?.(error);
    if (!this.#serving) return;
    this.#state = "failed";
    this.clears.flush();
    for (const kept of this.#free.values()) this.#destroy(kept);
    this.#free.clear();
    for (const kept of this.#waiting) this.#discard(kept);
    this.#waiting.clear();
  }

  #isPooled(size, usage) {
    return Number.isInteger(size) && size > 0 && size % 4 === 0 && size <= this.#largest &&
      Number.isInteger(usage) && (usage & REQUIRED) === REQUIRED && usage <= KNOWN_USAGES &&
      (usage & (MAP_READ | MAP_WRITE)) === 0;
  }

  #reissue(id, label) {
    const kept = this.#free.get(id);
    if (kept === undefined) {
      this.#fail(new AttachError(`The keeper hands out buffer ${id}, which is not free.`));
      return null;
    }
    this.#free.delete(id);
    kept.setLabel(label);
    if (this.#zero) this.clears.add(kept);
    this.counters.reused += 1;
    return kept;
  }

  #make(size, usage, descriptor) {
    this.#destroyAll(this.#ask("room", size));
    if (!this.#serving) return null;
    const kept = new Kept(this.native["GPUDevice.createBuffer"].call(this.device, descriptor), size);
    kept.id = Number(this.#ask("created", usage, size)); // 0 if that failed: then no buffer has it
    this.#collected.register(kept, kept.id, kept);
    this.#proof.add(kept);
    this.counters.created += 1;
    return kept;
  }

  #settle(kept, valid) {
    kept.valid = valid;
    if (!this.#waiting.delete(kept)) return;
    if (valid && this.#serving) this.#keep(kept);
    else this.#discard(kept);
  }

  #keep(kept) {
    this.#live.delete(kept.id);
    this.#free.set(kept.id, kept);
    this.#destroyAll(this.#ask("release", kept.id));
    this.#onKept();
  }

  /** Destroy a live native buffer that is not to be kept. */
  #discard(kept) {
    if (this.#live.delete(kept.id)) this.#ask("forget", kept.id);
    this.#destroy(kept);
  }

  /** @param {string} ids "3 17" */
  #destroyAll(ids) {
    if (ids === "") return;
    for (const id of ids.split(" ")) {
      const kept = this.#free.get(Number(id));
      if (kept === undefined) {
        this.#fail(new AttachError(`The keeper gives up buffer ${id}, which is not free.`));
        return;
      }
      this.#free.delete(kept.id);
      this.#destroy(kept);
    }
  }

  #destroy(kept) {
    kept.destroyed = true;
    this.counters.destroyed += 1;
    this.#collected.unregister(kept);
    this.native["GPUBuffer.destroy"].call(kept.native);
  }

  #lostTrack(id) {
    this.leases -= 1;
    if (this.#live.delete(id)) this.#ask("forget", id);
    if (this.leases === 0) this.#onVacant?.();
  }

  #close() {
    if (this.#lastStats !== null) return;
    this.#lastStats = JSON.parse(this.keeper.stats());
    this.keeper.close?.();
  }
}
