import { leaseOf, nativeOf } from "./alias.js";
import { beginEncoder, beginPass, deadUse, finishEncoder, noteBundle, noteGroup } from "./uses.js";
import { noteOnEncoder, noteOnPass, taint, usesOfGroup } from "./uses.js";

/**
 * The methods by which the pool serves the application: a layer for `Shims`.
 *
 * Whatever takes a buffer gets the native one in place of an alias, and what encoders use is noted (`uses.js`).
 *
 * @param {object} find
 * @param {(device: GPUDevice) => import("./pool.js").DevicePool | null} find.serve its pool, made if need be, or null
 * @param {(device: GPUDevice) => import("./pool.js").DevicePool | null} find.poolOf its pool, if there is one
 * @param {(queue: GPUQueue) => import("./pool.js").DevicePool | null} find.poolOfQueue
 * @param {() => void} find.onSubmit
 */
export function poolLayer({ serve, poolOf, poolOfQueue, onSubmit }) {
  const layer = {
    "GPUDevice.createBuffer": (below) => function (descriptor) {
      return serve(this)?.create(descriptor) ?? below.apply(this, arguments);
    },
    "GPUDevice.createBindGroup": (below) => function (descriptor) {
      const leases = [];
      const translated = translateGroup(descriptor, leases);
      if (leases.length === 0) return below.apply(this, arguments);
      const group = below.call(this, translated);
      noteGroup(group, leases);
      return group;
    },
    "GPUDevice.destroy": (below) => function () {
      below.apply(this, arguments);
      poolOf(this)?.lose();
    },
    "GPUDevice.popErrorScope": (below) => function () {
      const pool = poolOf(this);
      const popped = below.apply(this, arguments);
      return pool === null ? popped : popped.then((error) => {
        pool.noteError(error);
        return error;
      });
    },
    "GPUQueue.submit": (below) => submit(below, poolOfQueue, onSubmit),
    "GPUQueue.writeBuffer": writeBuffer,
    ...encoders(),
  };
  const bufferInObject = translating(translateHolder, noteOnEncoder);
  layer["GPUCommandEncoder.copyBufferToTexture"] = bufferInObject;
  layer["GPUCommandEncoder.copyTextureToBuffer"] = bufferInObject;
  for (const name of ["copyBufferToBuffer", "clearBuffer", "resolveQuerySet"]) {
    layer[`GPUCommandEncoder.${name}`] = translating(translateBuffer, noteOnEncoder);
  }
  const render = ["setIndexBuffer", "setVertexBuffer", "drawIndirect", "drawIndexedIndirect"];
  for (const name of render) layer[`GPURenderBundleEncoder.${name}`] = translating(translateBuffer, noteOnEncoder);
  for (const name of [...render, "multiDrawIndirect", "multiDrawIndexedIndirect"]) {
    layer[`GPURenderPassEncoder.${name}`] = translating(translateBuffer, noteOnPass);
  }
  layer["GPUComputePassEncoder.dispatchWorkgroupsIndirect"] = translating(translateBuffer, noteOnPass);
  for (const name of ["insert", "update"]) {
    layer[`GPUResourceTable.${name}`] = translating(translateResource, (table, lease) => taint(lease));
  }
  return layer;
}

function encoders() {
  const begins = (below) => function () {
    const encoder = below.apply(this, arguments);
    beginEncoder(encoder);
    return encoder;
  };
  const beginsPass = (below) => function () {
    const pass = below.apply(this, arguments);
    beginPass(this, pass);
    return pass;
  };
  const finishes = (below) => function () {
    const product = below.apply(this, arguments);
    finishEncoder(this, product);
    return product;
  };
  const bindsGroup = (note) => (below) => function (index, group) {
    below.apply(this, arguments);
    const leases = usesOfGroup(group);
    if (leases !== undefined) note(this, leases);
  };
  return {
    "GPUDevice.createCommandEncoder": begins,
    "GPUDevice.createRenderBundleEncoder": begins,
    "GPUCommandEncoder.beginComputePass": beginsPass,
    "GPUCommandEncoder.beginRenderPass": beginsPass,
    "GPUCommandEncoder.finish": finishes,
    "GPURenderBundleEncoder.finish": finishes,
    "GPUComputePassEncoder.setBindGroup": bindsGroup(noteOnPass),
    "GPURenderPassEncoder.setBindGroup": bindsGroup(noteOnPass),
    "GPURenderBundleEncoder.setBindGroup": bindsGroup(noteOnEncoder),
    "GPURenderPassEncoder.executeBundles": (below) => function (bundles) {
      below.apply(this, arguments);
      for (const bundle of bundles) noteBundle(this, bundle);
    },
  };
}

