/** Runs that are compared with each other: arms in turns, paired round by round. */
import { median } from "./statistics.js";

let comparisons = 0;

/**
 * What the `compare` message asks for, `[{request, comparison: {id, kind, arm, round, rounds}}]`: each of the `arms`,
 * `[{arm, request}]`, once per round, in an order that rotates, so that no arm is always the one that runs first.
 */
export function inTurns(kind, arms, rounds) {
  const id = ++comparisons;
  return Array.from({ length: rounds }, (_, round) => {
    const turn = round % arms.length;
    return [...arms.slice(turn), ...arms.slice(0, turn)].map(({ arm, request }) => ({
      request,
      comparison: { id, kind, arm, round, rounds },
    }));
  }).flat();
}

/** The runs of the newest comparison of a kind, in the order in which they ran. */
export function newestComparison(runs, kind) {
  const ours = runs.filter(({ comparison }) => comparison?.kind === kind);
  const newest = Math.max(...ours.map(({ comparison }) => comparison.id));
  return ours.filter(({ comparison }) => comparison.id === newest);
}

/** Runs by arm, `[{arm, runs, steps, medians: Map of round → ms}]`; runs without a decode step are left out. */
export function byArm(runs) {
  const rows = new Map();
  for (const run of runs.filter(({ steps }) => steps.length > 0)) {
    const { arm, round } = run.comparison;
    const row = rows.get(arm) ?? { arm, runs: [], steps: [], medians: new Map() };
    rows.set(arm, row);
    row.runs.push(run);
    row.steps.push(...run.steps);
    row.medians.set(round, median(run.steps.map(({ ms }) => ms)));
  }
  return [...rows.values()];
}
