import { Chart, line, swatch, timeline } from "../chart.js";
import { copyButton, saveBlob, saveJson } from "../clipboard.js";
import { OPTION_PREFIX, runFields, switchOf } from "../controls.js";
import { element, scroller, table } from "../dom.js";
import { applyLateQuery } from "../form.js";
import { bytes, mebibytes, number } from "../format.js";
import { takeOver } from "../handover.js";
import { FROM_WORKER, ON_PAGE, TO_WORKER } from "../messages.js";

/** What may be set in place of what the trace says: id, label, hint. */
const ASSUMPTIONS = [
  ["create_us", "µs per create", "that creating any buffer takes; empty: as recorded, else as measured on an H200"],
  ["create_us_per_mib", "µs per MiB", "and those for each MiB of it"],
  ["budget_mib", "Budget, MiB", "that the pool may reserve; settings that need more are left out; empty: no limit"],
];
const LEGEND =
  "Creates and MiB are means over all; later, most, ms and saved leave out the first two, which fill the pool under any policy. " +
  "ms are estimates from the cost of a create.";

/** A recorded trace, replayed through every policy without the GPU: which setting to take, what it saves, and why. */
export const whatIf = {
  id: "what-if",
  title: "What if: a recorded trace under other policies",
  mount(root, bus) {
    const form = root.closest("form");
    const assumptions = assumptionFields(bus);
    const asking = askingRow(root, bus, assumptions);
    const result = element("div", { className: "tables" });
    root
      .querySelector(".body")
      .append(
        element(
          "p",
          { className: "note" },
          "Drop a trace (.trace, .trace.gz) anywhere on this page, or choose one: what it recorded is replayed through every " +
            "policy, in this tab and without the GPU. Nothing leaves this machine.",
        ),
        asking,
        assumptions.node,
        ...recordRow(bus),
        progressRow(bus),
        result,
      );
    const chart = new Chart(220);
    let count = 0;
    bus.on(FROM_WORKER.VERDICT, ({ answer }) => {
      if (!answer) return; // it was stopped: what was found before stays
      count += 1;
      result.replaceChildren(...shown(answer, chart, form));
      drawSeries(chart, answer, count);
      const save = element("button", { type: "button", id: "what-if-export" }, "Export JSON");
      save.addEventListener("click", () => saveJson(`what-if-${answer.trace.replace(/\.gz$/, "")}.json`, answer));
      root.querySelector(".actions").replaceChildren(save);
      root.scrollIntoView({ block: "nearest" });
    });
  },
};

/** The file, and the button that replays it once more. */
function askingRow(root, bus, assumptions) {
  const file = element("input", {
    type: "file",
    id: "trace-file",
    accept: ".trace,.gz",
    className: "visually-hidden",
    disabled: true,
  });
  file.setAttribute("form", ""); // not a field of the scenario
  const again = element("button", { type: "button", id: "what-if-again", disabled: true }, "Replay again");
  let asked = null;
  let canRun = false;
  const enable = () => {
    file.disabled = !canRun;
    again.disabled = !(canRun && asked);
  };
  const ask = (trace) => {
    if (!trace || !assumptions.valid()) return;
    asked = trace;
    bus.emit({ type: ON_PAGE.ASK, file: trace, question: assumptions.read() });
    root.scrollIntoView({ block: "nearest" });
  };
  file.addEventListener("change", () => {
    const [chosen] = file.files;
    ask(chosen);
    file.value = ""; // so that the same file can be chosen again
  });
  again.addEventListener("click", () => ask(asked));
  bus.on(ON_PAGE.DROPPED, (message) => ask(message.file));
  bus.on(ON_PAGE.STATE, async (message) => {
    const isFirst = canRun === false && message.state === "ready" && message.previous === "booting";
    canRun = message.canRun;
    enable();
    if (isFirst) ask(await takeOver());
  });
  return element(
    "div",
    { className: "row start" },
    file,
    element("label", { className: "button", htmlFor: "trace-file" }, "Choose a trace …"),
    again,
  );
}

