import { BadRequest } from "./errors.js";

const SHRINK = 0.7;
const GROW = 1.05;
const RUNS_PER_GROWTH = 1000;

/**
 * A limit in bytes, or none (null). When the device runs out of memory it falls to SHRINK times what was reserved, and
 * rises by GROW per RUNS_PER_GROWTH runs without such an error, up to what the caller had set.
 */
export class Budget {
  #setByCaller;
  #failedAt = null; // bytes reserved when the device last ran out of memory
  #runs = 0;

  constructor(limit = null) {
    if (limit !== null && !(Number.isSafeInteger(limit) && limit > 0)) {
      throw new BadRequest(`a budget of ${limit.toLocaleString("en")} B; it must be 1 B or more.`);
    }
    this.limit = this.#setByCaller = limit;
  }

  /** By how much `nbytes` exceed the limit; 0 or less: they fit. */
  excess(nbytes) {
    return this.limit === null ? 0 : nbytes - this.limit;
  }

  /** Lower the limit: the device ran out of memory with `reserved` bytes. */
  shrink(reserved) {
    const limit = Math.max(1, Math.trunc(SHRINK * reserved));
    this.limit = this.limit === null ? limit : Math.min(this.limit, limit);
    this.#failedAt = reserved;
    this.#runs = 0;
  }

  /** Count a run that went well, and raise a lowered limit when it is time. */
  noteRun() {
    if (this.#failedAt === null || this.limit === null) return;
    if (++this.#runs < RUNS_PER_GROWTH) return;
    this.#runs = 0;
    const ceiling = this.#setByCaller ?? this.#failedAt;
    this.limit = Math.min(Math.trunc(this.limit * GROW) + 1, ceiling);
    if (this.limit === ceiling) {
      this.limit = this.#setByCaller;
      this.#failedAt = null;
    }
  }
}
