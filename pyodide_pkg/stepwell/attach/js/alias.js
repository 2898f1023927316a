/** A pooled buffer in the hands of the application: from createBuffer to destroy, then dead for good. */
export class Lease {
  dead = false;
  tainted = false; // used where uses cannot be followed: its native buffer is never handed out again
  tombstone = null;

  /** @param {object} pool @param {object} kept its native buffer, while it lives */
  constructor(pool, kept, size, usage, label) {
    this.pool = pool;
    this.kept = kept;
    this.size = size;
    this.usage = usage;
    this.label = label;
  }
}

/**
 * The object that the application has in place of a pooled GPUBuffer.
 *
 * Its prototype chain goes through GPUBuffer.prototype, so instanceof, Symbol.toStringTag and all that is there hold;
 * it has no properties of its own, as a GPUBuffer. A reference that is kept after destroy() stays that of a destroyed
 * buffer, also when another alias has the native buffer.
 */
class Alias {
  #lease;

  constructor(lease) {
    this.#lease = lease;
  }

  static leaseOf(value) {
    return typeof value === "object" && value !== null && #lease in value ? value.#lease : null;
  }

  get size() {
    return this.#lease.size;
  }

  get usage() {
    return this.#lease.usage;
  }

  get label() {
    return this.#lease.label;
  }

  set label(value) {
    const lease = this.#lease;
    lease.label = asLabel(value);
    if (lease.tombstone !== null) lease.tombstone.label = lease.label;
    if (!lease.dead) lease.kept.setLabel(lease.label);
  }

  get mapState() {
    const lease = this.#lease;
    return lease.dead ? "unmapped" : lease.kept.native.mapState;
  }

  /** A pooled buffer cannot be mapped: the browser says so. Its native is "pending" for a while: not to be reused. */
  mapAsync(...args) {
    const lease = this.#lease;
    lease.tainted = true;
    return lease.pool.native["GPUBuffer.mapAsync"].apply(nativeOf(lease), args);
  }

  getMappedRange(...args) {
    return this.#lease.pool.native["GPUBuffer.getMappedRange"].apply(nativeOf(this.#lease), args);
  }

  unmap() {
    this.#lease.pool.native["GPUBuffer.unmap"].call(nativeOf(this.#lease));
  }

  destroy() {
    const lease = this.#lease;
    if (lease.dead) return;
    lease.dead = true;
    lease.pool.release(lease);
  }
}

delete Alias.prototype.constructor; // it is GPUBuffer's
for (const [name, descriptor] of Object.entries(Object.getOwnPropertyDescriptors(Alias.prototype))) {
  Object.defineProperty(Alias.prototype, name, { ...descriptor, enumerable: true }); // as WebIDL has them
}

/** The lease of what an application passes as a buffer; null if that is no pooled buffer. */
export const leaseOf = Alias.leaseOf;

/** Methods that an application finds on an alias: the shims that observe GPUBuffer's go there, too. */
export const aliasPrototype = Alias.prototype;

/** A new alias; `bufferPrototype` is GPUBuffer.prototype of the realm. */
export function makeAlias(lease, bufferPrototype) {
  if (Object.getPrototypeOf(aliasPrototype) !== bufferPrototype) Object.setPrototypeOf(aliasPrototype, bufferPrototype);
  return new Alias(lease);
}

/** A label as WebIDL reads it (a USVString). */
export function asLabel(value) {
  return `${value}`.toWellFormed();
}

/**
 * The native buffer to give to WebGPU in place of an alias. For a dead one: a destroyed buffer of the same size, usage
 * and label, so that errors are the browser's own.
 */
export function nativeOf(lease) {
  if (!lease.dead) return lease.kept.native;
  lease.tombstone ??= lease.pool.tombstoneOf(lease);
  return lease.tombstone;
}
