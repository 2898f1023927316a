import { element } from "./dom.js";
import { number } from "./format.js";
import { FROM_WORKER, ON_PAGE } from "./messages.js";

/** What to do about an error whose message cannot know it, by code. */
const NEXT_STEPS = {
  DeviceLost:
    "Everything on the GPU is gone. Press Restart; the runs on this page stay. If it happens again, use less context or the policy “adaptive”.",
  OutOfMemory:
    "Use less context, the KV mode “static” or the policy “adaptive”, and close other tabs that use the GPU.",
  NoModuleWorkers: "Use a browser that runs module workers: Chrome or Edge 80, Firefox 114, Safari 15 or newer.",
  WorkerError:
    "Reload the page. If it stays: build the site again (python -m harness site) and serve it (python -m harness serve).",
};

/** Errors after which the worker cannot be used any more. */
const FATAL_CODES = new Set(["DeviceLost", "WorkerError"]);
const FATAL_PHASES = new Set(["runtime", "device"]);

export function isFatal({ code, phase }) {
  return FATAL_CODES.has(code) || FATAL_PHASES.has(phase);
}

/** The strips under the header: what is wrong and what to do, and what keeps numbers from meaning what they seem to. */
export function mountNotices(root, bus) {
  const alarm = element("div", { role: "alert" });
  const standing = element("div");
  root.replaceChildren(alarm, standing);

  bus.on(FROM_WORKER.ERROR, (error) => {
    const notice = error.code === "NoWebGPU" ? noWebGpu(error.message) : errorNotice(error, bus);
    alarm.replaceChildren(notice);
    notice.focus();
  });
  bus.on(ON_PAGE.STATE, ({ state, previous }) => {
    if (state !== "error" && previous === "error") alarm.replaceChildren();
  });
  bus.on(ON_PAGE.WARNING, ({ text }) => standing.append(strip("warn", element("p", { role: "status" }, text), true)));
  bus.on(FROM_WORKER.ENVIRONMENT, ({ environment }) => {
    for (const strip of standing.querySelectorAll(".lasting")) strip.remove();
    standing.prepend(...caveats(environment).map((text) => strip("warn lasting", element("p", {}, text))));
  });
}

function caveats({ adapter, cross_origin_isolated: isolated, timer_resolution_us: step }) {
  return [
    adapter.is_software
      ? "This adapter computes on the CPU. Answers and counters are real; timings of a CPU adapter say nothing about a GPU."
      : null,
    isolated
      ? null
      : `This page is not cross-origin isolated: the timer moves in steps of ${number(step)} µs, and every time below carries that error. ` +
        "Serve it with COOP and COEP headers for finer ones (python -m harness serve does).",
  ].filter(Boolean);
}

function errorNotice({ code, message, phase }, bus) {
  const fatal = isFatal({ code, phase });
  const next = NEXT_STEPS[code] ?? (phase === "runtime" ? NEXT_STEPS.WorkerError : null);
  const restart = element("button", { type: "button" }, "Restart");
  restart.addEventListener("click", () => bus.emit({ type: ON_PAGE.RESTART }));
  return strip(
    "error",
    element(
      "div",
      {},
      element("h2", {}, `${code} while ${doing(phase)}`),
      element("p", {}, message),
      next ? element("p", {}, next) : null,
      fatal ? restart : null,
    ),
  );
}

function doing(phase) {
  const words = {
    runtime: "starting Python",
    device: "opening the GPU",
    weights: "loading the model",
    kernels: "compiling kernels",
    ready: "preparing the run",
    prefill: "reading the prompt",
    decode: "decoding",
    "what-if": "replaying the trace",
  };
  return words[phase] ?? phase;
}

/** The page without a GPU: what is missing, and what to do on this machine. */
export function noWebGpu(detail) {
  const steps = isSecureContext
    ? [
        "Use a current Chrome or Edge (113 or newer), Safari 26 or Firefox 141 and newer where they support your system.",
        "On Linux start Chrome with --enable-unsafe-webgpu --enable-features=Vulkan, or allow it in chrome://flags/#enable-unsafe-webgpu.",
        "Look at chrome://gpu: “WebGPU” must not read “Disabled”. Hardware acceleration has to be on in the browser's settings, and the driver up to date.",
        "Without a GPU, a CPU adapter shows that everything works: start Chrome with --enable-unsafe-webgpu --use-webgpu-adapter=swiftshader.",
      ]
    : [
        "WebGPU exists only in a secure context. Open this page over https, or from this machine at http://127.0.0.1 (python -m harness serve).",
      ];
  return strip(
    "error",
    element(
      "div",
      {},
      element("h2", {}, "No WebGPU here, so nothing can be decoded on this page yet"),
      detail ? element("p", {}, detail) : null,
      element("ul", {}, ...steps.map((text) => element("li", {}, text))),
      element("p", {}, "Then reload this page."),
    ),
  );
}

function strip(kind, content, closable = false) {
  const node = element("section", { className: `notice ${kind}`, tabIndex: -1 }, content);
  if (closable) {
    const close = element("button", { type: "button", className: "small" }, "Dismiss");
    close.addEventListener("click", () => node.remove());
    node.append(close);
  }
  return node;
}
