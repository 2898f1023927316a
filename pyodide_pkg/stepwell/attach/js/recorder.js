import { OP } from "./event_log.js";
import { Recording } from "./recording.js";
import { eventsText, traceText } from "./trace_text.js";
import { costSizes, measureCreates } from "./costs.js";
import { summaryOf } from "./summary.js";

/**
 * An observer of `shims.js` (`before`, `after`) that changes nothing, and its recording: a trace, a summary, events.
 */
export class Recorder {
  before;
  after;
  #recording;
  #methods;

  /**
   * @param {{methods?: object, runtime?: string, limit?: number}} options `methods`: those of natives.js, below all
   *   shims; `runtime`: what is recorded, a label; `limit`: events that are kept
   */
  constructor({ methods, ...options } = {}) {
    this.#methods = methods;
    this.#recording = new Recording(options);
    Object.assign(this, hooksOf(this.#recording));
  }

  /** Note that a token ends and another begins; `cause`: "readback" or "mark". */
  boundary(cause) {
    this.#recording.boundary(cause);
  }

  /** A trace for `python -m stepwell.replay what-if`; `metadata` is added to its first line. */
  trace(metadata = {}) {
    return traceText(this.#recording, metadata);
  }

  /** Figures per token, live and peak bytes, the sizes that matter, and whether a pool would help. */
  summary() {
    return summaryOf(this.#recording);
  }

  /** The events of the log: JSON, one a line ("lines"), or for Chrome's trace viewer ("chrome"). */
  events(format = "lines") {
    return eventsText(this.#recording, format);
  }

  /**
   * Time what creating buffers of the recorded sizes takes, some seconds, best when the GPU is idle: on the recorded
   * device, or where that is gone (a runtime that released its last session) on a new one. Trace and summary have it
   * from then on.
   */
  async measureCosts(options = {}) {
    const devices = this.#recording.devices.filter(({ gone }) => !gone).map(({ ref }) => ref.deref());
    const recorded = devices.find((device) => device !== undefined);
    const device = recorded ?? (await newDevice());
    try {
      const sizes = costSizes(this.#recording);
      this.#recording.costs = await measureCreates(device, sizes, { methods: this.#methods, ...options });
    } finally {
      if (recorded === undefined) device.destroy();
    }
    return this.#recording.costs;
  }
}

async function newDevice() {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter();
  if (!adapter) throw new Error("measureCosts: the recorded device is gone, and there is no adapter for another one.");
  return adapter.requestDevice();
}

/** Functions by "Interface.method", for `shims.js` to call before and after the real ones. */
function hooksOf(recording) {
  const nothing = () => 0;
  const count =
    (op, value = nothing) =>
    (receiver, args) =>
      recording.did(op, value(args));
  const after = {
    "GPUDevice.createBuffer": (device, args, buffer) => recording.created(device, args[0], buffer),
    "GPUDevice.createBindGroup": count(OP.BIND_GROUP, (args) => args[0].entries?.length ?? 0),
    "GPUDevice.destroy": (device) => recording.deviceGone(device),
    "GPUBuffer.unmap": count(OP.UNMAP),
    "GPUQueue.submit": (queue, args) => recording.submitted(args[0]),
    "GPUQueue.writeBuffer": count(OP.UPLOAD, (args) => bytesWritten(args[2], args[3], args[4])),
    "GPUQueue.writeTexture": count(OP.UPLOAD, (args) => args[1]?.byteLength ?? 0),
    "GPUCommandEncoder.clearBuffer": count(OP.CLEAR, (args) => args[2] ?? args[0].size - (args[1] ?? 0)),
    "GPUCommandEncoder.copyBufferToBuffer": count(OP.COPY, bytesCopied),
    "GPUComputePassEncoder.dispatchWorkgroups": count(OP.DISPATCH, (args) => args[0] * (args[1] ?? 1) * (args[2] ?? 1)),
    "GPUComputePassEncoder.dispatchWorkgroupsIndirect": count(OP.DISPATCH),
  };
  for (const name of ["copyBufferToTexture", "copyTextureToBuffer", "copyTextureToTexture"]) {
    after[`GPUCommandEncoder.${name}`] = count(OP.COPY);
  }
  for (const name of ["beginComputePass", "beginRenderPass"]) after[`GPUCommandEncoder.${name}`] = count(OP.PASS);
  for (const name of ["draw", "drawIndexed", "drawIndirect", "drawIndexedIndirect", "executeBundles"]) {
    after[`GPURenderPassEncoder.${name}`] = count(OP.DRAW);
  }
  return {
    before: {
      "GPUDevice.createBuffer": () => recording.createBegins(),
      "GPUBuffer.destroy": (buffer) => recording.destroyed(buffer),
      "GPUBuffer.mapAsync": (buffer, args) => recording.mapped(buffer, args[0], args[1], args[2]),
    },
    after,
  };
}

/** Bytes that writeBuffer(buffer, offset, data, dataOffset, size) writes; the last two count elements of arrays. */
function bytesWritten(data, dataOffset = 0, size = undefined) {
  const unit = data?.BYTES_PER_ELEMENT ?? 1;
  return size === undefined ? Math.max(0, (data?.byteLength ?? 0) - dataOffset * unit) : size * unit;
}

/** copyBufferToBuffer(source, offset, target, offset, size), or (source, target, size). */
function bytesCopied(args) {
  if (typeof args[1] === "object") return args[2] ?? args[0].size;
  return args[4] ?? args[0].size - args[1];
}
