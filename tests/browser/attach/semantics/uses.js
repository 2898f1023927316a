import { ALL, COPY_DST, INDEX, SIZE, TOUCH, VERTEX } from "./bench.js";

const DRAW = `
@vertex fn vertex(@location(0) at: vec4f) -> @builtin(position) vec4f { return at; }
@fragment fn fragment() -> @location(0) vec4f { return vec4f(1, 1, 1, 1); }`;

/** name → (bench, buffer) → a function that records the use. */
const USES = {
  copySource: (t) => { const to = t.create(); return (b, e) => e.copyBufferToBuffer(b, 0, to, 0, 64); },
  copyTarget: (t) => { const from = t.create(); return (b, e) => e.copyBufferToBuffer(from, 0, b, 0, 64); },
  copyWhole: (t) => { const to = t.create(); return (b, e) => e.copyBufferToBuffer(b, to); },
  clear: () => (b, e) => e.clearBuffer(b),
  clearRange: () => (b, e) => e.clearBuffer(b, 16, 32),
  toTexture: (t) => {
    const to = texture(t);
    return (b, e) => e.copyBufferToTexture({ buffer: b }, { texture: to }, [1, 1]);
  },
  fromTexture: (t) => {
    const from = texture(t);
    return (b, e) => e.copyTextureToBuffer({ texture: from }, { buffer: b }, [1, 1]);
  },
  resolveQueries: (t) => {
    const set = t.device.createQuerySet({ type: "occlusion", count: 1 });
    return (b, e) => e.resolveQuerySet(set, 0, 1, b, 0);
  },
  dispatch: (t) => {
    const pipeline = t.pipeline(TOUCH);
    return (b, e) => t.dispatch(e, pipeline, t.group(pipeline, { buffer: b }));
  },
  bindOnly: (t) => {
    const pipeline = t.pipeline(TOUCH);
    return (b, e) => t.dispatch(e, pipeline, t.group(pipeline, { buffer: b }), () => {});
  },
  bindDirectly: (t) => {
    const pipeline = t.pipeline(TOUCH);
    return (b, e) => t.dispatch(e, pipeline, t.group(pipeline, b));
  },
  dispatchIndirect: (t) => {
    const pipeline = t.pipeline(TOUCH);
    const group = t.group(pipeline, { buffer: t.create() });
    return (b, e) => t.dispatch(e, pipeline, group, (pass) => pass.dispatchWorkgroupsIndirect(b, 0));
  },
  vertices: (t) => rendering(t, (pass, b) => { pass.setVertexBuffer(0, b); pass.draw(3); }),
  indices: (t) => {
    const vertices = t.create(VERTEX | COPY_DST);
    return rendering(t, (pass, b) => {
      pass.setVertexBuffer(0, vertices);
      pass.setIndexBuffer(b, "uint32");
      pass.drawIndexed(3);
    });
  },
  drawIndirect: (t) => {
    const vertices = t.create(VERTEX | COPY_DST);
    return rendering(t, (pass, b) => { pass.setVertexBuffer(0, vertices); pass.drawIndirect(b, 0); });
  },
  drawIndexedIndirect: (t) => {
    const vertices = t.create(VERTEX | INDEX | COPY_DST);
    return rendering(t, (pass, b) => {
      pass.setVertexBuffer(0, vertices);
      pass.setIndexBuffer(vertices, "uint32");
      pass.drawIndexedIndirect(b, 0);
    });
  },
  bundle: (t) => rendering(t, (pass, b) => pass.executeBundles([bundle(t, b)])),
};

function texture(t, usage = 0x3 | 0x10) {
  return t.device.createTexture({ size: [4, 4], format: "rgba8unorm", usage });
}

function renderPipeline(t) {
  t.rendering ??= t.device.createRenderPipeline({
    layout: "auto",
    vertex: {
      module: t.device.createShaderModule({ code: DRAW }),
      buffers: [{ arrayStride: 16, attributes: [{ shaderLocation: 0, offset: 0, format: "float32x4" }] }],
    },
    fragment: { module: t.device.createShaderModule({ code: DRAW }), targets: [{ format: "rgba8unorm" }] },
  });
  return t.rendering;
}

export function rendering(t, draw) {
  const pipeline = renderPipeline(t);
  const view = texture(t).createView();
  return (b, encoder) => {
    const pass = encoder.beginRenderPass({ colorAttachments: [{ view, loadOp: "clear", storeOp: "store" }] });
    pass.setPipeline(pipeline);
    draw(pass, b);
    pass.end();
  };
}

export function bundle(t, b) {
  const encoder = t.device.createRenderBundleEncoder({ colorFormats: ["rgba8unorm"] });
  encoder.setPipeline(renderPipeline(t));
  encoder.setVertexBuffer(0, b);
  encoder.draw(3);
  return encoder.finish();
}

/** When a buffer is destroyed, in relation to its use; `stolen`: its next owner has the memory by then, with a pool. */
export function useCases() {
  const found = {};
  for (const [name, make] of Object.entries(USES)) {
    found[`use/${name}/alive`] = { reuses: 1, run: async (t) => {
      const use = make(t);
      const b = await t.second(ALL);
      return [await t.errors(() => t.submit((e) => use(b, e))), await t.read(b)];
    } };
    for (const stolen of [false, true]) {
      const title = `use/${name}/${stolen ? "stolen" : "destroyed"}`;
      const reuses = stolen ? 2 : 1;
      found[`${title} before`] = { reuses, run: (t) => useAfter(t, make(t), stolen, true) };
      found[`${title} before submit`] = { reuses, run: (t) => useAfter(t, make(t), stolen, false) };
    }
    found[`use/${name}/destroyed in flight`] = { reuses: 2, run: async (t) => {
      const use = make(t);
      const b = await t.second(ALL);
      const errors = await t.errors(() => { t.submit((e) => use(b, e)); b.destroy(); });
      return [errors, await t.read(t.create(ALL))];
    } };
  }
  return found;
}

async function useAfter(t, use, stolen, before) {
  const b = await t.second(ALL, SIZE, "mine");
  let commands = null;
  const encoding = await t.errors(() => { if (!before) commands = t.encode((e) => use(b, e)); });
  b.destroy();
  const thief = stolen ? t.create(ALL) : null;
  if (stolen) t.queue.writeBuffer(thief, 0, new Uint32Array(SIZE / 4).fill(42));
  const late = await t.errors(() => { if (before) commands = t.encode((e) => use(b, e)); });
  const submitting = await t.errors(() => t.queue.submit([commands]));
  return [encoding, late, submitting, stolen ? await t.read(thief) : null];
}
