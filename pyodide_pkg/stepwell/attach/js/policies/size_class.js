export const WIDEST_WINDOW = 256;
const CREATE_US = 50;
const CREATE_US_PER_BYTE = 300 / 2 ** 20;
const CHEAP_BYTES = 4 * 2 ** 20;

/**
 * One size of `adaptive`: its free buffers, and how many of them the last runs needed. It keeps as many as the largest
 * high-water mark (acquires minus releases of a run, at their maximum) of the last `window` runs. A window that proved
 * too short doubles; it halves again after a long quiet time.
 */
export class SizeClass {
  free = []; // ids
  outstanding = 0; // below 0 when buffers of earlier runs come back
  peak = 0;
  marks = []; // [run, mark], the candidates for the largest, in order of runs
  lastUsed = -1; // the last run with demand
  runs = 0; // that had demand
  gaveUp = null; // the run in which buffers were given up
  regretted = 0;
  credit = 0;

  constructor(size, window) {
    this.size = size;
    this.window = this.baseWindow = window;
  }

  get target() {
    return this.marks.length > 0 ? this.marks[0][1] : 0;
  }

  /** `run` has ended: its mark enters the window, marks that are too old leave it. */
  turn(run) {
    const { peak, marks } = this;
    if (peak > 0) {
      this.lastUsed = run;
      this.runs++;
      while (marks.length > 0 && marks.at(-1)[1] <= peak) marks.pop();
      marks.push([run, peak]);
    }
    this.outstanding = this.peak = 0;
    while (marks.length > 0 && marks[0][0] <= run - this.window) marks.shift();
    if (this.window > this.baseWindow && run - this.regretted > 16 * this.window) {
      this.window = Math.max(this.baseWindow, Math.floor(this.window / 2));
      this.regretted = run;
    }
  }

  /** A buffer is created: if others were given up not long ago, remember demand for longer. */
  regret(run) {
    if (this.gaveUp === null) return;
    if (run - this.gaveUp <= 4 * this.window) {
      this.window = Math.min(2 * this.window, WIDEST_WINDOW);
      this.regretted = run;
    }
    this.gaveUp = null;
  }

  /** Free buffers that the window does not ask to keep. */
  surplus() {
    return this.free.length - this.target;
  }

  /** Forget `count` free buffers, those unused for longest. */
  giveUp(count, run) {
    const givenUp = this.free.splice(0, count);
    if (givenUp.length > 0) this.gaveUp = run;
    return givenUp;
  }
}

/** The cost of creating a buffer again, in µs per byte: a call, and above 4 MiB the pages that commit. */
export function costPerByte(size) {
  const pagesUs = size > CHEAP_BYTES ? CREATE_US_PER_BYTE * size : 0;
  return (CREATE_US + pagesUs) / size;
}