// ---- translation ----------------------------------------------------------------------------------------------------

/** A method with arguments that are, or hold, a buffer: `translate(argument, leases)`. Uses are noted if it returns. */
function translating(translate, note) {
  return (below) => function (...args) {
    const leases = [];
    for (let i = 0; i < args.length; i += 1) args[i] = translate(args[i], leases);
    const result = below.apply(this, args);
    for (const lease of leases) note(this, lease);
    return result;
  };
}

function translateBuffer(value, leases) {
  const lease = leaseOf(value);
  if (lease === null) return value;
  leases.push(lease);
  return nativeOf(lease);
}

/** {buffer, offset, …}: what a binding or a copy can say of it. Members may be inherited, so they are named. */
function translateHolder(value, leases) {
  const lease = leaseOf(value?.buffer);
  if (lease === null) return value;
  leases.push(lease);
  const { offset, size, bytesPerRow, rowsPerImage } = value;
  return { buffer: nativeOf(lease), offset, size, bytesPerRow, rowsPerImage };
}

/** A buffer, or {buffer, offset, size}. */
function translateResource(value, leases) {
  return leaseOf(value) === null ? translateHolder(value, leases) : translateBuffer(value, leases);
}

/** A descriptor of a bind group without aliases; itself, if it has none. */
function translateGroup(descriptor, leases) {
  const entries = descriptor?.entries;
  if (typeof entries?.[Symbol.iterator] !== "function") return descriptor; // the browser says what is wrong
  const list = Array.isArray(entries) ? entries : [...entries];
  const translated = [];
  for (const entry of list) {
    const resource = translateResource(entry?.resource, leases);
    translated.push(resource === entry?.resource ? entry : { ...entry, binding: entry.binding, resource });
  }
  if (leases.length === 0 && list === entries) return descriptor;
  return { ...descriptor, label: descriptor.label, layout: descriptor.layout, entries: translated };
}

// ---- the queue ------------------------------------------------------------------------------------------------------

function submit(below, poolOfQueue, onSubmit) {
  return function (commandBuffers) {
    if (typeof commandBuffers?.[Symbol.iterator] !== "function") return below.apply(this, arguments); // throws
    const pool = poolOfQueue(this);
    const list = [...commandBuffers];
    if (pool !== null) {
      const dead = firstDead(list);
      if (dead !== null && dead.pool.queue === this) list.push(dead.pool.tombstones.poison(dead));
      pool.submitting();
    }
    below.call(this, list);
    pool?.submitted();
    onSubmit();
  };
}

function firstDead(commandBuffers) {
  for (const commandBuffer of commandBuffers) {
    const dead = deadUse(commandBuffer);
    if (dead !== null) return dead;
  }
  return null;
}

function writeBuffer(below) {
  return function (buffer) {
    const lease = leaseOf(buffer);
    if (lease === null) return below.apply(this, arguments);
    const args = [...arguments];
    args[0] = nativeOf(lease);
    lease.pool.writing(lease, this, args[1], bytesWritten(args), () => below.apply(this, args));
  };
}

/** Offsets and sizes of writeBuffer count elements of typed arrays, bytes of everything else. */
function bytesWritten([, , data, dataOffset = 0, size]) {
  const unit = ArrayBuffer.isView(data) ? (data.BYTES_PER_ELEMENT ?? 1) : 1;
  return size === undefined ? (data?.byteLength ?? 0) - dataOffset * unit : size * unit;
}
