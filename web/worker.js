/**
 * The module worker that owns Pyodide and, through it, the GPU device. It is the only file that knows Pyodide's API.
 * Messages come in and go out as docs/protocol.md describes; the work itself is done by
 * stepwell.page.frontend.Frontend in Python. A worker takes its Content-Security-Policy from its own response, so the page
 * can forbid eval although Pyodide needs it here.
 */
import { FROM_WORKER, TO_WORKER } from "./messages.js";

const PYODIDE_URL = new URL("./vendor/pyodide/", import.meta.url).href;

let frontend = null; // PyProxy of the Frontend; lives as long as the worker
let phase = "runtime";

const handlers = {
  [TO_WORKER.BOOT]: boot,
  [TO_WORKER.LOAD]: load,
  [TO_WORKER.RUN]: ({ request }) => frontend.run(JSON.stringify(request)),
  [TO_WORKER.WHAT_IF]: ({ file, question }) => frontend.what_if(JSON.stringify(question), file),
  [TO_WORKER.CANCEL]: () => frontend?.cancel(),
};

// Each message is handled at once, also while the handler of an earlier one awaits: that is how `cancel` gets through.
self.addEventListener("message", async ({ data }) => {
  try {
    await handlers[data.type](data);
  } catch (error) {
    fail(error);
  }
});
self.addEventListener("error", (event) => {
  event.preventDefault(); // the page would hear of it a second time
  fail(event.error ?? event);
});
self.addEventListener("unhandledrejection", (event) => fail(event.reason));

async function boot({ tuning }) {
  const started = performance.now();
  tell("runtime", "Starting Python");
  const { loadPyodide } = await import("./vendor/pyodide/pyodide.mjs");
  const py = await loadPyodide({
    indexURL: PYODIDE_URL,
    stdout: (line) => console.debug(line),
    stderr: (line) => console.warn(line),
  });
  const pyodideMs = performance.now() - started;
  await loadStepwell(py);
  const { makeTokenizer } = await import("./tokenizer.js");
  const module = py.pyimport("stepwell.page.frontend");
  const bootMs = performance.now() - started;

  const host = {
    browser: await browserName(),
    cross_origin_isolated: self.crossOriginIsolated === true,
    timer_resolution_us: timerResolution(),
    pyodide: py.version,
    boot_ms: bootMs,
    pyodide_ms: pyodideMs,
    flags: [],
    tuning: tuning ?? null,
  };
  const { Frontend } = module;
  frontend = Frontend(emit, JSON.stringify(host), makeTokenizer);
  Frontend.destroy();
  module.destroy();
  await frontend.open();
}

/** Install the package from the wheels beside the runtime. `loadPackage` resolves even when a download failed: look. */
async function loadStepwell(py) {
  const problems = [];
  await py.loadPackage("stepwell", {
    messageCallback: (line) => console.debug(line),
    errorCallback: (line) => problems.push(line),
  });
  if (!("stepwell" in py.loadedPackages)) {
    throw new Error(
      `The stepwell package was not installed from ${PYODIDE_URL}. ${problems.join(" ")} ` +
        "Build the site again with: python -m harness site",
    );
  }
}

function load({ model }) {
  const { file, ...description } = model;
  const text = JSON.stringify(description);
  if (model.kind === "file") return frontend.load_file(text, file);
  return model.kind === "synthetic" ? frontend.load_synthetic(text) : frontend.load_url(text);
}

/** Called from Python with the JSON text of a message. */
function emit(text) {
  const message = JSON.parse(text);
  if (message.type === FROM_WORKER.PHASE) phase = message.phase;
  self.postMessage(message);
}

function tell(name, text) {
  phase = name;
  self.postMessage({ type: FROM_WORKER.PHASE, phase: name, text });
}

/** What Python did not report itself: its own bugs, a dead runtime, a script that is missing. */
function fail(error) {
  console.error(error);
  const isPython = typeof error?.type === "string" && error.name === "PythonError";
  const text = String(error?.message ?? error).trim();
  self.postMessage({
    type: FROM_WORKER.ERROR,
    code: error?.pyodide_fatal_error ? "WorkerError" : isPython ? error.type : (error?.name ?? "Error"),
    message: isPython ? text.slice(text.lastIndexOf("\n") + 1) : text, // the last line of a traceback says it
    phase,
  });
}

/** "Chromium 156.0.1.2 on Linux", from client hints where the browser has them, else the user agent string. */
async function browserName() {
  const hints = navigator.userAgentData;
  if (!hints) return navigator.userAgent;
  const { fullVersionList = [], platform } = await hints.getHighEntropyValues(["fullVersionList"]);
  const real = fullVersionList.filter(({ brand }) => !/not.*brand/i.test(brand));
  const named = real.find(({ brand }) => brand !== "Chromium") ?? real[0];
  return named ? `${named.brand} ${named.version} on ${platform}` : navigator.userAgent;
}

/** The smallest step of `performance.now()`, in µs: 5 when the page is cross-origin isolated, 100 when it is not. */
function timerResolution() {
  let smallest = Infinity;
  const started = performance.now();
  for (let last = started, steps = 0; steps < 200 && last - started < 25;) {
    const now = performance.now();
    if (now > last) {
      smallest = Math.min(smallest, now - last);
      steps += 1;
      last = now;
    }
  }
  return Math.round(smallest * 1e4) / 10;
}