function assumptionFields(bus) {
  const baseline = element("select", { id: "what-if-baseline" }, element("option", { value: "" }, "as recorded"));
  const inputs = ASSUMPTIONS.map(([name]) =>
    element("input", { type: "number", id: `what-if-${name}`, min: name === "budget_mib" ? 1 : 0, step: "any" }),
  );
  const controls = [...inputs, baseline];
  for (const control of controls) control.setAttribute("form", "");
  const labels = [...ASSUMPTIONS, ["baseline", "Compared with", "the policy that the savings are counted from"]];
  const fields = labels.map(([, label, hint], i) => labelled(label, hint, controls[i]));
  bus.on(FROM_WORKER.ENVIRONMENT, ({ policies }) => {
    if (baseline.options.length === 1)
      baseline.append(...policies.map(({ name }) => element("option", { value: name }, name)));
  });
  const details = element(
    "details",
    {},
    element("summary", {}, "Costs, budget, baseline"),
    element("div", {}, element("div", { className: "fields three" }, ...fields)),
  );
  return {
    node: details,
    valid: () => {
      const wrong = inputs.find((input) => !input.checkValidity());
      if (wrong) details.open = true; // what is wrong must be seen
      return !wrong || wrong.reportValidity();
    },
    read: () => ({
      baseline: baseline.value || null,
      ...Object.fromEntries(
        ASSUMPTIONS.map(([name], i) => [name, inputs[i].value === "" ? null : Number(inputs[i].value)]),
      ),
    }),
  };
}

function labelled(label, hint, control) {
  const id = `${control.id}-hint`;
  control.setAttribute("aria-describedby", id);
  control.title = hint;
  return element(
    "label",
    { className: "field" },
    element("span", {}, label),
    control,
    element("span", { id, className: "visually-hidden" }, hint),
  );
}

/** Recording what this page's own runs ask of the pool, to keep or to replay at once. */
function recordRow(bus) {
  const note = element("small");
  const ask = element("button", { type: "button", id: "what-if-recorded" }, "Replay it");
  const save = element("button", { type: "button", id: "save-pool-trace" }, "Download");
  const recorded = element("div", { className: "row start", hidden: true }, note, ask, save);
  let file = null;
  let label = "";
  let canRun = false;
  bus.on(ON_PAGE.RUNS, ({ current }) => (label = current ? `${current.label}-${current.request.policy}` : ""));
  bus.on(FROM_WORKER.POOL_TRACE, ({ text }) => {
    file = new File([text], `stepwell-${label}.trace`);
    note.textContent = `Recorded: run ${label}, ${bytes(file.size)}`;
    recorded.hidden = false;
  });
  bus.on(ON_PAGE.STATE, (message) => {
    canRun = message.canRun;
    ask.disabled = !canRun;
  });
  ask.addEventListener("click", () => bus.emit({ type: ON_PAGE.DROPPED, file }));
  save.addEventListener("click", async () => {
    const packed = file.stream().pipeThrough(new CompressionStream("gzip"));
    saveBlob(`${file.name}.gz`, await new Response(packed).blob());
  });
  return [element("div", { className: "options" }, ...runFields("what-if", switchOf)), recorded];
}

/** How far the replay is, and its Stop button; the page's status line says it in words. */
function progressRow(bus) {
  const bar = element("progress", { "aria-label": "Replayed" });
  const stop = element("button", { type: "button", id: "what-if-stop" }, "Stop");
  const row = element("div", { className: "progress", hidden: true }, bar, stop);
  bus.on(ON_PAGE.STATE, ({ state }) => {
    row.hidden = state !== "replaying";
    bar.removeAttribute("value");
    stop.textContent = "Stop";
  });
  bus.on(FROM_WORKER.PROGRESS, ({ phase, done, total }) => {
    if (phase === "what-if" && total !== null) Object.assign(bar, { max: total, value: done });
  });
  bus.on(TO_WORKER.CANCEL, () => (stop.textContent = "Stop now"));
  stop.addEventListener("click", () => bus.emit({ type: TO_WORKER.CANCEL }));
  return row;
}

