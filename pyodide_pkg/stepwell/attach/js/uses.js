/**
 * The pooled buffers that each command buffer uses. WebGPU refuses a submit whose commands use a destroyed buffer; that an
 * alias was destroyed the browser cannot know, because its native buffer may live on.
 *
 * A *use* is a lease, or the array of leases of a bind group: that is noted as a whole, so that setBindGroup, which
 * runtimes call hundreds of times per token, costs two look-ups.
 */

/** Encoders that are open and known, so that detach() can go on serving them; beyond these the oldest are forgotten. */
const MOST_OPEN = 1024;

/** The commands of a command encoder and its passes, or of a bundle encoder, while they are encoded. */
class Recording {
  uses = [];
  pass = null; // the last one begun

  constructor(encoder) {
    this.encoder = encoder;
  }
}

const recordings = new WeakMap(); // encoders and passes → Recording
const finished = new WeakMap(); // command buffers and bundles → uses
const groups = new WeakMap(); // bind groups → leases
const open = new Set();

/** Note that an encoder begins, or is seen for the first time. */
export function beginEncoder(encoder) {
  const recording = new Recording(encoder);
  recordings.set(encoder, recording);
  if (open.size >= MOST_OPEN) open.delete(open.values().next().value);
  open.add(recording);
  return recording;
}

export function beginPass(encoder, pass) {
  const recording = recordings.get(encoder) ?? beginEncoder(encoder);
  recording.pass = pass;
  recordings.set(pass, recording);
}

/** Note that a command buffer or bundle has the uses of its encoder. */
export function finishEncoder(encoder, product) {
  const recording = recordings.get(encoder);
  if (recording === undefined) return;
  open.delete(recording);
  if (recording.uses.length > 0) finished.set(product, recording.uses);
}

/** Note that a bind group has pooled buffers. */
export function noteGroup(group, leases) {
  groups.set(group, leases);
}

/** The leases of a bind group; undefined if it has none. */
export function usesOfGroup(group) {
  return groups.get(group);
}

/** Note that an encoder uses pooled buffers. */
export function noteOnEncoder(encoder, use) {
  add((recordings.get(encoder) ?? beginEncoder(encoder)).uses, use);
}

/** Note that a pass uses pooled buffers. If it began before the shims, its encoder is unknown: they are tainted. */
export function noteOnPass(pass, use) {
  const recording = recordings.get(pass);
  if (recording === undefined) taint(use);
  else add(recording.uses, use);
}

/** Note that a pass executes a bundle. */
export function noteBundle(pass, bundle) {
  for (const use of finished.get(bundle) ?? []) noteOnPass(pass, use);
}

/** Taint the leases of `use`: their native buffers are never handed out again. */
export function taint(use) {
  for (const lease of Array.isArray(use) ? use : [use]) lease.tainted = true;
}

/** A lease that a command buffer uses and that is dead; null if there is none. */
export function deadUse(commandBuffer) {
  const uses = finished.get(commandBuffer);
  if (uses === undefined) return null;
  for (const use of uses) {
    if (!Array.isArray(use)) {
      if (use.dead) return use;
      continue;
    }
    for (const lease of use) if (lease.dead) return lease;
  }
  return null;
}

/** Encoders and passes that are open: [object, interface]. */
export function openEncoders() {
  return [...open].flatMap(({ encoder, pass }) => (pass === null ? [encoder] : [encoder, pass]));
}

function add(uses, use) {
  if (uses[uses.length - 1] !== use) uses.push(use);
}
