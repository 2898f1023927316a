/**
 * Every message type of the page, in one place. A message is a plain object with a `type`; the fields are described in
 * docs/protocol.md. `Bus` refuses a type that is not listed here, so a typo cannot pass.
 */

/** Page → worker. */
export const TO_WORKER = Object.freeze({ BOOT: "boot", LOAD: "load", RUN: "run", WHAT_IF: "what_if", CANCEL: "cancel" });

/** Worker → page. */
export const FROM_WORKER = Object.freeze({
  PHASE: "phase",
  PROGRESS: "progress",
  ENVIRONMENT: "environment",
  MODEL: "model",
  TUNING: "tuning",
  TOKEN: "token",
  POOL: "pool",
  TRACE: "trace",
  POOL_TRACE: "pool_trace",
  VERDICT: "verdict",
  DONE: "done",
  ERROR: "error",
});

/**
 * Between the parts of the page only.
 *
 * state    {state, previous}   dataset.state has changed
 * manifest {manifest}          what this build ships (null: no manifest was found)
 * warning  {text}              something to know that stops nothing
 * runs     {runs, current}     a run began, grew, ended, was hidden or removed; the Run objects of runs.js
 * show     {label, visible}    draw a run in the latency chart, or do not
 * forget   {label}             remove a run from the page
 * kind     {workload}          what is chosen to run: a workload of the package, or null for a model
 * compare  {requests}          run these one after another: [{request, comparison}] of comparing.js
 * dropped  {file}              a trace to replay: dropped, recorded, or from another page
 * ask      {file, question}    replay this trace: the question of docs/protocol.md
 * restart  {}                  end the worker and boot a new one; the runs stay
 */
export const ON_PAGE = Object.freeze({
  STATE: "state",
  MANIFEST: "manifest",
  WARNING: "warning",
  RUNS: "runs",
  SHOW: "show",
  FORGET: "forget",
  KIND: "kind",
  COMPARE: "compare",
  DROPPED: "dropped",
  ASK: "ask",
  RESTART: "restart",
});

export const ALL_TYPES = new Set([TO_WORKER, FROM_WORKER, ON_PAGE].flatMap((group) => Object.values(group)));
