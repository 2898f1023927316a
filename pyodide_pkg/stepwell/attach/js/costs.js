import { OP, roleOf, unpackExtra } from "./event_log.js";
import { medianOf } from "./tokens.js";

const MIB = 1 << 20;
const USAGE = 0x8c; // STORAGE | COPY_SRC | COPY_DST
const BATCH = 16; // buffers that are created at once, and as many that are there and are used again
const BATCH_BYTES = 32 * MIB;
const BYTES = 192 * MIB; // of the buffers that are there
const SIZES = 5;
const LEAST_ROUNDS = 3;
const ROUNDS = 15;
const LONGEST_MS = 3000;

/**
 * The cost of creating a buffer on this GPU beyond using one that is there, which a pool saves. createBuffer returns at
 * once and the price comes with the first use, so both are timed to their end: some buffers created, cleared and
 * destroyed, and as many that exist cleared, each followed by a fence (a few bytes copied and mapped). In turns, medians of
 * the differences, and a line through the sizes: a µs, and b µs per MiB.
 *
 * About 3 s and 256 MiB at most. The GPU should be idle.
 *
 * @param {GPUDevice} device
 * @param {number[]} sizes bytes
 * @param {{methods?: object, now?: () => number, mostMs?: number}} options `methods`: those of natives.js by name,
 *   below all shims
 * @returns {Promise<{create_us: number, create_us_per_mib: number, rows: object[], source: string}>}
 */
export async function measureCreates(
  device,
  sizes,
  { methods, now = () => performance.now(), mostMs = LONGEST_MS } = {},
) {
  const call = methods ? (name, object, ...args) => methods[name].call(object, ...args) : callByName;
  const fence = { source: makeBuffer(device, call, 4, 0x4), staging: makeBuffer(device, call, 4, 0x9) };
  const subjects = sizes.map((bytes) => ({ bytes, kept: [], created: [], reused: [], failed: false }));
  const began = now();
  try {
    for (let round = 0; round <= ROUNDS; round += 1) {
      if (round > LEAST_ROUNDS && now() - began > mostMs) break;
      for (const subject of subjects) {
        if (!subject.failed) await measureRound(subject, device, fence, call, now, round > 0);
      }
    }
  } finally {
    for (const buffer of [...subjects.flatMap(({ kept }) => kept), fence.source, fence.staging])
      call("GPUBuffer.destroy", buffer);
  }
  const rows = subjects.filter(({ failed }) => !failed).map(costRow);
  if (!rows.length) throw new Error(`no buffers of ${sizes.join(", ")} B could be created: the GPU is out of memory.`);
  return { ...costLine(rows), rows, source: `measured for ${rows.map(({ bytes }) => mibText(bytes)).join(", ")} MiB` };
}

/** The sizes that matter among those a pool would serve: where the created bytes are, and what is created most often. */
export function costSizes(recording) {
  const counts = new Map();
  let inToken = false;
  recording.log.each((op, subject, value, extra) => {
    if (op === OP.BOUNDARY && !inToken) {
      inToken = true; // what set-up creates is not created again
      counts.clear();
    }
    if (op !== OP.CREATE) return;
    const { usage, mapped } = unpackExtra(extra);
    if (roleOf(usage, mapped, value) === 0) counts.set(value, (counts.get(value) ?? 0) + 1);
  });
  const sizes = [...counts].sort((a, b) => a[0] - b[0]);
  if (!sizes.length) return [64 << 10, MIB, 4 * MIB];
  const often = sizes.reduce((most, entry) => (entry[1] > most[1] ? entry : most))[0];
  const chosen = new Set([often]);
  const whole = sizes.reduce((sum, [bytes, count]) => sum + bytes * count, 0);
  let sum = 0;
  let share = 0.25;
  for (const [bytes, count] of sizes) {
    sum += bytes * count;
    while (sum >= share * whole && share <= 1) {
      chosen.add(bytes);
      share += 0.25;
    }
  }
  if (chosen.size === 1) chosen.add(Math.max(256, (often >> 4) << 2)); // a line needs two
  let there = 0;
  const affordable = [...chosen].sort((a, b) => a - b).filter((bytes) => (there += bytes * batchOf(bytes)) <= BYTES);
  return affordable.length ? affordable.slice(0, SIZES) : [BYTES >> 3, BYTES >> 1];
}

