// What the tests of attach under onnxruntime-web do in a page: each function is one scenario and gives JSON.

import { Arm, attach } from "./attach/arm.js";
import { countBuffers } from "./attach/count.js";
import { Decoder, loadRuntime } from "./attach/ort.js";

const PATIENCE_MS = 120_000;

/** Scenario `name`, in a module worker. */
export async function inWorker({ name, options }) {
  const source = `import * as scenarios from ${JSON.stringify(import.meta.url)};
    onmessage = async ({ data: [name, options] }) => postMessage(await scenarios[name](options));`;
  const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })), { type: "module" });
  try {
    return await new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => resolve(data);
      worker.onerror = ({ message }) => reject(new Error(message || "the worker did not start"));
      worker.postMessage([name, options]);
    });
  } finally {
    worker.terminate();
  }
}

/** `ways`: options of Arm.open(), one run after another in this page. */
export async function runs({ ways }) {
  const found = [];
  for (const way of ways) {
    const arm = await Arm.open(way);
    const steps = [];
    for (let index = 0; index < way.steps; index++) steps.push(await arm.next());
    const trace = arm.attachment?.trace?.() ?? null;
    found.push({ steps, trace, ...(await arm.finish()) });
  }
  return found;
}

/**
 * Sessions one after another under one attachment, while a small one keeps the device: the bytes there are after each is
 * released and the pool has nothing to do for `rest` ms, and after detach.
 */
export async function cycles({ attach: options, count, rest, ...decoding }) {
  const counter = countBuffers();
  const attachment = await attach(options);
  const ort = await loadRuntime();
  const small = await Decoder.open(ort, { model: "gqa" });
  const left = [];
  const digests = [];
  for (let cycle = 0; cycle < count; cycle++) {
    const decoder = await Decoder.open(ort, decoding);
    digests.push(await digestsOf(decoder, decoding.steps));
    await decoder.close();
    left.push(counter.now().live_bytes);
  }
  const { peak_bytes } = counter.now();
  await new Promise((resolve) => setTimeout(resolve, rest));
  const rested = counter.now().live_bytes;
  const stats = attachment.stats();
  attachment.detach();
  const detached = counter.now().live_bytes;
  await small.close();
  return { left, digests, peak_bytes, rested, stats, detached, at_the_end: counter.now().live_bytes };
}

/** Two sessions whose steps come in turns. */
export async function pair({ attach: options, decodings, steps }) {
  const counter = countBuffers();
  const attachment = options && (await attach(options));
  const ort = await loadRuntime();
  const decoders = [];
  for (const decoding of decodings) decoders.push(await Decoder.open(ort, decoding));
  const digests = decoders.map(() => []);
  for (let step = 0; step < steps; step++) {
    for (const [index, decoder] of decoders.entries()) digests[index].push(checked(await decoder.next()));
  }
  for (const [index, decoder] of decoders.entries()) {
    digests[index].push(await decoder.digest());
    await decoder.close();
  }
  attachment?.detach();
  return { digests, at_the_end: counter.now().live_bytes };
}

/** Attached at step `from`, detached at step `to` of a session that began before and ends after. */
export async function between({ attach: options, from, to, ...decoding }) {
  const counter = countBuffers();
  const decoder = await Decoder.open(await loadRuntime(), decoding);
  const steps = [];
  let attachment;
  for (let step = 0; step < decoding.steps; step++) {
    if (step === from) attachment = await attach(options);
    if (step === to) attachment.detach();
    const before = counter.now().created;
    const digest = checked(await decoder.next());
    steps.push({ digest, created: counter.now().created - before });
  }
  const digest = await decoder.digest();
  await decoder.close();
  return { steps, digest, at_the_end: counter.now().live_bytes };
}

/**
 * The `nth` buffer of K or V that step `at` creates is one that there is no memory for, below anything attached.  What a
 * step came to is its digest, or the text of its error; `others` are two sessions after that.
 */
export async function shortOfMemory({ attach: options, at, nth, ...decoding }) {
  const failing = failNextCreate();
  const counter = countBuffers();
  const attachment = options && (await attach(options));
  const ort = await loadRuntime();
  const decoder = await Decoder.open(ort, decoding);
  const outcomes = [];
  for (let step = 0; step < decoding.steps; step++) {
    if (step === at) failing.arm(nth, decoder.positions * 2048);
    outcomes.push(await outcome(() => decoder.next()));
    failing.disarm();
  }
  const closed = await outcome(() => decoder.close());
  const left = [];
  const others = [];
  for (let index = 0; index < 2; index++) {
    const other = await Decoder.open(ort, decoding);
    others.push(await digestsOf(other, 3));
    await other.close();
    left.push(counter.now().live_bytes);
  }
  attachment?.detach();
  return { outcomes, closed, failed: failing.failed, others, left, at_the_end: counter.now().live_bytes };
}

/** The device is destroyed before step `at`, the last: a further one never returns from the runtime, attached or not. */
export async function losing({ attach: options, at, ...decoding }) {
  const counter = countBuffers();
  const attachment = options && (await attach(options));
  const decoder = await Decoder.open(await loadRuntime(), decoding);
  const outcomes = [];
  for (let step = 0; step <= at; step++) {
    if (step === at) decoder.device.destroy();
    outcomes.push(await outcome(() => decoder.next()));
  }
  await decoder.device.lost;
  const stats = attachment?.stats() ?? null;
  attachment?.detach();
  return { outcomes, stats };
}

async function digestsOf(decoder, steps) {
  const digests = [];
  for (let step = 0; step < steps; step++) digests.push(checked(await decoder.next()));
  return digests;
}

function checked({ digest, wrong, positions }) {
  if (wrong) throw new Error(`${wrong} values of position ${positions} are wrong`);
  return digest;
}

async function outcome(work) {
  const late = new Promise((_, reject) => {
    setTimeout(() => reject(new Error("no answer")), PATIENCE_MS);
  });
  try {
    const found = await Promise.race([work(), late]);
    return found === undefined ? "done" : checked(found);
  } catch (error) {
    return `${error.name}: ${error.message}`.slice(0, 300);
  }
}

/** createBuffer, wrapped so that one buffer that will be asked for is as large as no device has memory for. */
function failNextCreate() {
  const { createBuffer } = GPUDevice.prototype;
  const state = { failed: 0, left: 0, least: Infinity };
  GPUDevice.prototype.createBuffer = function (descriptor) {
    const { size, usage } = descriptor;
    if (size >= state.least && usage & GPUBufferUsage.STORAGE && --state.left === 0) {
      state.failed += 1;
      return createBuffer.call(this, { ...descriptor, size: this.limits.maxBufferSize });
    }
    return createBuffer.call(this, descriptor);
  };
  return Object.assign(state, {
    arm: (nth, least) => Object.assign(state, { left: nth, least }),
    disarm: () => Object.assign(state, { least: Infinity }),
  });
}
