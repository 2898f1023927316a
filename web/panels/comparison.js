import { element, onNextFrame, scroller, table } from "../dom.js";
import { number, plural } from "../format.js";
import { ON_PAGE } from "../messages.js";
import { WARM_UP } from "../runs.js";
import { mean, median } from "../statistics.js";

/** The arm that the others are divided by: the same commands on tensors that are allocated once. */
export const CONTROL = "static";

let comparisons = 0;

/** The runs of a comparison, `[{request, comparison}]`: every arm once per round, in an order that rotates. */
export function comparisonOf(request, arms, rounds) {
  const id = ++comparisons;
  return Array.from({ length: rounds }, (_, round) => {
    const turn = round % arms.length;
    return [...arms.slice(turn), ...arms.slice(0, turn)].map((arm) => ({
      request: requestOf(request, arm),
      comparison: { id, arm, round },
    }));
  }).flat();
}

/** The options that are set in the form belong to the policy that is chosen there, and to no other. */
function requestOf({ policy_options: options, ...request }, arm) {
  if (arm === CONTROL) return { ...request, kv: "static", policy: "adaptive" };
  const own = options && arm === request.policy ? { policy_options: options } : {};
  return { ...request, ...own, kv: "grow", policy: arm };
}

/** The newest comparison: medians per arm, and ratios to the control paired round by round. */
export const comparison = {
  id: "comparison",
  title: "Comparison",
  mount(root, bus) {
    root.hidden = true;
    const body = element("div");
    const note = element("p", { className: "note" });
    root.querySelector(".body").append(body, note);
    let runs = [];
    const draw = onNextFrame(() => {
      const rows = rowsOf(runs);
      root.hidden = rows.length === 0;
      if (root.hidden) return;
      const control = controlOf(rows);
      const heads = ["Arm", "n", "median ms", "largest ms", "creates", `÷ ${control.arm}`];
      const cells = rows.map((row) => [
        row.arm,
        number(row.times.length),
        number(median(row.times)),
        number(Math.max(...row.times)),
        number(mean(row.created)),
        ratioText(row, control),
      ]);
      body.replaceChildren(scroller("Comparison", table("Comparison of the arms", heads, cells)));
      const rounds = Math.max(...rows.map(({ medians }) => medians.size));
      note.textContent =
        `${plural(rounds, "round")} in turns; per token, without the first ${WARM_UP} tokens of each run. ` +
        `÷ ${control.arm}: median of the rounds' ratios of medians [least, greatest].`;
    });
    let key = "";
    bus.on(ON_PAGE.RUNS, ({ runs: all }) => {
      const newest = Math.max(0, ...all.map(({ comparison: found }) => found?.id ?? 0));
      runs = all.filter(({ comparison: found, record }) => record && found?.id === newest);
      const now = runs.map(({ label }) => label).join();
      if (now !== key) draw();
      key = now;
    });
  },
};

/** `[{arm, times, created, medians: round → ms}]` in the order in which the arms first ran. */
function rowsOf(runs) {
  const rows = new Map();
  for (const { comparison: of, steps: steady } of runs) {
    if (!steady.length) continue;
    const row = rows.get(of.arm) ?? { arm: of.arm, times: [], created: [], medians: new Map() };
    rows.set(of.arm, row);
    row.times.push(...steady.map(({ ms }) => ms));
    row.created.push(...steady.map(({ buffers_created: created }) => created));
    row.medians.set(of.round, median(steady.map(({ ms }) => ms)));
  }
  return [...rows.values()];
}

function controlOf(rows) {
  return rows.find(({ arm }) => arm === CONTROL) ?? rows[0];
}

function ratioText({ medians }, control) {
  const ratios = [...medians].flatMap(([round, ms]) =>
    control.medians.has(round) ? [ms / control.medians.get(round)] : [],
  );
  if (!ratios.length) return "–";
  const [middle, least, greatest] = [median(ratios), Math.min(...ratios), Math.max(...ratios)];
  return `${middle.toFixed(2)} [${least.toFixed(2)}, ${greatest.toFixed(2)}]`;
}
