/** The interfaces whose methods can be wrapped. One that a browser does not have is left out. */
const INTERFACES = [
  "GPUDevice", "GPUQueue", "GPUBuffer", "GPUCommandEncoder", "GPUComputePassEncoder", "GPURenderPassEncoder",
  "GPURenderBundleEncoder", "GPUResourceTable",
];

/** Methods that return an object with methods of its own to wrap, and its interface. */
export const CREATES = {
  "GPUDevice.createBuffer": "GPUBuffer",
  "GPUDevice.createCommandEncoder": "GPUCommandEncoder",
  "GPUDevice.createRenderBundleEncoder": "GPURenderBundleEncoder",
  "GPUDevice.createResourceTable": "GPUResourceTable",
  "GPUCommandEncoder.beginComputePass": "GPUComputePassEncoder",
  "GPUCommandEncoder.beginRenderPass": "GPURenderPassEncoder",
};

/** A request that `attach` refuses: to attach twice, an option that makes no sense, a realm without WebGPU. */
export class AttachError extends Error {
  name = "AttachError";
}

/**
 * WebGPU as a realm (a window, a worker, a fake of a test) has it now.
 *
 * `prototypes` by interface; `methods` by "Interface.method", to call what is there now whatever is wrapped later:
 * `methods["GPUDevice.createBuffer"].call(device, descriptor)`.
 */
export class Natives {
  prototypes = {};
  methods = {};

  constructor(realm = globalThis) {
    for (const name of INTERFACES) {
      const prototype = realm[name]?.prototype;
      if (prototype === undefined) continue;
      this.prototypes[name] = prototype;
      for (const [method, { value }] of Object.entries(Object.getOwnPropertyDescriptors(prototype))) {
        if (typeof value === "function" && method !== "constructor") this.methods[`${name}.${method}`] = value;
      }
    }
    if (this.prototypes.GPUDevice === undefined) {
      throw new AttachError(
        "There is no WebGPU here (no GPUDevice). Attach in the page or worker where the runtime asks for its device.",
      );
    }
    Object.freeze(this.methods);
  }
}
