import { byArm, inTurns, newestComparison } from "../comparing.js";
import { element, onNextFrame, scroller, table } from "../dom.js";
import { number, plural } from "../format.js";
import { ON_PAGE } from "../messages.js";
import { WARM_UP } from "../runs.js";
import { mean, median, pairedRatios, spread } from "../statistics.js";

/** The arm that the others are divided by: the same commands on tensors that are allocated once. */
export const CONTROL = "static";

const KIND = "policies";

/** The runs of a comparison of policies. */
export function comparisonOf(request, arms, rounds) {
  const asked = arms.map((arm) => ({ arm, request: requestOf(request, arm) }));
  return inTurns(KIND, asked, rounds);
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
      const rows = byArm(runs);
      root.hidden = rows.length === 0;
      if (root.hidden) return;
      const control = controlOf(rows);
      const heads = ["Arm", "n", "median ms", "largest ms", "creates", `÷ ${control.arm}`];
      const cells = rows.map((row) => {
        const times = row.steps.map(({ ms }) => ms);
        const created = row.steps.map(({ buffers_created: count }) => count);
        const figures = [times.length, median(times), Math.max(...times), mean(created)];
        return [row.arm, ...figures.map(number), ratioText(row, control)];
      });
      body.replaceChildren(scroller("Comparison", table("Comparison of the arms", heads, cells)));
      const rounds = Math.max(...rows.map(({ medians }) => medians.size));
      note.textContent =
        `${plural(rounds, "round")} in turns; per token, without the first ${WARM_UP} tokens of each run. ` +
        `÷ ${control.arm}: median of the rounds' ratios of medians [least, greatest].`;
    });
    let key = "";
    bus.on(ON_PAGE.RUNS, ({ runs: all }) => {
      runs = newestComparison(all, KIND).filter(({ record }) => record);
      const now = runs.map(({ label }) => label).join();
      if (now !== key) draw();
      key = now;
    });
  },
};

function controlOf(rows) {
  return rows.find(({ arm }) => arm === CONTROL) ?? rows[0];
}

function ratioText({ medians }, control) {
  const ratios = pairedRatios(medians, control.medians).map(({ ratio }) => ratio);
  if (!ratios.length) return "–";
  const { middle, least, greatest } = spread(ratios);
  return `${middle.toFixed(2)} [${least.toFixed(2)}, ${greatest.toFixed(2)}]`;
}
