import { Budget } from "./budget.js";
import { StaleBuffer } from "./errors.js";
import { policyFactory } from "./policies/index.js";

/**
 * Decides for the pool under a runtime which destroyed buffers are kept, and which serve again. The pool has the GPU
 * buffers, the keeper their numbers. `attach/keeper.py` is the same in Python, for policies of the
 * caller's: a test replays calls through both.
 *
 * One policy object per usage value, since a buffer serves only requests of its own usage and size. `budget`: bytes of
 * all buffers, live and free; before one is created free ones are given up for it, and only what is live exceeds it.
 */
export class Keeper {
  #make;
  #budget;
  #policies = new Map(); // usage -> policy
  #known = new Map(); // id -> { id, policy, nbytes, free }
  #gone = new Set(); // ids forgotten while a policy kept them
  #recorded = false; // something was acquired since the last flush
  #freeBuffers = 0;
  #liveBytes = 0;
  #freeBytes = 0;
  #peakBytes = 0;
  #created = 0;
  #reused = 0;
  #destroyed = 0;
  #runs = 0;

  constructor({ policy = "adaptive", options = {}, budget = null } = {}) {
    this.#make = policyFactory(policy, options);
    this.#budget = new Budget(budget);
  }

  /** The id of a kept buffer for a request, or 0: make `room`, create one, and say so (`created`). */
  acquire(usage, nbytes) {
    let policy = this.#policies.get(usage);
    if (policy === undefined) this.#policies.set(usage, (policy = this.#make()));
    this.#recorded = true;
    const id = policy.acquire(nbytes);
    if (id === 0) return 0;
    if (this.#gone.size > 0 && this.#gone.delete(id)) return 0;
    this.#known.get(id).free = false;
    this.#reused++;
    this.#freeBuffers--;
    this.#freeBytes -= nbytes;
    this.#liveBytes += nbytes;
    return id;
  }

  /** Enter a new buffer, for which `acquire` returned 0: the application has it. Returns its id. */
  created(usage, nbytes) {
    const id = ++this.#created;
    this.#known.set(id, { id, policy: this.#policies.get(usage), nbytes, free: false });
    this.#liveBytes += nbytes;
    this.#peakBytes = Math.max(this.#peakBytes, this.#reserved());
    return id;
  }

  /** The ids to destroy before `nbytes` more are created, so that the budget holds as far as it can. */
  room(nbytes) {
    const givenUp = [];
    for (const policy of this.#policies.values()) {
      const excess = this.#budget.excess(this.#reserved() + nbytes);
      if (excess <= 0) break;
      this.#retire(policy.reclaim(excess), givenUp);
    }
    return givenUp.join(" ");
  }

  /** Note that the application destroyed a buffer. Returns ids to destroy; StaleBuffer unless it was live. */
  release(id) {
    const known = this.#known.get(id);
    if (known === undefined || known.free) {
      throw new StaleBuffer(`buffer ${id} was released, and is ${known ? "free already" : "not there"}.`);
    }
    const { policy, nbytes } = known;
    known.free = true;
    this.#freeBuffers++;
    this.#liveBytes -= nbytes;
    this.#freeBytes += nbytes;
    const givenUp = policy.release(id, nbytes, this.#recorded);
    return givenUp.length > 0 ? this.#retire(givenUp, []).join(" ") : "";
  }

  /** Take a buffer that is gone, live or free, off the books; one that is not there is no error. */
  forget(id) {
    const known = this.#known.get(id);
    if (known === undefined) return;
    this.#known.delete(id);
    this.#destroyed++;
    if (known.free) {
      this.#gone.add(id);
      this.#freeBuffers--;
      this.#freeBytes -= known.nbytes;
    } else {
      this.#liveBytes -= known.nbytes;
    }
  }

  /** Note that something was submitted. Returns the ids to destroy. */
  flush() {
    this.#recorded = false;
    return this.#ofAll((policy) => policy.flush());
  }

  /** Note that a run (a token) begins: flush, then windows turn over. Returns the ids to destroy. */
  begin_run() {
    const flushed = this.flush();
    this.#runs++;
    this.#budget.noteRun();
    const begun = this.#ofAll((policy) => policy.beginRun());
    return flushed && begun ? `${flushed} ${begun}` : flushed || begun;
  }

  /** Give up every free buffer. Returns their ids. */
  drain() {
    return this.#ofAll((policy) => policy.drain());
  }

  /** Lower the budget and give up every free buffer: the device is out of memory. Returns their ids. */
  shrink() {
    const reserved = this.#reserved();
    const givenUp = this.drain();
    this.#budget.shrink(reserved);
    return givenUp;
  }

  /** Buffers and bytes now, the most bytes there were, and counters, as JSON; `budget_bytes` null: no limit. */
  stats() {
    return JSON.stringify({
      live_buffers: this.#known.size - this.#freeBuffers,
      live_bytes: this.#liveBytes,
      free_buffers: this.#freeBuffers,
      free_bytes: this.#freeBytes,
      peak_bytes: this.#peakBytes,
      budget_bytes: this.#budget.limit,
      created: this.#created,
      reused: this.#reused,
      destroyed: this.#destroyed,
      runs: this.#runs,
    });
  }

  #reserved() {
    return this.#liveBytes + this.#freeBytes;
  }

  #ofAll(decide) {
    const givenUp = [];
    for (const policy of this.#policies.values()) this.#retire(decide(policy), givenUp);
    return givenUp.join(" ");
  }

  /** Take what a policy gave up off the books, and add it to `into`, except what was forgotten before. */
  #retire(givenUp, into) {
    for (const id of givenUp) {
      if (this.#gone.delete(id)) continue;
      const known = this.#known.get(id);
      this.#known.delete(id);
      this.#freeBuffers--;
      this.#freeBytes -= known.nbytes;
      this.#destroyed++;
      into.push(id);
    }
    return into;
  }
}
