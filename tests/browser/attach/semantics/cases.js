// What an application can see of WebGPU, as JSON: {reuses: buffers that a pool must have handed out again, run}.
import { ALL, Bench, COPY_DST, COPY_SRC, DATA, LENGTHS, MAP_READ, MAP_WRITE, SIZE, TOUCH } from "./bench.js";
import { rejected, thrown } from "./bench.js";
import { bundle, rendering } from "./uses.js";

export const CASES = {
  "zero/read back": { reuses: 1, run: async (t) => t.read(await t.second()) },
  "zero/many at once": { reuses: 5, run: async (t) => {
    await t.leave(5);
    const buffers = Array.from({ length: 5 }, () => t.create());
    const words = [];
    for (const b of buffers) words.push(await t.read(b));
    return words;
  } },
  "zero/seen by a kernel": { reuses: 1, run: async (t) => {
    const pipeline = t.pipeline(LENGTHS);
    const [x, y] = [await t.second(), t.create()];
    t.submit((e) => t.dispatch(e, pipeline, t.group(pipeline, { buffer: x }, { buffer: y })));
    return t.read(y, 16);
  } },
  "zero/encoded before the buffer is asked for": { reuses: 1, run: async (t) => {
    await t.leave();
    const target = t.create(MAP_READ | COPY_DST);
    const encoder = t.device.createCommandEncoder();
    encoder.copyBufferToBuffer(t.create(), 0, target, 0, SIZE);
    t.queue.submit([encoder.finish()]);
    await target.mapAsync(1);
    return [...new Uint32Array(target.getMappedRange())];
  } },
  "zero/written in part": { reuses: 1, run: async (t) => {
    const b = await t.second();
    t.queue.writeBuffer(b, 8, new Uint32Array([1, 2]));
    return t.read(b);
  } },
  "zero/written as a whole": { reuses: 1, run: async (t) => {
    const b = await t.second();
    t.queue.writeBuffer(b, 0, new Uint32Array(SIZE / 4).fill(3));
    return t.read(b);
  } },
  "zero/written as a whole by elements": { reuses: 1, run: async (t) => {
    const b = await t.second();
    t.queue.writeBuffer(b, 0, new Uint16Array(200).fill(5), 72);
    const c = await t.second(DATA, 64);
    t.queue.writeBuffer(c, 0, new Uint16Array(200).fill(5), 2, 32);
    const d = await t.second(DATA, 32);
    t.queue.writeBuffer(d, 0, new ArrayBuffer(64), 8, 32);
    const f = await t.second(DATA, 16);
    t.queue.writeBuffer(f, 0, new DataView(new ArrayBuffer(24)), 8);
    return [await t.read(b), await t.read(c), await t.read(d), await t.read(f)];
  } },
  "zero/written in part by elements": { reuses: 1, run: async (t) => {
    const b = await t.second();
    t.queue.writeBuffer(b, 0, new Uint16Array(SIZE).fill(5), SIZE / 2 + 2);
    return t.read(b);
  } },
  "zero/a write that throws": { reuses: 1, run: async (t) => {
    const b = await t.second();
    const name = thrown(() => t.queue.writeBuffer(b, 0, new Uint32Array(4), 0, SIZE / 4));
    return [name, await t.read(b)];
  } },
  "zero/a write that is refused": { reuses: 1, run: async (t) => {
    const b = await t.second();
    const errors = await t.errors(() => t.queue.writeBuffer(b, 4, new Uint32Array(SIZE / 4).fill(3)));
    return [errors, await t.read(b)];
  } },
  "zero/a submit that is refused": { reuses: 2, run: async (t) => {
    await t.leave(2);
    const [b, gone] = [t.create(), t.create()];
    const commands = t.encode((e) => { e.copyBufferToBuffer(b, 0, gone, 0, 16); });
    gone.destroy();
    const errors = await t.errors(() => t.queue.submit([commands]));
    return [errors, await t.read(b)];
  } },
  "zero/destroyed before it was cleared": { reuses: 2, run: async (t) => {
    (await t.second()).destroy();
    return t.read(t.create());
  } },

  "attributes/of a buffer": { reuses: 1, run: async (t) => {
    const b = await t.second(DATA, SIZE, "name");
    const keys = [];
    for (const key in b) keys.push(key);
    return [
      b.size, b.usage, b.label, b.mapState, b instanceof GPUBuffer, b.constructor === GPUBuffer, String(b),
      b[Symbol.toStringTag], Reflect.ownKeys(b), keys.sort(), JSON.stringify(b), typeof b.destroy, "usage" in b,
    ];
  } },
  "attributes/are read only": { reuses: 1, run: async (t) => {
    const b = await t.second();
    return ["size", "usage", "mapState"].map((name) => thrown(() => { b[name] = 1; }).split(":")[0]).concat([b.size]);
  } },
  "attributes/labels": { reuses: 5, run: async (t) => {
    const labels = [];
    for (const label of [undefined, "", "x", null, 5, "\ud800", "x"]) {
      await t.leave();
      const b = t.device.createBuffer({ size: SIZE, usage: DATA, label });
      labels.push(b.label);
      b.label = `${label}!`;
      labels.push(b.label);
      b.destroy();
      b.label = "after";
      labels.push(b.label);
    }
    return labels;
  } },
  "attributes/no label is nobody else's": { reuses: 1, run: async (t) => {
    await t.leave();
    return t.device.createBuffer({ size: SIZE, usage: DATA }).label;
  } },
  "attributes/a label in an error": { reuses: 1, run: async (t) => {
    const b = await t.second(DATA, SIZE, "mine");
    return t.errors(() => t.queue.writeBuffer(b, 2, new Uint32Array(1)));
  } },
  "attributes/after destroy": { reuses: 1, run: async (t) => {
    const b = await t.second(DATA, SIZE, "name");
    const returned = b.destroy();
    t.create();
    return [String(returned), b.size, b.usage, b.label, b.mapState];
  } },
  "attributes/expandos": { reuses: 1, run: async (t) => {
    const first = t.create();
    first.handle = 17;
    first[Symbol.for("handle")] = 18;
    await t.settle();
    first.destroy();
    const next = t.create();
    return [first.handle, next.handle ?? null, next[Symbol.for("handle")] ?? null, next === first];
  } },

  "destroy/twice": { reuses: 2, run: async (t) => {
    const b = await t.second();
    b.destroy();
    const next = t.create();
    t.queue.writeBuffer(next, 0, new Uint32Array(SIZE / 4).fill(9));
    const errors = await t.errors(() => b.destroy());
    return [errors, await t.errors(() => t.submit((e) => e.clearBuffer(next, 0, 4))), await t.read(next)];
  } },
  "destroy/another's write through an old reference": { reuses: 2, run: async (t) => {
    const b = await t.second();
    b.destroy();
    const next = t.create();
    const errors = await t.errors(() => t.queue.writeBuffer(b, 0, new Uint32Array(SIZE / 4).fill(1)));
    return [errors, await t.read(next)];
  } },
  "destroy/a group made before is used after": { reuses: 2, run: async (t) => {
    const pipeline = t.pipeline(TOUCH);
    const b = await t.second();
    const group = t.group(pipeline, { buffer: b });
    b.destroy();
    const next = t.create();
    const errors = await t.errors(() => t.submit((e) => t.dispatch(e, pipeline, group)));
    return [errors, await t.read(next)];
  } },
  "destroy/a bundle made before is used after": { reuses: 2, run: async (t) => {
    const b = await t.second(ALL);
    const made = bundle(t, b);
    b.destroy();
    t.create(ALL);
    const use = rendering(t, (pass) => pass.executeBundles([made]));
    return t.errors(() => t.submit((e) => use(null, e)));
  } },
  "submit/two encoders in the other order": { reuses: 2, run: async (t) => {
    const b = await t.second();
    const first = t.encode((e) => e.clearBuffer(b, 0, 16));
    b.destroy();
    const next = t.create();
    const second = t.encode((e) => e.clearBuffer(next, 0, 16));
    t.queue.writeBuffer(next, 0, new Uint32Array(SIZE / 4).fill(6));
    const errors = [await t.errors(() => t.queue.submit([second])), await t.errors(() => t.queue.submit([first]))];
    return [errors, await t.read(next)];
  } },
  "submit/one of several is refused with the rest": { reuses: 2, run: async (t) => {
    await t.leave(2);
    const [kept, gone] = [t.create(), t.create()];
    t.queue.writeBuffer(kept, 0, new Uint32Array(SIZE / 4).fill(6));
    const good = t.encode((e) => e.clearBuffer(kept));
    const bad = t.encode((e) => e.clearBuffer(gone));
    gone.destroy();
    return [await t.errors(() => t.queue.submit([good, bad])), await t.read(kept)];
  } },
  "submit/the same commands twice": { reuses: 1, run: async (t) => {
    const b = await t.second();
    const commands = t.encode((e) => e.clearBuffer(b));
    t.queue.submit([commands]);
    return t.errors(() => t.queue.submit([commands]));
  } },
  "submit/any iterable": { reuses: 1, run: async (t) => {
    const b = await t.second();
    t.queue.submit(new Set([t.encode((e) => e.clearBuffer(b))]));
    return [thrown(() => t.queue.submit(5)), thrown(() => t.queue.submit()), thrown(() => t.queue.submit([b])),
      thrown(() => t.queue.submit([])), await t.read(b)];
  } },

  "map/for reading": { reuses: 0, run: async (t) => {
    const b = t.create(MAP_READ | COPY_DST);
    const pending = b.mapAsync(1);
    const states = [b.mapState];
    await pending;
    states.push(b.mapState, b.getMappedRange().byteLength, b.unmap() === undefined, b.mapState);
    const again = rejected(b.mapAsync(1));
    b.destroy();
    return [states, await again, b.mapState];
  } },
  "map/for writing": { reuses: 0, run: async (t) => {
    const b = t.create(MAP_WRITE | COPY_SRC);
    await b.mapAsync(2);
    new Uint32Array(b.getMappedRange()).fill(8);
    b.unmap();
    const to = t.create();
    t.submit((e) => e.copyBufferToBuffer(b, 0, to, 0, SIZE));
    return t.read(to);
  } },
  "map/at creation": { reuses: 1, run: async (t) => {
    await t.leave();
    const b = t.device.createBuffer({ size: SIZE, usage: DATA, mappedAtCreation: true });
    const state = b.mapState;
    new Uint32Array(b.getMappedRange())[3] = 5;
    b.unmap();
    const c = t.create();
    return [state, b.mapState, await t.read(b), await t.read(c)];
  } },
  "map/a storage buffer": { reuses: 1, run: async (t) => {
    const b = await t.second();
    let outcome = null;
    const errors = await t.errors(async () => { outcome = await rejected(b.mapAsync(1)); });
    return [outcome, errors, b.mapState, thrown(() => b.getMappedRange()), await t.errors(() => b.unmap()),
      await rejected(b.mapAsync()), await t.read(b)];
  } },
  "map/a storage buffer, then destroy": { reuses: 1, run: async (t) => {
    const b = await t.second();
    let outcome = null;
    const errors = await t.errors(() => { outcome = rejected(b.mapAsync(1)); b.destroy(); });
    const next = t.create();
    return [await outcome, errors, b.mapState, next.mapState, await t.read(next)];
  } },
  "map/a destroyed storage buffer": { reuses: 1, run: async (t) => {
    const b = await t.second();
    b.destroy();
    let outcome = null;
    const errors = await t.errors(async () => { outcome = await rejected(b.mapAsync(1)); });
    return [outcome, errors, thrown(() => b.getMappedRange()), await t.errors(() => b.unmap())];
  } },

  "errors/descriptors": { reuses: 0, run: async (t) => {
    const outcomes = [];
    for (const descriptor of [
      undefined, null, 5, {}, { size: 16 }, { usage: DATA }, { size: 16, usage: 0 }, { size: 16, usage: -1 },
      { size: 16, usage: 1 << 20 | DATA }, { size: 16, usage: DATA | MAP_READ }, { size: "16", usage: DATA },
      { size: 16, usage: MAP_READ | MAP_WRITE | COPY_DST }, { size: -4, usage: DATA }, { size: NaN, usage: DATA },
      { size: 2 ** 53, usage: DATA }, { size: 2 ** 40, usage: DATA }, { size: 16.7, usage: DATA },
      { size: 0, usage: DATA }, { size: 6, usage: DATA }, { size: 16, usage: DATA, label: Symbol("x") },
      { size: 6, usage: DATA, mappedAtCreation: true },
    ]) {
      let buffer = null;
      let outcome = "";
      const errors = await t.errors(() => { outcome = thrown(() => { buffer = t.device.createBuffer(descriptor); }); });
      outcomes.push([outcome, errors, buffer && [buffer.size, buffer.usage]]);
    }
    return outcomes;
  } },
  "errors/a label that cannot be one, of a buffer to hand out again": { reuses: 1, run: async (t) => {
    await t.leave();
    const outcome = thrown(() => t.device.createBuffer({ size: SIZE, usage: DATA, label: Symbol("x") })).split(":")[0];
    return [outcome, await t.read(t.create())];
  } },
  "errors/scopes are the application's": { reuses: 1, run: async (t) => {
    const { device } = t;
    device.pushErrorScope("validation");
    device.pushErrorScope("out-of-memory");
    const b = await t.second();
    t.queue.writeBuffer(b, 2, new Uint32Array(1));
    const inner = await device.popErrorScope();
    const outer = await device.popErrorScope();
    return [inner, outer?.constructor.name, await rejected(device.popErrorScope())];
  } },
  "errors/uncaptured": { reuses: 1, run: async (t) => {
    const seen = [];
    t.device.onuncapturederror = (event) => { seen.push(event.error.message.split("\n")[0]); event.preventDefault(); };
    const b = await t.second(DATA, SIZE, "mine");
    t.queue.writeBuffer(b, 2, new Uint32Array(1));
    const commands = t.encode((e) => e.clearBuffer(b));
    b.destroy();
    t.queue.submit([commands]);
    await t.settle();
    await new Promise((resolve) => { setTimeout(resolve, 20); });
    return seen;
  } },
  "errors/arguments that make no sense": { reuses: 1, run: async (t) => {
    const b = await t.second();
    const pipeline = t.pipeline(TOUCH);
    const encoder = t.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    const layout = pipeline.getBindGroupLayout(0);
    const calls = [
      () => pass.setBindGroup(0, b), () => pass.setBindGroup(), () => pass.dispatchWorkgroupsIndirect(b),
      () => encoder.copyBufferToBuffer(b), () => encoder.copyBufferToBuffer(b, 0, {}, 0, 4),
      () => encoder.clearBuffer(), () => encoder.clearBuffer({}),
      () => t.queue.writeBuffer(b), () => t.queue.writeBuffer(b, 0, 5),
      () => t.device.createBindGroup(), () => t.device.createBindGroup({ layout }),
      () => t.device.createBindGroup({ layout, entries: [{ binding: 0 }] }),
      () => t.device.createBindGroup({ layout, entries: 5 }),
      () => t.device.createBindGroup({ layout: null, entries: [{ binding: 0, resource: { buffer: b } }] }),
      () => GPUDevice.prototype.createBuffer.call({}, { size: SIZE, usage: DATA }),
      () => Object.getOwnPropertyDescriptor(GPUBuffer.prototype, "destroy").value.call({}),
    ];
    return calls.map(thrown);
  } },
  "errors/a call that throws uses nothing": { reuses: 1, run: async (t) => {
    const b = await t.second();
    const encoder = t.device.createCommandEncoder();
    thrown(() => encoder.copyBufferToBuffer(b, 0, {}, 0, 4));
    b.destroy();
    return t.errors(() => t.queue.submit([encoder.finish()]));
  } },

  "bind/the whole buffer": { reuses: 1, run: (t) => lengths(t, (x) => ({ buffer: x })) },
  "bind/directly": { reuses: 1, run: (t) => lengths(t, (x) => x) },
  "bind/a range": { reuses: 1, run: (t) => lengths(t, (x) => ({ buffer: x, offset: 512, size: 20 }), 1024) },
  "bind/from an offset": { reuses: 1, run: (t) => lengths(t, (x) => ({ buffer: x, offset: 256 }), 1024) },
  "bind/odd sizes": { reuses: 3, run: async (t) => {
    const seen = [];
    for (const size of [4, 20, 1028]) seen.push(await lengths(t, (x) => ({ buffer: x }), size));
    return seen;
  } },
  "bind/ranges that are refused": { reuses: 1, run: async (t) => {
    const pipeline = t.pipeline(TOUCH);
    const b = await t.second(DATA, 1024);
    const errors = [];
    const ranges = [{ offset: 4 }, { offset: 1024 }, { size: 2048 }, { size: 3 }, { size: 0 }];
    ranges.push({ offset: 256, size: 1024 });
    for (const range of ranges) {
      errors.push(await t.errors(() => t.group(pipeline, { buffer: b, ...range })));
    }
    return errors;
  } },
  "bind/a usage that is not there": { reuses: 1, run: async (t) => {
    const entries = [{ binding: 0, visibility: 4, buffer: { type: "uniform" } }];
    const layout = t.device.createBindGroupLayout({ entries });
    const b = await t.second();
    return t.errors(() => t.device.createBindGroup({ layout, entries: [{ binding: 0, resource: { buffer: b } }] }));
  } },
  "bind/any iterable of entries, dynamic offsets": { reuses: 1, run: async (t) => {
    const layout = t.device.createBindGroupLayout({
      entries: [{ binding: 0, visibility: 4, buffer: { type: "storage", hasDynamicOffset: true } }],
    });
    const module = t.device.createShaderModule({ code: TOUCH });
    const pipeline = t.device.createComputePipeline({
      layout: t.device.createPipelineLayout({ bindGroupLayouts: [layout] }), compute: { module },
    });
    const b = await t.second(DATA, 1024);
    const group = t.device.createBindGroup({
      layout, entries: new Set([Object.freeze({ binding: 0, resource: Object.freeze({ buffer: b, size: 16 }) })]),
    });
    t.submit((e) => {
      const pass = e.beginComputePass();
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group, [256]);
      pass.dispatchWorkgroups(1);
      pass.setBindGroup(0, group, new Uint32Array([0, 512]), 1, 1);
      pass.dispatchWorkgroups(1);
      pass.end();
    });
    return (await t.read(b)).map((word, index) => [index, word]).filter(([, word]) => word !== 0);
  } },
  "bind/descriptors that inherit what they say": { reuses: 1, run: async (t) => {
    class Descriptor {
      constructor(members) { this.members = members; }
      get layout() { return this.members.layout; }
      get entries() { return this.members.entries; }
      get binding() { return this.members.binding; }
      get resource() { return this.members.resource; }
      get buffer() { return this.members.buffer; }
      get offset() { return 256; }
    }
    const pipeline = t.pipeline(TOUCH);
    const b = await t.second(DATA, 1024);
    const entries = [new Descriptor({ binding: 0, resource: new Descriptor({ buffer: b }) })];
    const group = t.device.createBindGroup(new Descriptor({ layout: pipeline.getBindGroupLayout(0), entries }));
    t.submit((e) => t.dispatch(e, pipeline, group));
    return (await t.read(b)).indexOf(7);
  } },
  "bind/nothing": { reuses: 0, run: async (t) => t.errors(() => t.submit((e) => {
    const pass = e.beginComputePass();
    pass.setBindGroup(0, null);
    pass.end();
  })) },
  "work/accumulates in a buffer that is handed on": { reuses: 3, run: async (t) => {
    const pipeline = t.pipeline(TOUCH);
    const seen = [];
    for (let i = 0; i < 4; i += 1) {
      const b = t.create();
      for (let n = 0; n <= i; n += 1) t.submit((e) => t.dispatch(e, pipeline, t.group(pipeline, { buffer: b })));
      seen.push((await t.read(b))[0]);
      await t.settle();
      b.destroy();
    }
    return seen;
  } },

  "devices/a buffer of the other one": { reuses: 1, run: async (t) => {
    const other = new Bench(await (await navigator.gpu.requestAdapter()).requestDevice());
    const b = await t.second();
    const theirs = other.create();
    const pipeline = other.pipeline(TOUCH);
    const mine = t.encode((e) => e.clearBuffer(b));
    const errors = [
      await other.errors(() => other.queue.writeBuffer(b, 0, new Uint32Array(SIZE / 4).fill(1))),
      await other.errors(() => other.group(pipeline, { buffer: b })),
      await other.errors(() => other.submit((e) => e.copyBufferToBuffer(b, 0, theirs, 0, 16))),
      await other.errors(() => other.queue.submit([mine])),
      await t.errors(() => t.submit((e) => e.copyBufferToBuffer(b, 0, theirs, 0, 16))),
    ];
    other.device.destroy();
    return [errors.map((kinds) => kinds.map((kind) => kind?.split(":")[0] ?? null)), await t.read(b)];
  } },
  "devices/each has its own": { reuses: 1, run: async (t) => {
    const other = new Bench(await (await navigator.gpu.requestAdapter()).requestDevice());
    await t.leave();
    const theirs = other.create();
    const words = [await other.read(theirs), await t.read(t.create())];
    other.device.destroy();
    return words;
  } },
  "devices/destroyed": { reuses: 1, run: async (t) => {
    const b = await t.second();
    const commands = t.encode((e) => e.clearBuffer(b));
    t.device.destroy();
    const late = t.create(DATA, SIZE, "late");
    const reason = (await t.device.lost).reason;
    const errors = await t.errors(() => {
      t.queue.writeBuffer(b, 0, new Uint32Array(4));
      t.queue.submit([commands]);
      t.submit((e) => e.clearBuffer(late));
      b.destroy();
      b.destroy();
      late.destroy();
    });
    return [reason, errors, b.size, b.mapState, late.size, late.label];
  } },
};

async function lengths(t, resource, size = SIZE) {
  const pipeline = t.pipeline(LENGTHS);
  const [x, y] = [await t.second(DATA, size), t.create()];
  t.submit((e) => t.dispatch(e, pipeline, t.group(pipeline, resource(x), { buffer: y })));
  return t.read(y, 12);
}
