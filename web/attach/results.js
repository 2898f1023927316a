/** What the example shows: the code, two charts over the steps, the table, and what can be done with a recorded trace. */
import { Chart, line, swatch, timeline } from "../chart.js";
import { copyButton, saveBlob } from "../clipboard.js";
import { element, scroller, table } from "../dom.js";
import { bytes, milliseconds, number, plural } from "../format.js";
import { handOver } from "../handover.js";
import { ARMS, CONTROL, RECORDED, rowsOf, sameBits, WARM_UP, WITH, WITHOUT } from "./arms.js";
import { panel } from "./form.js";

const TITLES = {
  [WITHOUT]: "off: the runtime as it is",
  [WITH]: "on: stepwell attached",
  [CONTROL]: "static: allocated once",
  [RECORDED]: "recorded: as it is, recorded",
};
const ORDER = [...ARMS, RECORDED];
const HEADS = ["Arm", "n", "median ms", "÷ static", "creates/step", "mean", "peak MiB"];

/** `now` is what page.js keeps; returns `draw()` and `showCode(text)`. */
export function mountResults(work, now) {
  const code = element("code");
  const lines = panel("code", "What was run", element("pre", { className: "scroller", tabIndex: 0 }, code));
  lines.hidden = true;
  lines.querySelector("pre").setAttribute("aria-label", "Code");
  lines.querySelector(".actions").append(copyButton("Copy", () => code.textContent));
  const charts = [
    ["times", "ms per step", ({ index, ms }) => (index < WARM_UP ? null : ms)],
    ["creates", "Buffers created per step", ({ created }) => created],
  ].map((chart) => lineChart(...chart));
  const finding = element("p", { className: "finding", role: "status" });
  const body = element("div");
  const alarmed = element("div", { role: "alert" });
  const note = element("p", { className: "note" });
  const tablePanel = panel("table", "The arms", finding, alarmed, body, note);
  const trace = tracePanel(now);
  work.append(lines, ...charts.map(({ node }) => node), tablePanel, trace.node);
  tablePanel.hidden = true;

  return {
    showCode(text) {
      code.textContent = text;
      lines.hidden = false;
    },
    draw() {
      now.rows = rowsOf(now.turns);
      for (const chart of charts) chart.draw(now.turns);
      tablePanel.hidden = now.rows.length === 0;
      finding.textContent = inWords(now.rows);
      finding.hidden = !finding.textContent;
      body.replaceChildren(scroller("The arms", table("The arms", HEADS, now.rows.map(cells))));
      note.textContent = explain(now);
      alarmed.replaceChildren(...alarms(now));
      trace.draw();
    },
  };
}

function cells({ arm, n, medianMs, created, meanCreated, peakBytes, ratio }) {
  const { middle, least, greatest } = ratio;
  const text = Number.isFinite(middle) ? `${middle.toFixed(2)} [${least.toFixed(2)}, ${greatest.toFixed(2)}]` : "–";
  return [TITLES[arm], number(n), number(medianMs), text, number(created), number(meanCreated), number(Math.round(peakBytes / 2 ** 20))];
}

/** The two arms that people compare, once both have steps. */
function inWords(rows) {
  const [off, on, control] = [WITHOUT, WITH, CONTROL].map((name) => rows.find(({ arm }) => arm === name));
  if (!off || !on) return "";
  const factor = off.medianMs / on.medianMs;
  const speed = factor >= 1 ? `${factor.toFixed(2)}× as fast` : `${(1 / factor).toFixed(2)}× as slow`;
  const beside = control ? `; ${(on.medianMs / control.medianMs).toFixed(2)} × the static control` : "";
  return (
    `Attached, a step creates ${number(on.created)} buffers instead of ${number(off.created)} and takes ` +
    `${milliseconds(on.medianMs)} instead of ${milliseconds(off.medianMs)}: ${speed}${beside}. ` +
    `At the peak it holds ${bytes(on.peakBytes)} instead of ${bytes(off.peakBytes)}.`
  );
}

function explain({ turns }) {
  const rounds = new Set(turns.map(({ round }) => round)).size;
  const same = sameBits(turns) ? " All runs gave bit-equal K and V." : "";
  return (
    `${plural(rounds, "round")} in turns, each without its first ${WARM_UP} steps; medians over the rest, and the mean of the creates. Those are storage buffers that ` +
    "the browser was really asked for; the peak is of all buffers. ÷ static: median of the rounds' ratios [least, greatest]." +
    same
  );
}

function alarms({ turns, rows }) {
  const texts = [
    sameBits(turns) === false ? "The runs did not give the same K and V. Please report this." : "",
    ...rows.filter(({ wrong }) => wrong).map(({ arm }) => `Arm ${arm} read wrong values. Please report this.`),
  ];
  return texts.filter(Boolean).map((text) => element("p", { className: "alarm" }, text));
}

/** A panel with a line per arm: its newest round. */
function lineChart(id, title, value) {
  const chart = new Chart(220);
  const legend = element("div", { className: "legend" });
  const node = panel(id, `${title}, by position`, legend, chart.node);
  node.hidden = true;
  let key = "";
  const draw = (turns) => {
    const shown = ORDER.flatMap((arm) => turns.findLast((turn) => turn.arm === arm && turn.steps.length > 0) ?? []);
    node.hidden = shown.length === 0;
    if (node.hidden) return;
    const maps = shown.map(({ steps }) => new Map(steps.map((step) => [step.positions, value(step)])));
    const positions = [...new Set(maps.flatMap((map) => [...map.keys()]))].sort((a, b) => a - b);
    const data = [positions, ...maps.map((map) => positions.map((position) => map.get(position)))];
    const now = shown.map(({ arm }) => arm).join();
    if (now !== key) legend.replaceChildren(...shown.map(({ arm }) => entry(arm)));
    key = now;
    const means = rowsOf(shown).map((row) => `${row.arm}: ${number(id === "times" ? row.medianMs : row.created)}`);
    chart.update(key, () => options(shown), data, `Line chart of ${title.toLowerCase()}. ${means.join("; ")}.`);
  };
  return { node, draw };
}

function entry(arm) {
  return element("span", { className: "chip" }, swatch({ style: ORDER.indexOf(arm) }), TITLES[arm]);
}

function options(shown) {
  return timeline(shown.map(({ arm }) => ({ ...line(arm, ORDER.indexOf(arm)), spanGaps: true })));
}

/** Shown while there is a trace. */
function tracePanel(now) {
  const conclusion = element("p", { className: "finding" });
  const note = element("p", { className: "note" });
  const save = element("button", { type: "button", id: "save-trace" }, "Download the trace");
  const replay = element("button", { type: "button", id: "open-what-if" }, "Replay it: what if?");
  save.addEventListener("click", async () => {
    const packed = now.trace.stream().pipeThrough(new CompressionStream("gzip"));
    saveBlob(`${now.trace.name}.gz`, await new Response(packed).blob());
  });
  replay.addEventListener("click", () => handOver(now.trace));
  const node = panel("trace", "The recorded trace", conclusion, note, element("div", { className: "row start" }, save, replay));
  node.hidden = true;
  const draw = () => {
    node.hidden = now.trace === null;
    if (!now.trace) return;
    conclusion.textContent = now.conclusion;
    note.textContent = `${now.trace.name}, ${bytes(now.trace.size)}: what the runtime asked of WebGPU, run by run.`;
  };
  return { node, draw };
}
