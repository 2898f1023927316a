import { nameLaunch, readListing } from "./launch.js";
import { FROM_WORKER, ON_PAGE } from "./messages.js";
import { RUN_OPTIONS } from "./run_options.js";
import { mean, median, tail } from "./statistics.js";

/** Runs that the page keeps; the oldest leaves first. */
const KEPT_RUNS = 26;
/** Runs drawn at once, each in its own colour and dash (style.css has as many). */
export const DRAWN_RUNS = 6;

/** Steps of a workload in which every policy makes the first sets of tensors: the fill and the two after it. */
export const WARM_UP = 3;

/** One run: what was asked, and what has been measured so far. `tokens[0]` is the prefill. */
class Run {
  constructor(count, request, model, comparison, launchName) {
    this.label = letters(count);
    this.style = count % DRAWN_RUNS;
    this.request = request;
    this.model = model;
    this.comparison = comparison; // {id, kind, arm, round, rounds} of a run that is part of one
    this.launchName = launchName; // "": the defaults
    this.tokens = [];
    this.byRole = [];
    this.record = null;
    this.failed = false;
    this.visible = true;
  }

  get name() {
    const { policy, kv, kv_type: type } = this.request;
    return [`${this.label} ${policy}`, kv, type, this.launchName].filter(Boolean).join(", ");
  }

  /** The decode steps: everything but the prefill, and but the warm-up of a workload. */
  get steps() {
    return this.tokens.slice(this.request.workload ? WARM_UP : 1);
  }

  /** What `steps` leaves out. */
  get prefill() {
    return this.tokens.slice(0, this.request.workload ? WARM_UP : 1);
  }
}

/** Keeps the runs of this page by listening to the worker's messages; tells the panels by `runs`. */
export class Runs {
  #bus;
  #count = 0;
  #runs = [];
  #arms = []; // of the launch path's ablation: their names tell runs apart

  constructor(bus) {
    this.#bus = bus;
    bus.on(FROM_WORKER.ENVIRONMENT, (message) => (this.#arms = readListing(message).arms));
    bus.on(FROM_WORKER.TOKEN, ({ token, by_role: byRole }) => {
      if (!token) return; // text only
      this.current.tokens.push(token);
      this.current.byRole.push(byRole);
      this.#tell();
    });
    bus.on(FROM_WORKER.DONE, ({ record }) => {
      if (this.current.tokens.length === 0) return this.#forget(this.current); // cancelled before the first token
      this.current.record = record;
      this.#tell();
    });
    bus.on(ON_PAGE.SHOW, ({ label, visible }) => {
      this.#runs.find((run) => run.label === label).visible = visible;
      this.#limitDrawn(label);
      this.#tell();
    });
    bus.on(ON_PAGE.FORGET, ({ label }) => this.#forget(this.#runs.find((run) => run.label === label)));
  }

  /** The run that was begun last (undefined before the first). */
  get current() {
    return this.#runs.at(-1);
  }

  begin(request, model, comparison) {
    const run = new Run(this.#count++, request, model, comparison, nameLaunch(request.launch, this.#arms));
    this.#runs = [...this.#runs, run].slice(-KEPT_RUNS);
    this.#limitDrawn(run.label);
    this.#tell();
  }

  /** The current run ended without a record. One that measured nothing is dropped. */
  fail() {
    this.current.failed = true;
    if (this.current.tokens.length === 0) this.#forget(this.current);
    else this.#tell();
  }

  #forget(run) {
    this.#runs = this.#runs.filter((other) => other !== run);
    this.#tell();
  }

  /** Of the runs that share a colour only the newest, or the one just asked for, is drawn. */
  #limitDrawn(label) {
    const style = this.#runs.find((run) => run.label === label).style;
    for (const run of this.#runs) if (run.style === style && run.label !== label) run.visible = false;
  }

  #tell() {
    this.#bus.emit({ type: ON_PAGE.RUNS, runs: this.#runs, current: this.current });
  }
}

/** The figures of a run that people compare; times in ms, of decode steps only (`n` of them). */
export function summarise(run) {
  const steps = run.steps;
  const times = steps.map((step) => step.ms);
  const last = run.tokens.at(-1);
  const total = times.reduce((sum, ms) => sum + ms, 0);
  return {
    n: steps.length,
    median_ms: median(times),
    tail: tail(times),
    tokens_per_s: total > 0 ? (1000 * times.length) / total : NaN,
    ttft_ms: run.record?.ttft_ms ?? run.tokens[0]?.ms ?? NaN,
    created_per_token: mean(steps.map((step) => step.buffers_created)),
    reserved_ratio: last ? last.reserved_bytes / last.in_use_bytes : NaN,
    peak_bytes: run.record?.memory.peak_reserved_bytes ?? NaN,
    median_of: (field) => median(steps.map((step) => step[field])),
  };
}

/** Where the KV size class of a run changes: `[{position, from, to}]`, sizes in bytes. */
export function classSteps(run) {
  return run.tokens.slice(1).flatMap((token, i) => {
    const from = run.tokens[i].kv_class_bytes;
    const to = token.kv_class_bytes;
    return from !== to && from && to ? [{ position: token.position, from, to }] : [];
  });
}

/** What must not change the result of a run. */
const NO_MATTER = RUN_OPTIONS.filter(({ decides }) => !decides).map(({ name }) => name);

/**
 * Pairs of finished runs that should have produced the same tokens (same model and request but for the pool, the KV mode
 * and the launch path) and did not: `[{first, second, index}]`, `index` of the first token that differs.
 */
export function divergences(runs) {
  const firstOf = new Map();
  const found = [];
  for (const run of runs.filter(({ record }) => record)) {
    const { model, sha256 } = run.record.scenario;
    const asked = { ...run.request, ...Object.fromEntries(NO_MATTER.map((name) => [name, null])) };
    const key = JSON.stringify([model, sha256, Object.entries(asked).sort()]);
    const first = firstOf.get(key);
    if (!first) {
      firstOf.set(key, run);
      continue;
    }
    const index = firstDifference(first.record.token_ids, run.record.token_ids);
    if (index >= 0) found.push({ first, second: run, index });
  }
  return found;
}

/** The index at which two sequences differ, as far as the shorter one goes; -1: nowhere. */
export function firstDifference(a, b) {
  return a.slice(0, b.length).findIndex((item, i) => item !== b[i]);
}

/** 0 → A, 25 → Z, 26 → AA. */
function letters(count) {
  const last = String.fromCharCode(65 + (count % 26));
  return count < 26 ? last : letters(Math.floor(count / 26) - 1) + last;
}
