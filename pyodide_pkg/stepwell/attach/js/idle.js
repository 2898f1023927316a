const TICK_MS = 1000;
const GIVE_BACK_AFTER = 10; // ticks without a submit

/**
 * Gives memory back once nothing happens any more: a second without a submit in which the GPU is done with the last one
 * counts as a run, so that windows turn over, and after ten everything that is free is given back. There is a timer only
 * while something is free.
 */
export class Idle {
  #timers;
  #hasFree;
  #turn;
  #drain;
  #done;
  #busy = false; // while the GPU is at work for what was submitted before the last tick: a symbol
  #timer = null;
  #active = false;
  #quiet = 0;

  /**
   * @param {{setTimeout: Function, clearTimeout: Function}} timers
   * @param {{hasFree: () => boolean, turn: () => void, drain: () => void, done: () => Promise}} pools
   */
  constructor(timers, { hasFree, turn, drain, done }) {
    this.#timers = timers;
    this.#hasFree = hasFree;
    this.#turn = turn;
    this.#drain = drain;
    this.#done = done;
  }

  /** Note that something was submitted. */
  wake() {
    this.#active = true;
    this.watch();
  }

  /** Note that something is free. */
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
    if (this.#active) this.#await();
    this.#quiet = this.#busy ? 0 : this.#quiet + 1;
    this.#active = false;
    if (this.#quiet >= GIVE_BACK_AFTER) {
      this.#drain();
      return;
    }
    if (this.#quiet > 0) this.#turn();
    if (this.#hasFree()) this.#arm();
  }

  #await() {
    const round = Symbol("round");
    this.#busy = round;
    const over = () => {
      if (this.#busy === round) this.#busy = false;
    };
    this.#done().then(over, over);
  }
}
