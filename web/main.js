/**
 * The page: mounts the panels, owns the worker, and moves between the states in `document.documentElement.dataset.state`:
 *
 *     booting → ready → (loading →) running → done        any → error → the next run, or a restart
 *               ready → replaying (a trace) → ready
 *
 * `window.stepwell` holds what `now` has, for scripts that drive the page.
 */
import { Bus } from "./bus.js";
import { element } from "./dom.js";
import { applyLateQuery, applyQuery, chosenWorkload, queryOf, readModel, readOnce, readRequest } from "./form.js";
import { FROM_WORKER, ON_PAGE, TO_WORKER } from "./messages.js";
import { isFatal, mountNotices } from "./notices.js";
import { PLACES } from "./panels/index.js";
import { remembered } from "./remembered.js";
import { Runs } from "./runs.js";

const bus = new Bus();
const form = document.getElementById("scenario");
const query = new URLSearchParams(location.search);
const now = { environment: null, model: null, record: null, trace: null, poolTrace: null, verdict: null, tuning: null, error: null };
window.stepwell = now;

let worker = null;
let usable = false; // the worker answers and its device is open
let cancelling = false;
let manifest = null;
let loaded = null; // the model description that the worker holds
let wanted = null; // the model description that the queue is for
let queue = []; // what is still to run, [{request, comparison}]

mountNotices(document.getElementById("notices"), bus);
for (const [place, panels] of Object.entries(PLACES)) mountAll(place, panels);
const runs = new Runs(bus);
listen();
const manifestRead = readManifest();
start();

function mountAll(place, panels) {
  const root = document.getElementById(place);
  for (const panel of panels) {
    if (place === "chips") panel.mount(root, bus);
    else panel.mount(root.appendChild(frame(panel)), bus);
  }
}

/** An empty panel: a titled section with room for an aside, actions and a body. */
function frame({ id, title }) {
  const head = element(
    "div",
    { className: "head" },
    element("h2", { id: `${id}-title` }, title),
    element("span", { className: "aside" }),
    element("div", { className: "actions" }),
  );
  return element(
    "section",
    { id, className: "panel", "aria-labelledby": `${id}-title` },
    head,
    element("div", { className: "body" }),
  );
}

function listen() {
  bus.on(FROM_WORKER.ENVIRONMENT, async ({ environment }) => {
    now.environment = environment;
    await manifestRead;
    usable = true;
    warn(applyLateQuery(form, query));
    tellKind();
    setState("ready");
    if (query.get("run") === "1") form.requestSubmit();
    query.delete("run");
  });
  bus.on(FROM_WORKER.MODEL, ({ model }) => {
    now.model = model;
    loaded = wanted;
    if (cancelling) queue = [];
    if (queue.length) runNext();
    else setState("ready");
  });
  bus.on(FROM_WORKER.TUNING, ({ outcome, notices }) => {
    now.tuning = { outcome, notices: [...(now.tuning?.notices ?? []), ...notices] };
  });
  bus.on(FROM_WORKER.TRACE, ({ text }) => (now.trace = text));
  bus.on(FROM_WORKER.POOL_TRACE, ({ text }) => (now.poolTrace = text));
  bus.on(FROM_WORKER.VERDICT, ({ answer }) => {
    now.verdict = answer ?? now.verdict;
    setState(now.record ? "done" : "ready");
  });
  bus.on(FROM_WORKER.DONE, ({ record }) => {
    now.record = record;
    if (cancelling) queue = [];
    if (queue.length) runNext();
    else setState("done");
  });
  bus.on(FROM_WORKER.ERROR, ({ type: _, ...error }) => {
    now.error = error;
    queue = [];
    usable &&= !isFatal(error);
    if (state() === "running") runs.fail();
    setState("error");
  });
  bus.on(TO_WORKER.CANCEL, cancel);
  bus.on(ON_PAGE.RESTART, restart);
  bus.on(ON_PAGE.COMPARE, ({ requests }) => {
    if (canRun()) begin(requests);
  });
  bus.on(ON_PAGE.ASK, ({ file, question }) => {
    if (!canRun()) return warn(["Something is under way: stop it, or wait for its end, then choose the trace again."]);
    now.error = null;
    setState("replaying");
    worker.postMessage({ type: TO_WORKER.WHAT_IF, file, question });
  });
  form.addEventListener("change", tellKind);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (canRun()) begin([{ request: { ...readRequest(form), ...readOnce(form) }, comparison: null }]);
  });
}

