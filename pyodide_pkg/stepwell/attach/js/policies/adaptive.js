import { BadRequest } from "../errors.js";
import { SizeClass, costPerByte } from "./size_class.js";

export const WINDOW = 8;
export const GROWTH = 0;
const NONE = Object.freeze([]);

/**
 * Keeps what a run needs, as measured: per size the high-water mark of the last runs. `growth`, `stagger` choose size
 * classes and have no effect on exact sizes; they are here because the Python policy has them.
 */
export class Adaptive {
  #window;
  #classes = new Map(); // bytes -> SizeClass
  #run = 0;
  #inflation = 0; // the credit of the last victim

  constructor({ window = WINDOW, growth = GROWTH } = {}) {
    if (growth !== 0 && !(growth >= 1.01 && growth <= 2)) {
      throw new BadRequest(`adaptive: a growth of ${growth}; it must be 1.01 to 2, or 0 to choose the classes.`);
    }
    this.#window = window;
  }

  acquire(size) {
    const found = this.#classOf(size);
    found.outstanding++;
    if (found.outstanding > found.peak) found.peak = found.outstanding;
    if (found.free.length > 0) return found.free.pop();
    found.regret(this.#run);
    return 0;
  }

  release(id, size) {
    const found = this.#classOf(size);
    found.free.push(id);
    found.outstanding--;
    return NONE;
  }

  flush() {
    return NONE;
  }

  beginRun() {
    const run = this.#run;
    const givenUp = [];
    const goesOn = this.#anyDemand();
    for (const [size, found] of this.#classes) {
      if (found.peak > 0 || found.marks.length > 0 || found.outstanding !== 0) {
        if (found.peak > 0) found.credit = this.#inflation + costPerByte(size);
        found.turn(run);
      }
      const once = found.runs === 1; // with a tensor that grows every size is like that
      if (once && goesOn && found.lastUsed < run && found.window === found.baseWindow) found.marks = [];
      const surplus = found.surplus();
      if (surplus > 0) givenUp.push(...found.giveUp(surplus, run));
      const unused = found.free.length === 0 && found.marks.length === 0;
      if (unused && run - found.lastUsed > 4 * found.window) this.#classes.delete(size);
    }
    this.#run = run + 1;
    return givenUp;
  }

  reclaim(nbytes) {
    const givenUp = [];
    for (const found of [...this.#classes.values()].sort((a, b) => this.#victimFirst(a, b))) {
      if (nbytes <= 0) break;
      if (found.free.length === 0) continue;
      const taken = found.giveUp(Math.ceil(nbytes / found.size), this.#run);
      givenUp.push(...taken);
      nbytes -= taken.length * found.size;
      this.#inflation = Math.max(this.#inflation, found.credit);
    }
    return givenUp;
  }

  drain() {
    return [...this.#classes.values()].flatMap((found) => found.free.splice(0));
  }

  #classOf(size) {
    let found = this.#classes.get(size);
    if (found === undefined) this.#classes.set(size, (found = new SizeClass(size, this.#window)));
    return found;
  }

  #anyDemand() {
    for (const found of this.#classes.values()) {
      if (found.peak > 0) return true;
    }
    return false;
  }

  /** Unused in this run and the last first, then the least credit, the oldest use, the largest. */
  #victimFirst(a, b) {
    return (
      this.#isRecent(a) - this.#isRecent(b) || a.credit - b.credit || a.lastUsed - b.lastUsed || b.size - a.size
    );
  }

  #isRecent(found) {
    return Number(found.peak > 0 || found.lastUsed >= this.#run - 1);
  }
}
