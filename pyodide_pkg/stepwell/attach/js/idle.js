const TICK_MS = 1000;
const GIVE_BACK_AFTER = 10; // ticks without a submit

/**
 * Gives memory back when nothing is submitted any more: each second counts as a run, so that windows turn over, and
 * after ten everything that is free goes. There is a timer only while something is free.
 */
export class Idle {
  #timers;
  #hasFree;
  #turn;
  #drain;
  #timer = null;
  #active = false;
  #quiet = 0;

  /**
   * @param {{setTimeout: Function, clearTimeout: Function}} timers
   * @param {{hasFree: () => boolean, turn: () => void, drain: () => void}} pools
   */
  constructor(timers, { hasFree, turn, drain }) {
    this.#timers = timers;
    this.#hasFree = hasFree;
    this.#turn = turn;
    this.#drain = drain;
  }

  /** Something was submitted. */
  wake() {
    this.#active = true;
    this.watch();
  }

  /** Something is free. */
  watch() {
    if (this.#timer !== null) return;
    this.#quiet = 0;
    this.#arm();
  }

  stop() {
    if (this.#timer !== null) this.#timers.clearTimeout(this.#timer);
    this.#timer = null;
  }

  #arm() {
    this.#timer = this.#timers.setTimeout(() => this.#tick(), TICK_MS);
    this.#timer?.unref?.(); // a program that has nothing else to do ends
  }

  #tick() {
    this.#timer = null;
    const quiet = this.#active ? 0 : this.#quiet + 1;
    this.#quiet = quiet;
    this.#active = false;
    if (quiet >= GIVE_BACK_AFTER) {
      this.#drain();
      return;
    }
    if (quiet > 0) this.#turn();
    if (this.#hasFree()) this.#arm();
  }
}