async function readManifest() {
  try {
    const answer = await fetch("./manifest.json");
    if (!answer.ok) throw new Error(`manifest.json: HTTP ${answer.status}`);
    manifest = await answer.json();
  } catch (error) {
    console.warn("manifest:", error);
    warn([
      "manifest.json was not found: this folder is not a built site, so it ships no model. Build one with: python -m harness site",
    ]);
  }
  bus.emit({ type: ON_PAGE.MANIFEST, manifest });
  warn(applyQuery(form, query));
}

function start() {
  setState("booting");
  if (!navigator.gpu) {
    bus.emit({
      type: FROM_WORKER.ERROR,
      code: "NoWebGPU",
      message: "navigator.gpu does not exist in this browser.",
      phase: "device",
    });
    return;
  }
  let knowsModules = false;
  const options = {
    name: "stepwell",
    get type() {
      knowsModules = true; // only a browser with module workers asks
      return "module";
    },
  };
  worker = new Worker("./worker.js", options);
  if (!knowsModules) {
    worker.terminate();
    bus.emit({
      type: FROM_WORKER.ERROR,
      code: "NoModuleWorkers",
      message: "This browser cannot run modules in a worker.",
      phase: "runtime",
    });
    return;
  }
  worker.addEventListener("message", ({ data }) => bus.emit(data));
  worker.addEventListener("error", (event) => {
    const message = event.message || "worker.js or one of its modules could not be loaded.";
    bus.emit({ type: FROM_WORKER.ERROR, code: "WorkerError", message, phase: "runtime" });
  });
  worker.postMessage({ type: TO_WORKER.BOOT, tuning: remembered() });
}

function restart() {
  worker?.terminate();
  usable = false;
  queue = [];
  loaded = now.model = null;
  start();
}

/** Run these one after another, with the model that is chosen; it is loaded first if it is not. */
function begin(asked) {
  const model = readModel(form, manifest);
  if (!model) {
    bus.emit({
      type: FROM_WORKER.ERROR,
      code: "BadRequest",
      message: "No model file is chosen. Press “Choose a file …”, or drop a .gguf file on this page.",
      phase: "ready",
    });
    return;
  }
  now.error = now.record = now.trace = now.poolTrace = null;
  wanted = model;
  queue = asked;
  history.replaceState(null, "", `?${queryOf(form)}`);
  if (model.kind === "workload" || sameModel(model, loaded)) {
    runNext();
    return;
  }
  loaded = now.model = null;
  setState("loading");
  worker.postMessage({ type: TO_WORKER.LOAD, model });
}

/** The panels show what belongs to a model or to a workload, by `data-kind` of the form. */
function tellKind() {
  const workload = chosenWorkload(form);
  const kind = workload ? "workload" : "model";
  if (form.dataset.kind === kind && form.dataset.workload === (workload ?? "")) return;
  form.dataset.kind = kind;
  form.dataset.workload = workload ?? "";
  bus.emit({ type: ON_PAGE.KIND, workload });
}

function runNext() {
  const { request, comparison } = queue.shift();
  now.trace = now.poolTrace = null;
  runs.begin(request, wanted, comparison);
  if (state() !== "running") setState("running");
  const message = { type: TO_WORKER.RUN, request };
  worker.postMessage(message);
  bus.emit(message); // the panels want to know what was asked
}

/** Ask the worker to stop; asked again before it has, end it. */
function cancel() {
  if (!cancelling) {
    cancelling = true;
    worker.postMessage({ type: TO_WORKER.CANCEL });
    return;
  }
  if (state() === "running") runs.fail();
  restart();
}

function sameModel(a, b) {
  return b !== null && a.url === b.url && a.file === b.file && a.name === b.name;
}

function state() {
  return document.documentElement.dataset.state;
}

function canRun() {
  return usable && ["ready", "done", "error"].includes(state());
}

function setState(next) {
  const previous = state();
  cancelling = false;
  document.documentElement.dataset.state = next;
  bus.emit({ type: ON_PAGE.STATE, state: next, previous, canRun: canRun() });
}

function warn(texts) {
  for (const text of texts) bus.emit({ type: ON_PAGE.WARNING, text });
}
