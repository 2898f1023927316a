import { byArm, newestComparison } from "../comparing.js";
import { element, onNextFrame, scroller, table } from "../dom.js";
import { milliseconds, number, plural } from "../format.js";
import { describeLaunch } from "../launch.js";
import { ON_PAGE } from "../messages.js";
import { firstDifference } from "../runs.js";
import { median, pairedRatios, spread } from "../statistics.js";

/** What its runs are called: their kind of comparison, and the arm that has the form's switches. */
export const AB = Object.freeze({ KIND: "launch", CHOSEN: "chosen" });

/** heading and field of a token record */
const PER_TOKEN = [
  ["passes", "passes"],
  ["bind groups", "bind_groups_created"],
  ["uploads", "uploads"],
  ["submits", "submits"],
  ["encode ms", "encode_ms"],
  ["wait ms", "wait_ms"],
];

/** The newest A/B of the launch path, as it grows: both arms, the rounds' ratios, and whether the answers are equal. */
export const ab = {
  id: "ab",
  title: "A/B of the launch path",
  mount(root, bus) {
    root.hidden = true;
    const alarm = element("div", { role: "alert" });
    const finding = element("p", { className: "finding" });
    const tables = element("div", { className: "tables" });
    const note = element("p", { className: "note" });
    root.querySelector(".body").append(alarm, finding, tables, note);
    let runs = [];
    const draw = onNextFrame(() => {
      const rows = byArm(runs);
      root.hidden = rows.length === 0;
      if (root.hidden) return;
      const whole = byArm(runs.filter(isWhole)); // only whole runs are paired
      const [main, chosen] = [armOf(whole, (arm) => arm !== AB.CHOSEN), armOf(whole, (arm) => arm === AB.CHOSEN)];
      const ratios = pairedRatios(main.medians, chosen.medians);
      const verdict = answersOf(runs);
      root.querySelector(".aside").textContent = progressOf(runs);
      tables.replaceChildren(armTable(rows), roundTable(main, chosen, ratios));
      finding.textContent = findingOf(main, chosen, ratios, verdict);
      finding.hidden = !finding.textContent;
      note.textContent = noteOf(runs);
      const problem = verdict.problem ?? "";
      if (alarm.textContent !== problem)
        alarm.replaceChildren(...(problem ? [element("p", { className: "alarm" }, problem)] : []));
    });
    bus.on(ON_PAGE.RUNS, (message) => {
      runs = newestComparison(message.runs, AB.KIND);
      draw();
    });
  },
};

function isWhole({ record }) {
  return record !== null && record.finish_reason !== "cancelled";
}

function armOf(rows, isIt) {
  return rows.find(({ arm }) => isIt(arm)) ?? { arm: "", runs: [], steps: [], medians: new Map() };
}

function armTable(rows) {
  const heads = ["Arm", "n", "median ms", ...PER_TOKEN.map(([head]) => head)];
  const cells = rows.map(({ arm, steps }) => {
    const of = (name) => number(median(steps.map((step) => step[name])));
    return [arm, number(steps.length), of("ms"), ...PER_TOKEN.map(([, name]) => of(name))];
  });
  return scroller("Arms", table("Medians per token of both arms", heads, cells));
}

function roundTable(main, chosen, ratios) {
  if (!ratios.length)
    return element("p", { className: "note" }, "The first ratio comes with the end of the first round.");
  const heads = ["Round", `${main.arm}, ms`, `${chosen.arm}, ms`, `${main.arm} ÷ ${chosen.arm}`];
  const cells = ratios.map(({ round, ratio }) => [
    number(round + 1),
    number(main.medians.get(round)),
    number(chosen.medians.get(round)),
    ratio.toFixed(2),
  ]);
  return scroller("Rounds", table("Median per token and their ratio, round by round", heads, cells));
}

function progressOf(runs) {
  const { arm, round, rounds } = runs.at(-1).comparison;
  const last = runs.at(-1);
  if (!last.record && !last.failed) return `round ${round + 1} of ${rounds}, running ${arm}`;
  const done = runs.filter(isWhole).length;
  return done < 2 * rounds ? `${done} of ${2 * rounds} runs` : plural(rounds, "round");
}

function findingOf(main, chosen, ratios, { equal }) {
  if (!ratios.length) return "";
  const { middle, least, greatest } = spread(ratios.map(({ ratio }) => ratio));
  const ms = ({ steps }) => milliseconds(median(steps.map((step) => step.ms)));
  return (
    `Median per token: ${ms(main)} with ${main.arm}, ${ms(chosen)} with the switches chosen; ${middle.toFixed(2)}× as fast, ` +
    `the median of ${plural(ratios.length, "paired round")} [${least.toFixed(2)}, ${greatest.toFixed(2)}]. ${equal}`
  );
}

/** `{equal, problem}`: a sentence if all runs that have ended gave the same token ids (and digests), or what differs. */
function answersOf(runs) {
  const ended = runs.filter(({ record }) => record);
  const [first, ...others] = ended;
  if (!others.length) return { equal: "" };
  const digests = ended.every(({ record }) => record.tokens.every(({ digest }) => digest));
  for (const run of others) {
    const [id, digest] = ["id", "digest"].map((field) => firstDifference(column(first, field), column(run, field)));
    if (id < 0 && digest < 0) continue;
    const what = id < 0 ? `logits from token ${number(digest)} on` : `token ids from token ${number(id)} on`;
    return {
      equal: "The answers are not equal.",
      problem:
        `Runs ${first.name} and ${run.name} differ in their ${what}. The launch path must never change a result: ` +
        "please report it with both records (Export JSON).",
    };
  }
  const same = digests ? "Token ids and digests of the logits" : "The token ids";
  return { equal: `${same} of ${number(ended.length)} runs are equal.` };
}

function column({ record }, field) {
  return record.tokens.map((token) => token[field]);
}

function noteOf(runs) {
  const chosen = runs.find(({ comparison: { arm } }) => arm === AB.CHOSEN);
  const what = chosen ? `${AB.CHOSEN}: ${describeLaunch(chosen.request.launch)}. ` : "";
  return (
    `${what}Medians of n decode steps; each round runs both arms, in an order that alternates. ` +
    "A stopped run is in the medians and in no ratio."
  );
}