/** The answer: in a sentence, what it rests on, as a chart, why, and every setting. */
function shown(answer, chart, form) {
  const { baseline, recommended, settings, over_budget: over } = answer;
  const best = settings.find(({ label }) => label === recommended);
  const lines = [baseline, ...(best ? [best] : [])];
  const why = baseline.hurting.length
    ? [
        element("p", {}, `Under ${baseline.label}:`),
        element("ul", {}, ...baseline.hurting.map((row) => element("li", {}, row.why))),
      ]
    : [element("p", {}, `Under ${baseline.label} no size class creates its buffers again and again.`)];
  return [
    element("p", { className: "finding", role: "status" }, answer.sentence),
    ...(best ? [element("div", { className: "row start" }, ...toDo(answer, best, form))] : []),
    element("p", { className: "note" }, assumed(answer)),
    element(
      "div",
      { className: "legend" },
      element("span", {}, `Buffers created per ${answer.unit}:`),
      ...lines.map(({ label }, style) => element("span", { className: "chip" }, swatch({ style }), label)),
    ),
    chart.node,
    element("div", { className: "why" }, ...why),
    ...(settings.length ? [settingsTable(answer)] : []),
    ...(over.length ? [element("p", { className: "note" }, `Over the budget and left out: ${over.join(", ")}.`)] : []),
    element("p", { className: "note" }, LEGEND),
  ];
}

/** A trace of another runtime has the line to attach with; what was recorded here can be chosen here. */
function toDo({ code }, best, form) {
  if (!code) return [useButton(best, form)];
  return [element("pre", {}, element("code", {}, code)), copyButton("Copy", () => code)];
}

/** Chooses the setting in the form, for the next run. */
function useButton({ label, policy, options }, form) {
  const button = element("button", { type: "button", id: "what-if-use" }, `Use ${label} in the next run`);
  button.addEventListener("click", () => {
    const query = new URLSearchParams([["policy", policy]]);
    for (const [name, value] of Object.entries(options)) query.set(OPTION_PREFIX + name, value);
    button.textContent = applyLateQuery(form, query).join(" ") || `${label} is chosen`;
  });
  return button;
}

function assumed(answer) {
  const { trace, runs, unit, baseline, baseline_from: from, create_us: each, create_us_per_mib: perMib } = answer;
  const budget = answer.budget_bytes === null ? "" : ` Budget: ${bytes(answer.budget_bytes)}.`;
  return (
    `${trace}: ${number(runs)} ${unit}s. Baseline: ${baseline.label} (${from}). Creating a buffer: ${number(each)} µs and ` +
    `${number(perMib)} µs per MiB (${answer.costs_from.split(";")[0]}).${budget}`
  );
}

function settingsTable({ settings, recommended, unit }) {
  const heads = ["Setting", `creates/${unit}`, `MiB/${unit}`, "later", "most", "peak MiB", `ms/${unit}`, "ms saved"];
  const rows = settings.map((row) => [
    row.label === recommended ? element("b", {}, `${row.label} ◂`) : row.label,
    row.creates_per_token.toFixed(3),
    row.mib_per_token.toFixed(2),
    row.steady_creates_per_token.toFixed(3),
    number(row.max_creates_in_token),
    number(Math.round(mebibytes(row.peak_bytes))),
    row.ms_per_token.toFixed(2),
    row.saved_ms_per_token.toFixed(2),
  ]);
  return scroller("Settings", table(`Every setting, per ${unit}; the recommended one is marked`, heads, rows));
}

/** Creates over the trace: the baseline's and, where there is one, the recommended setting's. */
function drawSeries(chart, { baseline, recommended, settings, unit }, key) {
  const best = settings.find(({ label }) => label === recommended);
  const lines = [baseline, ...(best ? [best] : [])];
  const data = [baseline.series.map(([x]) => x), ...lines.map(({ series }) => series.map(([, y]) => y))];
  const points = { show: data[0].length === 1 };
  const options = () => timeline(lines.map(({ label }, style) => ({ ...line(label, style), points })));
  const means = lines.map(({ label, steady_creates_per_token: mean }) => `${label}: ${number(mean)} on average`);
  chart.update(key, options, data, `Line chart of buffers created per ${unit}. ${means.join("; ")}.`);
}
