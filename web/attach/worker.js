/**
 * Runs onnxruntime-web with and without stepwell attached, in one worker and on one device, an arm after the other.
 *
 * In: `{type: "run", request, turns}` with turns `[{arm, round}]`, `{type: "stop"}`. Out: `ready {adapter, limits, software,
 * policies}`, `turn {arm, round}`, `step {arm, round, index, positions, ms, created, live_bytes, wrong}`, `turned {arm, round, steps,
 * peak_bytes, digest}`, `costs`, `trace {text, conclusion}`, `done {stopped}`, `error {code, message}`.
 */
import "../stepwell-attach.js"; // before the runtime: it sets globalThis.stepwell
import { CONTROL, RECORDED, WITHOUT } from "./arms.js";
import { countBuffers } from "./count.js";
import { Decoder, loadRuntime } from "./ort.js";

const SOFTWARE = /swiftshader|llvmpipe|lavapipe|softpipe|software|basic render/i;
const tell = (type, fields) => self.postMessage({ type, ...fields });

let stopped = false;
let ort = null;
let counter = null;

const handlers = {
  async run({ request, turns }) {
    stopped = false;
    counter ??= countBuffers(); // under all that is attached later: it sees what the browser is really asked for
    ort ??= await loadRuntime();
    for (const turn of turns) {
      if (stopped) break;
      tell("turn", turn);
      await play(turn, request);
    }
    tell("done", { stopped });
  },
  stop() {
    stopped = true;
  },
};

/** One arm's steps. What it attached is detached at the end, whatever comes. */
async function play({ arm, round }, { model, start, steps, attach }) {
  const choices = { [CONTROL]: null, [WITHOUT]: null, [RECORDED]: { record: true, runtime: "onnxruntime-web" } }[arm];
  const chosen = choices === undefined ? attach : choices;
  const attachment = chosen && stepwell.attach(chosen);
  let decoder = null;
  try {
    counter.rewind();
    decoder = await Decoder.open(ort, { model, start, steps, kv: arm === CONTROL ? "static" : "grow" });
    let taken = 0;
    while (taken < steps && !stopped) {
      const before = counter.now();
      const { ms, positions, wrong } = await decoder.next();
      const { created, live_bytes } = counter.now();
      tell("step", { arm, round, index: taken, positions, ms, created: created - before.created, live_bytes, wrong });
      taken += 1;
    }
    const { peak_bytes } = counter.now();
    tell("turned", { arm, round, steps: taken, peak_bytes, digest: taken === steps ? await decoder.digest() : null });
    if (arm === RECORDED) {
      tell("costs");
      await attachment.measureCosts();
      tell("trace", { text: attachment.trace({ model }), conclusion: attachment.summary().conclusion });
    }
  } finally {
    await decoder?.close();
    attachment?.detach();
  }
}

async function describe() {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) return tell("error", { code: "NoWebGPU", message: "The browser gave this page no GPU adapter." });
  const { vendor, architecture, description, isFallbackAdapter = false } = adapter.info;
  const names = [vendor, architecture, description];
  const limits = Object.fromEntries(
    ["maxBufferSize", "maxStorageBufferBindingSize"].map((name) => [name, adapter.limits[name]]),
  );
  const software = isFallbackAdapter || names.some((name) => SOFTWARE.test(name));
  tell("ready", { adapter: { vendor, architecture, description }, limits, software, policies: stepwell.policies });
}

self.addEventListener("message", async ({ data }) => {
  try {
    await handlers[data.type](data);
  } catch (error) {
    fail(error);
  }
});
self.addEventListener("unhandledrejection", (event) => fail(event.reason));

function fail(error) {
  console.error(error);
  tell("error", { code: error?.name ?? "Error", message: String(error?.message ?? error) });
}

describe().catch(fail);
