import { OP, ROLE_NAMES } from "./event_log.js";
import { COLUMN_CREATE_MS, COLUMN_MS, COLUMN_SERVED, COLUMN_SERVED_BYTES, COLUMN_VALUES } from "./recording.js";
import { reuseOf } from "./reuse.js";
import { meanOf, medianOf } from "./tokens.js";
import { adapterOf } from "./trace_text.js";

const WARM_UP = 2; // tokens that fill any pool
const MIB = 1 << 20;
/** The cost of a create where it was not measured, as `what-if` assumes it, from an H200. */
export const ASSUMED_CREATE_US = 100;
export const ASSUMED_CREATE_US_PER_MIB = 80;
const WORTH_MS = 0.1; // per token: less is nothing

const TOKEN_FIGURES = {
  ms: COLUMN_MS,
  creates: OP.CREATE,
  created_bytes: COLUMN_VALUES + OP.CREATE,
  served_creates: COLUMN_SERVED,
  served_bytes: COLUMN_SERVED_BYTES,
  create_ms: COLUMN_CREATE_MS,
  destroys: OP.DESTROY,
  submits: OP.SUBMIT,
  passes: OP.PASS,
  dispatches: OP.DISPATCH,
  draws: OP.DRAW,
  bind_groups: OP.BIND_GROUP,
  uploads: OP.UPLOAD,
  uploaded_bytes: COLUMN_VALUES + OP.UPLOAD,
  clears: OP.CLEAR,
  cleared_bytes: COLUMN_VALUES + OP.CLEAR,
  copies: OP.COPY,
  copied_bytes: COLUMN_VALUES + OP.COPY,
  readbacks: OP.READBACK,
  readback_bytes: COLUMN_VALUES + OP.READBACK,
};

/**
 * A token's work and memory, and whether a pool would help, as plain data.
 *
 * Figures per token leave out set-up (all before the first token's end) and the two tokens after it, and are of the
 * last 4,096. `served`: buffers that a pool under the runtime serves (storage, not mapped). `live` is what was created
 * and not destroyed; what is left to the garbage collector counts.
 */
export function summaryOf(recording) {
  const { tokens, totals } = recording;
  const skipped = tokens.added > WARM_UP ? WARM_UP : 0;
  const perToken = {};
  for (const [name, column] of Object.entries(TOKEN_FIGURES)) {
    const found = tokens.column(column, skipped);
    perToken[name] = { median: medianOf(found), mean: meanOf(found), most: found.reduce((a, b) => Math.max(a, b), 0) };
  }
  const reuse = reuseOf(recording, skipped);
  const summary = {
    runtime: recording.runtime,
    adapter: adapterOf(recording),
    seconds: recording.elapsedMs / 1000,
    tokens: tokens.added,
    boundaries: { readback: totals[OP.BOUNDARY] - recording.marks, mark: recording.marks },
    per_token: perToken,
    set_up: {
      creates: (recording.setup ?? totals)[OP.CREATE],
      created_bytes: (recording.setup ?? totals)[COLUMN_VALUES + OP.CREATE],
    },
    totals: Object.fromEntries(Object.entries(TOKEN_FIGURES).map(([name, column]) => [name, totals[column]])),
    live_bytes: byRole(recording.live),
    peak_bytes: { ...byRole(recording.peak), all: recording.peak[ROLE_NAMES.length] },
    reusable_per_token: reuse.creates,
    reusable_mib_per_token: reuse.bytes / MIB,
    sizes: reuse.sizes,
    costs: recording.costs,
    unknown: { destroys: recording.unknownDestroys, bytes: recording.unknownBytes },
    events: {
      kept: recording.log.length,
      dropped: recording.log.dropped,
      dropped_details: recording.log.droppedDetails,
    },
  };
  summary.totals.ms = recording.elapsedMs;
  return { ...summary, conclusion: conclusionOf(summary), notes: notesOf(summary) };
}

function byRole(numbers) {
  return Object.fromEntries(ROLE_NAMES.map((name, role) => [name, numbers[role]]));
}

/** A sentence or two: what creating buffers costs, and what to do about it. */
function conclusionOf(summary) {
  const { per_token: perToken, costs } = summary;
  if (!summary.tokens) {
    return (
      "No whole token was seen: nothing was read back after a submit, twice. " +
      "Record longer, or call mark() once per token."
    );
  }
  const createUs = costs?.create_us ?? ASSUMED_CREATE_US;
  const perMibUs = costs?.create_us_per_mib ?? ASSUMED_CREATE_US_PER_MIB;
  const priced = costs ? "as measured here" : "as on an H200; measureCosts() measures this GPU";
  const costMs = (creates, mib) => (creates * createUs + mib * perMibUs) / 1000;
  const served = perToken.served_creates.mean;
  const servedMs = costMs(served, perToken.served_bytes.mean / MIB);
  const savedMs = costMs(summary.reusable_per_token, summary.reusable_mib_per_token);
  const now =
    `A token creates ${short(served)} storage buffers of ${short(perToken.served_bytes.mean / MIB)} MiB in all, ` +
    `which costs about ${short(servedMs)} of its ${short(perToken.ms.median)} ms (${priced})`;
  if (servedMs < WORTH_MS) return `Nothing to gain: ${lowerFirst(now)}.`;
  if (savedMs < WORTH_MS || savedMs < 0.1 * servedMs) {
    return (
      `${now}, but hardly any has a size that was there before ` +
      `(${short(summary.reusable_per_token)} per token), and a pool under a runtime cannot change sizes: ` +
      "attaching gains nothing as it is. Size classes in the runtime, or a static cache, would."
    );
  }
  return (
    `${now}; ${short(summary.reusable_per_token)} of them have the size and usage of one that was destroyed before, ` +
    `so a pool saves up to ${short(savedMs)} ms per token: stepwell.attach({policy: "adaptive"}). ` +
    "what-if on the trace compares policies."
  );
}

/** What limits the figures. */
function notesOf(summary) {
  const notes = [];
  const { boundaries, unknown, events } = summary;
  if (boundaries.mark && boundaries.readback) {
    notes.push(
      `The first ${boundaries.readback} token ends were inferred from readbacks, the other ${boundaries.mark} marked.`,
    );
  } else if (boundaries.readback) {
    notes.push(
      "Token ends were inferred: a readback after new work was submitted. " +
        "Where that is wrong, call mark() once per token.",
    );
  }
  if (unknown.destroys) {
    notes.push(
      `${unknown.destroys} buffers (${short(unknown.bytes / MIB)} MiB) that were destroyed had been created before ` +
        "recording began: what else was there then is unknown, and in no figure of live or peak bytes.",
    );
  }
  if (events.dropped) {
    notes.push(
      `The limit of events was reached: trace and sizes leave out the last ${events.dropped} events about buffers ` +
        "and submits. The figures per token go on.",
    );
  } else if (events.dropped_details) {
    notes.push(
      "Half the limit of events was reached: from there on only buffers, submits and readbacks are listed. " +
        "The figures per token go on.",
    );
  }
  return notes;
}

function short(value) {
  if (value === 0) return "0";
  if (value >= 100) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(value < 1 ? 2 : 3)));
}

function lowerFirst(text) {
  return text[0].toLowerCase() + text.slice(1);
}
