/**
 * Where one token (a run) of a runtime ends and the next begins, found by watching it.
 *
 * A decode step ends when its result is asked for: a buffer is mapped for reading after dispatches were submitted.
 * Several readbacks after the same dispatches are one end (a runtime downloads its outputs one by one, each with a
 * submit that only copies), and so is a readback before anything new was submitted. Where no dispatch or draw is ever
 * seen, each submit counts as work.
 *
 * `mark()` is for runtimes whose tokens do not end so: from the first one on only marks count.
 */
export class Boundaries {
  #onBoundary;
  #sawWork = false; // ever
  #recorded = false; // work that is encoded and not submitted
  #ready = false; // work was submitted since the last end
  #marked = false;

  /** @param {(cause: "readback" | "mark", name: string) => void} onBoundary */
  constructor(onBoundary) {
    this.#onBoundary = onBoundary;
  }

  /** Note that a dispatch or a draw was encoded. */
  worked() {
    this.#sawWork = true;
    this.#recorded = true;
  }

  /** Note a call of queue.submit(). */
  submitted() {
    if (this.#recorded || !this.#sawWork) this.#ready = true;
    this.#recorded = false;
  }

  /** Note that a buffer is being mapped for reading. */
  readback() {
    if (!this.#ready || this.#marked) return;
    this.#ready = false;
    this.#onBoundary("readback", "");
  }

  /** End a token here, because the caller says so. */
  mark(name = "") {
    this.#marked = true;
    this.#ready = false;
    this.#onBoundary("mark", String(name));
  }

  /** Whether marks have taken over. */
  get marked() {
    return this.#marked;
  }
}