function callByName(name, object, ...args) {
  return object[name.split(".")[1]](...args);
}

function makeBuffer(device, call, size, usage) {
  return call("GPUDevice.createBuffer", device, { size, usage });
}

function batchOf(bytes) {
  return Math.max(1, Math.min(BATCH, Math.floor(BATCH_BYTES / bytes)));
}

async function measureRound(subject, device, fence, call, now, counts) {
  if (!subject.kept.length) {
    const { buffers, error } = createSome(subject.bytes, device, call);
    subject.kept = buffers;
    await clearAll(buffers, device, fence, call, false);
    if (await error) {
      subject.failed = true;
      return;
    }
  }
  const start = now();
  const { buffers, error } = createSome(subject.bytes, device, call);
  await clearAll(buffers, device, fence, call, true);
  const created = now();
  await clearAll(subject.kept, device, fence, call, false);
  const reused = now();
  if (await error) subject.failed = true;
  if (!counts || subject.failed) return; // the first round warms up
  subject.created.push(((created - start) * 1000) / buffers.length);
  subject.reused.push(((reused - created) * 1000) / buffers.length);
}

/** Create a batch in an error scope that holds nothing else: it is closed before other code can use the device. */
function createSome(bytes, device, call) {
  const buffers = [];
  call("GPUDevice.pushErrorScope", device, "out-of-memory");
  for (let i = batchOf(bytes); i > 0; i -= 1) buffers.push(makeBuffer(device, call, bytes, USAGE));
  return { buffers, error: call("GPUDevice.popErrorScope", device) };
}

/** Clear `buffers` and wait: twice, because a destroyed buffer is let go of after the first wait. */
async function clearAll(buffers, device, fence, call, andDestroy) {
  for (const part of [buffers, []]) {
    call("GPUDevice.pushErrorScope", device, "validation"); // of buffers for which there was no memory: known already
    const encoder = call("GPUDevice.createCommandEncoder", device);
    for (const buffer of part) call("GPUCommandEncoder.clearBuffer", encoder, buffer);
    call("GPUCommandEncoder.copyBufferToBuffer", encoder, fence.source, 0, fence.staging, 0, 4);
    call("GPUQueue.submit", device.queue, [call("GPUCommandEncoder.finish", encoder)]);
    if (andDestroy) for (const buffer of part) call("GPUBuffer.destroy", buffer);
    const ignored = call("GPUDevice.popErrorScope", device);
    await call("GPUBuffer.mapAsync", fence.staging, 1);
    call("GPUBuffer.unmap", fence.staging);
    await ignored;
  }
}

function costRow({ bytes, created, reused }) {
  return {
    bytes,
    rounds: created.length,
    create_us: medianOf(created),
    reuse_us: medianOf(reused),
    cost_us: medianOf(created.map((us, i) => us - reused[i])),
  };
}

/** Least squares of a + b * MiB, neither below 0. */
export function costLine(rows) {
  const count = rows.length;
  const x = rows.map(({ bytes }) => bytes / MIB);
  const y = rows.map((row) => Math.max(0, row.cost_us));
  const meanX = x.reduce((a, b) => a + b, 0) / count;
  const meanY = y.reduce((a, b) => a + b, 0) / count;
  const spread = x.reduce((sum, value) => sum + (value - meanX) ** 2, 0);
  let perMib = spread ? x.reduce((sum, value, i) => sum + (value - meanX) * (y[i] - meanY), 0) / spread : 0;
  perMib = Math.max(0, perMib);
  let create = meanY - perMib * meanX;
  if (create < 0) {
    create = 0;
    perMib = x.reduce((sum, value, i) => sum + value * y[i], 0) / x.reduce((sum, value) => sum + value * value, 0);
  }
  return { create_us: Math.round(create * 10) / 10, create_us_per_mib: Math.round(perMib * 10) / 10 };
}

function mibText(bytes) {
  return String(Number((bytes / MIB).toPrecision(3)));
}
