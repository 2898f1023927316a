/** The arms of the example, the memory that a run of them needs, and its results as rows. Nothing here touches the page or the GPU. */
import { byArm } from "../comparing.js";
import { mean, median, pairedRatios, spread } from "../statistics.js";
import { bytesNeeded } from "./ort.js";

/** The runtime as it is; with a pool under it; on tensors that are allocated once; as it is, but recorded. */
export const WITHOUT = "off";
export const WITH = "on";
export const CONTROL = "static";
export const RECORDED = "recorded";
export const ARMS = [WITHOUT, WITH, CONTROL];

/** Steps at the start of a turn in which every pool fills. */
export const WARM_UP = 4;
const LEAST_BUFFER = 2 ** 30; // a GPU that allows less is a small one
const GIB = 2 ** 30;
const POSITION_BYTES = bytesNeeded({ model: "kv64", start: 1, steps: 0 }) / (2 * 64); // in one tensor

/** The first request on an adapter: 64 tensors where they fit, 16 on CPU adapters and small machines. */
export function firstSize({ software, limits, memoryGib = Infinity }) {
  const large = { model: "kv64", start: 2040, steps: 40, rounds: 2 };
  const fits = bytesNeeded(large) <= (memoryGib * GIB) / 4 && limits.maxBufferSize >= LEAST_BUFFER;
  return software || !fits ? { model: "kv16", start: 2040, steps: 24, rounds: 1 } : large;
}

/** Why the device cannot run this, or "": a tensor has to fit into one buffer. */
export function tooLarge({ start, steps }, { maxBufferSize, maxStorageBufferBindingSize }) {
  const limit = Math.min(maxBufferSize, maxStorageBufferBindingSize);
  const last = (start + steps) * POSITION_BYTES;
  if (last <= limit) return "";
  const most = Math.floor(limit / POSITION_BYTES) - steps;
  return `Tensors of ${last.toLocaleString("en")} B; this GPU allows ${limit.toLocaleString("en")} B: start at ${most.toLocaleString("en")} at most.`;
}

/** The code for `choices`, as the lines that someone would write. */
export function codeOf(choices) {
  const parts = Object.entries(choices).map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
  return `import "./stepwell-attach.js"; // before the runtime\nconst attachment = stepwell.attach({ ${parts.join(", ")} });`;
}

/** Turns (as the page keeps them: `{arm, round, steps, peakBytes, digest}`) as rows, one per arm that has steps. */
export function rowsOf(turns) {
  const rows = byArm(turns.map((turn) => ({ ...turn, comparison: turn, steps: turn.steps.slice(WARM_UP) })));
  const control = rows.find(({ arm }) => arm === CONTROL);
  return rows.map(({ arm, runs, steps, medians }) => {
    const ratios = control ? pairedRatios(medians, control.medians).map(({ ratio }) => ratio) : [];
    return {
      arm,
      n: steps.length,
      medianMs: median(steps.map(({ ms }) => ms)),
      created: median(steps.map(({ created }) => created)),
      meanCreated: mean(steps.map(({ created }) => created)),
      peakBytes: Math.max(...runs.map(({ peakBytes }) => peakBytes ?? NaN)),
      ratio: spread(ratios),
      wrong: steps.some(({ wrong }) => wrong),
    };
  });
}

/** Whether all whole turns gave the same bits of K and V; null: fewer than two did. */
export function sameBits(turns) {
  const digests = turns.map(({ digest }) => digest).filter((digest) => digest !== null);
  return digests.length < 2 ? null : new Set(digests).size === 1;
}
