import { swatch } from "../chart.js";
import { copyButton, saveJson } from "../clipboard.js";
import { element, onNextFrame, scroller, table } from "../dom.js";
import { number, mebibytes } from "../format.js";
import { FROM_WORKER, ON_PAGE } from "../messages.js";
import { divergences, summarise } from "../runs.js";
import { adapterName } from "./environment.js";

/** heading and value of each figure of a finished run */
const COLUMNS = [
  ["n", (run, { n }) => number(n)],
  ["median ms", (run, { median_ms: ms }) => number(ms)],
  ["p99 ms", (run, { tail }) => (tail.name === "p99" ? number(tail.value) : `${number(tail.value)} (max)`)],
  ["first token ms", (run, { ttft_ms: ms }) => number(ms)],
  ["launches", (run, { median_of: of }) => number(of("launches"))],
  ["passes", (run, { median_of: of }) => number(of("passes"))],
  ["bind groups", (run, { median_of: of }) => number(of("bind_groups_created"))],
  ["uploads", (run, { median_of: of }) => number(of("uploads"))],
  ["creates", (run, { created_per_token: created }) => number(created)],
  ["peak MiB", (run, { peak_bytes: peak }) => number(mebibytes(peak))],
];
const LEGEND =
  "Per token: medians of n decode steps; creates are a mean. Fewer than 100 steps have no p99: the slowest is given.";

/** The finished runs of this page side by side, to keep as JSON or as a Markdown table. */
export const runs = {
  id: "runs",
  title: "Runs",
  mount(root, bus) {
    root.hidden = true;
    let finished = [];
    let environment = null;
    bus.on(FROM_WORKER.ENVIRONMENT, (message) => (environment = message.environment));

    const save = element("button", { type: "button", id: "export" }, "Export JSON");
    save.addEventListener("click", () => exportRuns(finished));
    root.querySelector(".actions").append(
      copyButton("Copy as Markdown", () => markdown(finished, environment)),
      copyButton("Copy link", () => location.href),
      save,
    );
    const alarm = element("div", { role: "alert" });
    const body = element("div");
    root.querySelector(".body").append(alarm, body);

    const draw = onNextFrame(() => {
      root.hidden = finished.length === 0;
      const rows = finished.map((run) => [rowHead(run), ...figures(run), rowButtons(run, bus)]);
      const heads = [
        "Run",
        ...COLUMNS.map(([head]) => head),
        element("span", { className: "visually-hidden" }, "Actions"),
      ];
      body.replaceChildren(scroller("Runs", table("Runs", heads, rows)), element("p", { className: "note" }, LEGEND));
      alarm.replaceChildren(...divergences(finished).map(alarmText));
    });
    let key = "";
    bus.on(ON_PAGE.RUNS, (message) => {
      finished = message.runs.filter(({ record }) => record);
      const now = finished.map(({ label }) => label).join();
      if (now !== key) draw(); // not for every token of the run that is under way
      key = now;
    });
  },
};

function figures(run) {
  const summary = summarise(run);
  return COLUMNS.map(([, value]) => value(run, summary));
}

function rowHead(run) {
  const cancelled = run.record.finish_reason === "cancelled" ? " (stopped)" : "";
  return element("span", { className: "run-name" }, swatch(run), `${run.name}${cancelled}`);
}

function rowButtons(run, bus) {
  const save = element(
    "button",
    { type: "button", className: "small", "aria-label": `Export run ${run.label} as JSON` },
    "JSON",
  );
  const forget = element(
    "button",
    { type: "button", className: "small", "aria-label": `Remove run ${run.label}` },
    "Remove",
  );
  save.addEventListener("click", () => exportRuns([run]));
  forget.addEventListener("click", () => bus.emit({ type: ON_PAGE.FORGET, label: run.label }));
  return element("span", { className: "row-buttons" }, save, forget);
}

/** One run is a file that follows the record schema; several are an array of such records. */
function exportRuns(chosen) {
  const records = chosen.map(({ record }) => record);
  const labels = chosen.map(({ label, request }) => `${label}-${request.policy}-${request.kv}`);
  saveJson(`stepwell-${labels.join("_")}.json`, records.length === 1 ? records[0] : records);
}

function markdown(finished, environment) {
  const heads = ["run", "model", ...COLUMNS.map(([head]) => head)];
  const rows = finished.map((run) => [run.name, run.record.scenario.model, ...figures(run)]);
  const line = (cells) => `| ${cells.map((cell) => String(cell).replaceAll("|", "\\|")).join(" | ")} |`;
  const { adapter, browser, pyodide, stepwell, timer_resolution_us: timer } = environment;
  const kind = adapter.is_software ? "CPU adapter: timings say nothing about a GPU" : "hardware adapter";
  return [
    line(heads),
    line(heads.map((_, i) => (i < 2 ? "---" : "--:"))),
    ...rows.map(line),
    "",
    `${adapterName(adapter)} (${kind}); ${browser}; timer ${number(timer)} µs; Pyodide ${pyodide}; stepwell ${stepwell}. ${LEGEND}`,
    "",
  ].join("\n");
}

function alarmText({ first, second, index }) {
  return element(
    "p",
    { className: "alarm" },
    `Runs ${first.name} and ${second.name} should give the same tokens and differ from token ${number(index)} on. ` +
      "Neither a cache nor the launch path may change the answer: please report it with both records (Export JSON).",
  );
}
