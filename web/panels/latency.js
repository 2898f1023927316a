import { Chart, colour, line, swatch, timeline } from "../chart.js";
import { element, lazyDetails, onNextFrame, scroller, table } from "../dom.js";
import { bytes, byteStep, milliseconds, number, plural } from "../format.js";
import { ON_PAGE } from "../messages.js";
import { classSteps, summarise } from "../runs.js";

/** A run whose size class changes more often than this has no classes to speak of: its marks would be a fence. */
const MOST_MARKS = 16;
const MARK_ROWS = 3;

/** Time per token by position, one line per run, with a mark where the KV cache enters another size class. */
export const latency = {
  id: "latency",
  title: "Time per token by position, ms",
  mount(root, bus) {
    root.hidden = true;
    const chart = new Chart(280);
    const prefills = element("span");
    const readout = element("span", { className: "readout", "aria-hidden": "true" }); // in place of the line above it
    const comparison = element("p", { className: "finding", hidden: true });
    let runs = [];
    const data = lazyDetails("The same as a table", () => dataTable(drawn(runs)));
    root
      .querySelector(".body")
      .append(chart.node, element("p", { className: "note" }, readout, prefills), comparison, data.node);

    const draw = onNextFrame(() => {
      const shown = drawn(runs);
      const marks = collectMarks(shown);
      root.hidden = !runs.some(({ steps }) => steps.length > 0);
      if (root.hidden) return;
      updateLegend(root.querySelector(".actions"), runs, bus);
      const key = shown.map(({ label }) => label).join() || "none";
      chart.update(key, () => options(shown, readout, marksOf), align(shown), describe(shown, marks));
      prefills.textContent = prefillLine(shown);
      comparison.textContent = compare(shown);
      comparison.hidden = !comparison.textContent;
      data.refresh();
    });
    const marksOf = () => collectMarks(drawn(runs));
    bus.on(ON_PAGE.RUNS, (message) => {
      runs = message.runs;
      draw();
    });
  },
};

function drawn(runs) {
  return runs.filter(({ visible, steps }) => visible && steps.length > 0);
}

/** uPlot's columns: the union of all positions, then one column of ms per run (undefined where it has no token). */
function align(runs) {
  const maps = runs.map(({ steps }) => new Map(steps.map(({ position, ms }) => [position, ms])));
  const positions = [...new Set(maps.flatMap((map) => [...map.keys()]))].sort((a, b) => a - b);
  return [positions, ...maps.map((map) => positions.map((position) => map.get(position)))];
}

/** Marks of all runs, equal ones merged: `[{position, text, labels}]`, by position. */
function collectMarks(runs) {
  const marks = new Map();
  for (const run of runs) {
    const steps = classSteps(run);
    if (steps.length > MOST_MARKS) continue;
    for (const { position, from, to } of steps) {
      const text = byteStep(from, to);
      const mark = marks.get(`${position} ${text}`) ?? { position, text, labels: [] };
      mark.labels.push(run.label);
      marks.set(`${position} ${text}`, mark);
    }
  }
  return [...marks.values()].sort((a, b) => a.position - b.position);
}

function options(runs, readout, marksOf) {
  const series = runs.map((run) => ({
    ...line(run.name, run.style),
    spanGaps: true,
    points: { show: () => run.steps.length === 1 },
  }));
  return {
    ...timeline(series, 0.18),
    padding: [14, 14, 0, 0],
    hooks: {
      draw: [(plot) => drawMarks(plot, marksOf(), runs)],
      setCursor: [(plot) => (readout.textContent = readAt(plot, runs))],
    },
  };
}

/** Dashed verticals with their text at the top, in up to three rows so that neighbours do not overlap. */
function drawMarks(plot, marks, runs) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const ends = Array(MARK_ROWS).fill(-Infinity);
  ctx.save();
  ctx.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  for (const { position, text, labels } of marks) {
    const x = plot.valToPos(position, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const words = labels.length === runs.length ? text : `${labels.join(", ")}: ${text}`;
    const width = ctx.measureText(words).width;
    const left = Math.min(x + 4 * ratio, bbox.left + bbox.width - width);
    const row = ends.findIndex((end) => end + 6 * ratio < left);
    ctx.strokeStyle = colour("--mark");
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (row < 0) continue; // no room for the words: the table has them
    ends[row] = left + width;
    ctx.fillStyle = colour("--muted");
    ctx.fillText(words, left, bbox.top + (2 + 14 * row) * ratio);
  }
  ctx.restore();
}

