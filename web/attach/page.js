/**
 * The example page: the form, the worker, and the states in `document.documentElement.dataset.state`:
 * booting → ready → running → done, any → error. `window.example` has the turns, the rows and the trace of now.
 */
import { element, onNextFrame } from "../dom.js";
import { bytes } from "../format.js";
import { inTurns } from "../comparing.js";
import { noWebGpu } from "../notices.js";
import { ARMS, codeOf, firstSize, RECORDED, tooLarge, WITH } from "./arms.js";
import { mountForm } from "./form.js";
import { mountResults } from "./results.js";
import { bytesNeeded } from "./ort.js";

const root = document.documentElement;
const notices = document.getElementById("notices");
const alarm = element("div", { role: "alert" });
const standing = element("div");
const query = new URLSearchParams(location.search);
const now = { turns: [], rows: [], trace: null, conclusion: "", error: null };
window.example = now;

let worker = null;
let limits = null;
let asked = null;

notices.replaceChildren(alarm, standing);
const form = mountForm(document.getElementById("scenario"), {
  start: () => begin(ARMS),
  record: () => begin([RECORDED]),
  stop: () => worker.postMessage({ type: "stop" }),
  check,
});
const results = mountResults(document.getElementById("work"), now);
const draw = onNextFrame(() => results.draw());
boot();

function boot() {
  setState("booting");
  if (!navigator.gpu) return fail({ code: "NoWebGPU", message: "navigator.gpu does not exist in this browser." });
  worker?.terminate();
  worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "onnxruntime-web" });
  worker.addEventListener("message", ({ data }) => hear[data.type](data));
  worker.addEventListener("error", (event) => {
    fail({ code: "WorkerError", message: event.message || "attach/worker.js or one of its modules could not be loaded." });
  });
}

const hear = {
  ready({ adapter, limits: granted, software, policies }) {
    const isFirst = limits === null; // after a restart what was chosen stays
    limits = granted;
    const name = adapter.description || [adapter.vendor, adapter.architecture].filter(Boolean).join(" ");
    document
      .getElementById("chips")
      .replaceChildren(
        element("li", { className: `chip ${software ? "warn" : ""}` }, element("b", {}, name), software ? " · CPU adapter" : ""),
        element("li", { className: "chip" }, "limit ", element("b", {}, bytes(granted.maxBufferSize)), " buffer"),
      );
    if (software) standing.replaceChildren(strip("warn", "This adapter computes on the CPU. Counts are real; its times say nothing about a GPU."));
    if (isFirst) form.offer(policies);
    if (isFirst) form.fill({ ...firstSize({ software, limits, memoryGib: navigator.deviceMemory }), ...Object.fromEntries(query) });
    setState("ready");
    if (isFirst && query.get("run") === "1") begin(ARMS);
  },
  turn({ arm, round }) {
    now.turns.push({ arm, round, steps: [], peakBytes: null, digest: null });
    form.say(`Round ${round + 1} of ${asked.rounds}, ${arm}: starting a session`);
    draw();
  },
  step({ type: _, arm, round, ...step }) {
    now.turns.at(-1).steps.push(step);
    form.progress(now.turns.reduce((count, { steps }) => count + steps.length, 0), asked.total);
    form.say(`Round ${round + 1} of ${asked.rounds}, ${arm}: step ${step.index + 1} of ${asked.steps}`);
    draw();
  },
  turned({ peak_bytes: peakBytes, digest }) {
    Object.assign(now.turns.at(-1), { peakBytes, digest });
    draw();
  },
  costs() {
    form.say("Measuring what creating a buffer takes here …");
  },
  trace({ text, conclusion }) {
    now.conclusion = conclusion;
    now.trace = new File([text], `onnxruntime-web-${asked.model}.trace`);
  },
  done({ stopped }) {
    form.say(stopped ? "Stopped." : "Done.");
    setState("done");
    draw();
  },
  error(error) {
    fail(error);
  },
};

function begin(arms) {
  const { rounds: wanted, ...request } = form.read();
  const rounds = arms.length > 1 ? wanted : 1;
  asked = { ...request, rounds, arms, total: rounds * arms.length * request.steps };
  if (arms.length > 1) now.turns.length = 0;
  else now.turns = now.turns.filter(({ arm }) => arm !== RECORDED);
  now.trace = now.error = null;
  alarm.replaceChildren();
  history.replaceState(null, "", `?${form.query()}`);
  const turns = inTurns("attach", arms.map((arm) => ({ arm })), rounds).map(({ comparison: { arm, round } }) => ({ arm, round }));
  results.showCode(codeOf(arms.includes(WITH) ? request.attach : { record: true, runtime: "onnxruntime-web" }));
  setState("running");
  worker.postMessage({ type: "run", request, turns });
}

/** What is wrong with the sizes in the form, or ""; and what they need, as a note. */
function check(request) {
  if (limits === null) return { problem: "", note: "" };
  const problem = tooLarge(request, limits);
  const need = bytesNeeded(request);
  const memory = (navigator.deviceMemory ?? Infinity) * 2 ** 30;
  const tight = 2 * need > memory ? ` This machine reports ${bytes(memory)} of memory: choose 16 tensors or fewer positions.` : "";
  return { problem, note: `K and V: ${bytes(need)} at the end; the runtime's own pool needs up to twice that.${tight}` };
}

function fail(error) {
  now.error = error;
  const notice = error.code === "NoWebGPU" ? noWebGpu(error.message) : errorStrip(error);
  alarm.replaceChildren(notice);
  notice.focus();
  form.say("Stopped by an error; it is described at the top of the page.");
  setState("error");
}

function errorStrip({ code, message }) {
  const isMemory = /memory|lost|allocat/i.test(message);
  const advice = isMemory
    ? "The GPU's memory seems to be full: choose 16 tensors, fewer positions or fewer steps, close other tabs that use the GPU, and press Restart."
    : "Press Restart. If it stays, build the site again: python -m harness site.";
  const restart = element("button", { type: "button" }, "Restart");
  restart.addEventListener("click", () => {
    now.error = null;
    alarm.replaceChildren();
    boot();
  });
  const body = element("div", {}, element("h2", {}, code), element("p", {}, message), element("p", {}, advice), restart);
  return element("section", { className: "notice error", tabIndex: -1 }, body);
}

function strip(kind, text) {
  return element("section", { className: `notice ${kind}` }, element("p", { role: "status" }, text));
}

function setState(state) {
  root.dataset.state = state;
  form.setState(state, state !== "booting" && state !== "running" && limits !== null && now.error?.code !== "NoWebGPU");
}
