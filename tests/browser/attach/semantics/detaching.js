import { EagerKeeper } from "../../../support/eager_keeper.js";
import { Bench, DATA, SIZE } from "./bench.js";

/** Every property descriptor of every WebGPU interface, in order. */
function interfaces() {
  const names = Object.getOwnPropertyNames(globalThis).filter((name) => name.startsWith("GPU"));
  const owners = names.flatMap((name) => [globalThis[name], globalThis[name].prototype]).filter(Boolean);
  const properties = (owner) => Reflect.ownKeys(owner).map((key) => [key, Object.getOwnPropertyDescriptor(owner, key)]);
  return owners.map((owner) => [owner, properties(owner)]);
}

/** Names of what is not as it was. */
function changes(before, after) {
  const found = [];
  before.forEach(([owner, properties], index) => {
    const now = after[index][1];
    if (now.length !== properties.length) found.push(`${String(owner)}: ${now.length} properties`);
    properties.forEach(([key, descriptor], place) => {
      const [keyNow, descriptorNow] = now[place] ?? [];
      const same = (field) => descriptor[field] === descriptorNow[field];
      if (key !== keyNow || !Object.keys(descriptor).every(same)) found.push(`${String(owner)}.${String(key)}`);
    });
  });
  return found;
}

/** Counts what really is created and destroyed, below whatever is attached. */
class Count {
  created = 0;
  destroyed = 0;

  constructor() {
    const count = this;
    const { createBuffer } = GPUDevice.prototype;
    const { destroy } = GPUBuffer.prototype;
    const alive = new Set();
    GPUDevice.prototype.createBuffer = function (descriptor) {
      const buffer = createBuffer.call(this, descriptor);
      count.created += 1;
      alive.add(buffer);
      return buffer;
    };
    GPUBuffer.prototype.destroy = function () {
      if (alive.delete(this)) count.destroyed += 1;
      return destroy.call(this);
    };
    this.stop = () => {
      GPUDevice.prototype.createBuffer = createBuffer;
      GPUBuffer.prototype.destroy = destroy;
    };
  }

  get alive() {
    return this.created - this.destroyed;
  }
}

const keeper = () => new EagerKeeper();
const open = async () => new Bench(await (await navigator.gpu.requestAdapter()).requestDevice());

globalThis.detaching = {
  /** What attach() changes, and what is left of it after detach(): twice, also with a recorder. */
  async prototypes() {
    const before = interfaces();
    const rounds = [];
    for (const options of [{ keeper }, { keeper, record: true }, { record: true }]) {
      const attachment = stepwell.attach(options);
      const during = changes(before, interfaces()).length;
      const t = await open();
      const b = await t.second();
      attachment.detach();
      attachment.detach();
      rounds.push([during > 0, changes(before, interfaces()), b instanceof GPUBuffer]);
      b.destroy();
      rounds.at(-1).push(Object.getPrototypeOf(t.device) === GPUDevice.prototype);
      rounds.at(-1).push(Object.getPrototypeOf(t.queue) === GPUQueue.prototype);
      t.device.destroy();
    }
    return rounds;
  },

  /** Native buffers that are left when the pool has gone: while it is on, after detach(), after the last destroy(). */
  async memory(alone) {
    const count = new Count();
    const t = await open();
    const attachment = stepwell.attach({ keeper, target: alone ? t.device : undefined });
    const live = [];
    for (let i = 0; i < 3; i += 1) {
      await t.leave(4);
      live.push(t.create());
    }
    await t.settle();
    const seen = [count.alive];
    attachment.detach();
    seen.push(count.alive);
    const words = [];
    for (const b of live) words.push((await t.read(b))[0]); // still served, by the device's own objects
    for (const b of live) b.destroy();
    seen.push(count.alive);
    count.stop();
    const prototypes = [t.device, t.queue].map((object) => Object.getPrototypeOf(object).constructor.name);
    const left = [t.device, t.queue].map((object) => Object.hasOwn(Object.getPrototypeOf(object), "label"));
    t.device.destroy();
    return { seen, words, prototypes, left };
  },

  /** An encoder that is open while detach() comes, and one while attach() comes. */
  async inTheMiddle() {
    const t = await open();
    const before = t.device.createCommandEncoder();
    const early = t.create(); // the browser's own, and stays so
    const attachment = stepwell.attach({ keeper });
    const [b, c] = [await t.second(), t.create()];
    t.queue.writeBuffer(b, 0, new Uint32Array(SIZE / 4).fill(5));
    before.copyBufferToBuffer(b, 0, early, 0, 16);
    before.copyBufferToBuffer(early, 0, c, 0, 16);
    const encoder = t.device.createCommandEncoder();
    const pipeline = t.pipeline("@group(0) @binding(0) var<storage, read_write> x: array<u32>;" +
      "@compute @workgroup_size(1) fn main() { x[1] += 1; }");
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    attachment.detach();
    const errors = await t.errors(() => {
      pass.setBindGroup(0, t.group(pipeline, { buffer: b }));
      pass.dispatchWorkgroups(1);
      pass.end();
      encoder.copyBufferToBuffer(b, 4, c, 8, 4);
      t.queue.submit([before.finish(), encoder.finish()]);
    });
    const words = (await t.read(c, 16));
    const again = stepwell.attach({ keeper }); // what is left of the first pool lives on under the second
    const d = t.create();
    errors.push(...await t.errors(() => t.submit((e) => e.copyBufferToBuffer(b, 0, d, 0, 8))));
    words.push(...await t.read(d, 8));
    again.detach();
    words.push(...await t.read(b, 8), ...await t.read(d, 8));
    for (const buffer of [b, c, d, early]) buffer.destroy();
    errors.push(...await t.errors(() => t.submit((e) => e.clearBuffer(t.create()))));
    const restored = Object.getPrototypeOf(t.device) === GPUDevice.prototype;
    t.device.destroy();
    return { errors: errors.filter(Boolean), words, restored };
  },

  /** attach() while attached, wrong options. */
  mistakes() {
    const attachment = stepwell.attach({ policy: "simple" });
    const messages = [];
    const wrong = [{}, { zero: "sometimes" }, { polcy: "simple" }, { target: 5 }, { target: document }];
    for (const options of [...wrong, { policy: "none such" }]) {
      try {
        stepwell.attach(options).detach();
        messages.push(null);
      } catch (error) {
        messages.push(`${error.name}: ${error.message}`);
      }
      attachment.detach();
    }
    return [messages, GPUDevice.prototype.createBuffer.toString().includes("native code")];
  },
};