function readAt(plot, runs) {
  const index = plot.cursor.idx;
  if (index === null || index === undefined) return "";
  const parts = runs.flatMap(({ name }, i) => {
    const ms = plot.data[i + 1][index];
    return ms === undefined ? [] : [`${name}: ${milliseconds(ms)}`];
  });
  return [`position ${number(plot.data[0][index])}`, ...parts].join(" · ");
}

function updateLegend(bar, runs, bus) {
  const key = runs.map(({ label, visible }) => `${label}${visible}`).join();
  if (bar.dataset.key === key) return;
  bar.dataset.key = key;
  const focused = document.activeElement?.dataset.run;
  bar.replaceChildren(
    ...runs.map((run) => {
      const button = element(
        "button",
        { type: "button", className: "chip", dataset: { run: run.label } },
        swatch(run),
        run.name,
      );
      button.setAttribute("aria-pressed", String(run.visible));
      button.title = run.visible ? "Hide this line" : "Show this line";
      button.addEventListener("click", () => bus.emit({ type: ON_PAGE.SHOW, label: run.label, visible: !run.visible }));
      return button;
    }),
  );
  if (focused) bar.querySelector(`[data-run="${focused}"]`)?.focus();
}

function prefillLine(runs) {
  const parts = runs.map((run) => {
    const rows = run.request.workload ? `${number(run.request.start)} positions` : null;
    const size = run.record ? ` (${rows ?? plural(run.record.prompt_ids.length, "token")})` : "";
    const fence = classSteps(run).length > MOST_MARKS ? ", size class changes too often to mark" : "";
    return `${run.label} ${run.prefill.map(({ ms }) => milliseconds(ms)).join(", ")}${size}${fence}`;
  });
  return parts.length
    ? `Prefill, not drawn: ${parts.join(" · ")}. Drag to zoom, double-click to see all.`
    : "No line is shown.";
}

/** The two newest finished runs side by side, in one sentence with its caveats. */
function compare(runs) {
  const [first, second] = runs.filter(({ record }) => record).slice(-2);
  if (!second) return "";
  const [a, b] = [summarise(first), summarise(second)];
  const [slow, fast] =
    a.median_ms > b.median_ms
      ? [
          [first, a],
          [second, b],
        ]
      : [
          [second, b],
          [first, a],
        ];
  const creates = ([run, { created_per_token: created }]) => `${run.label} creates ${number(created)}`;
  return (
    `Median per token: ${fast[0].name} is ${number(slow[1].median_ms / fast[1].median_ms)}× as fast as ${slow[0].name} ` +
    `(${milliseconds(fast[1].median_ms)}, n = ${fast[1].n}; ${milliseconds(slow[1].median_ms)}, n = ${slow[1].n}). ` +
    `Buffers per token: ${creates(fast)}, ${creates(slow)}. One run each, one after the other.`
  );
}

function describe(runs, marks) {
  const lines = runs.map((run) => {
    const { n, median_ms: ms } = summarise(run);
    return `${run.name}: median ${milliseconds(ms)}, ${plural(n, "step")}`;
  });
  const steps = marks.map(({ position, text }) => `${text} at position ${number(position)}`);
  return `Line chart of time per token by position. ${lines.join("; ")}. Size class of the KV cache: ${steps.join("; ") || "no change"}.`;
}

function dataTable(runs) {
  const maps = runs.map(({ steps }) => new Map(steps.map((step) => [step.position, step])));
  const [positions] = align(runs);
  const columns = ["Position", ...runs.flatMap(({ label }) => [`${label}, ms`, `${label}, size class`])];
  const rows = positions.map((position) => [
    number(position),
    ...maps.flatMap((map) => {
      const step = map.get(position);
      return step ? [number(step.ms), bytes(step.kv_class_bytes)] : ["", ""];
    }),
  ]);
  return scroller("Time per token by position", table("Time per token by position", columns, rows));
}
