// A flat program (gpu/program.py) in two steps: `resolve` looks its objects up and checks its structure, `execute` makes
// the WebGPU calls. A plan is resolved once and executed for every token, so `execute` is the hot path: no lookups, no
// allocations per instruction, no checks that `resolve` has made.
//
// js_device.py evaluates these files as one script: program.js, profile.js, tables.js, sources.js, executor.js.
"use strict";

const [BEGIN_PASS, END_PASS, DISPATCH, COPY, CLEAR, WRITE, SUBMIT] = [1, 2, 3, 4, 5, 6, 7];
const [SCALARS, IMMEDIATES, PARAMS, DISPATCH_BY_LENGTH, COPY_PAST, COPY_OUT] = [8, 9, 10, 11, 12, 13];
const SIZES = [0, 1, 1, 6, 6, 4, 4, 1, 6, 1, 4, 7, 4, 4]; // words per instruction, the opcode included
const STAGING = 5; // the word of the staging buffer: SCALARS is the first instruction
const MASK_BITS = 15; // position, rows, length, draw

const failed = (name, message) => Object.assign(new Error(message), { name });

const stepBlock = new Uint32Array(4); // position, rows, length, draw of the program that is being executed
const maskedBlock = new Uint32Array(4);

// Fills objects[i] with the object whose handle is word i, for the first `count` words. The staging buffer is left to
// the caller: true if the program copies to it. Throws for a broken program before anything has an effect.
function resolve(w, count, objects, tables) {
  const wrong = (i, what) => failed("UsageError", `word ${i} of the program: ${what}`);
  let inPass = false;
  let unsubmitted = false;
  let copiesOut = false;
  let i = 0;
  while (i < count) {
    const op = w[i];
    const size = SIZES[op];
    if (!size) throw wrong(i, `${op} is no opcode`);
    if (i + size > count) throw wrong(i, "the program is cut off in its last instruction");
    if (op === SCALARS ? i : op > SCALARS && w[0] !== SCALARS) throw wrong(i, `SCALARS must come first (opcode ${op})`);
    switch (op) {
      case DISPATCH_BY_LENGTH:
        if (!w[i + 3] || !w[i + 6]) throw wrong(i, `DISPATCH_BY_LENGTH of unit ${w[i + 3]}, at most ${w[i + 6]}`);
      // falls through
      case DISPATCH:
        objects[i + 1] = tables.pipeline(w[i + 1]).pipeline;
        objects[i + 2] = tables.bindGroup(w[i + 2]).group;
      // falls through
      case IMMEDIATES:
        if (!inPass) throw wrong(i, `opcode ${op} outside a compute pass`);
        break;
      case END_PASS:
        if (!inPass) throw wrong(i, "END_PASS without an open compute pass");
        inPass = false;
        break;
      case WRITE:
        objects[i + 1] = tables.buffer(w[i + 1]);
        i += w[i + 3];
        break;
      case PARAMS:
        objects[i + 1] = tables.buffer(w[i + 1]);
        if (w[i + 3] & ~MASK_BITS) throw wrong(i, `PARAMS with mask ${w[i + 3]}`);
        break;
      case SCALARS:
        break;
      default: // what must be outside a pass
        if (inPass) throw wrong(i, `opcode ${op} inside an open compute pass`);
        unsubmitted = op !== SUBMIT;
        if (op === BEGIN_PASS) {
          inPass = true;
        } else if (op !== SUBMIT) {
          objects[i + 1] = tables.buffer(w[i + 1]);
          if (op === COPY) objects[i + 3] = tables.buffer(w[i + 3]);
          else if (op === COPY_PAST) objects[i + 2] = tables.buffer(w[i + 2]);
          else if (op === COPY_OUT) copiesOut = true;
        }
    }
    i += size;
  }
  if (i > count) throw wrong(i, "the program is cut off in a WRITE");
  if (unsubmitted) throw wrong(i, "the program ends with work that it did not submit");
  return copiesOut;
}

// Executes what `resolve` prepared.
function execute(device, w, count, objects, profile) {
  const { queue } = device;
  const { spans, passes } = profile;
  let encoder = null;
  let pass = null;
  let bound = null;
  let position = 0;
  let length = 0;
  if (spans) profile.beginSpan();
  for (let i = 0; i < count;) {
    switch (w[i]) {
      case DISPATCH: {
        const pipeline = objects[i + 1];
        if (pipeline !== bound) pass.setPipeline(bound = pipeline);
        pass.setBindGroup(0, objects[i + 2]);
        pass.dispatchWorkgroups(w[i + 3], w[i + 4], w[i + 5]);
        i += 6;
        break;
      }
      case DISPATCH_BY_LENGTH: {
        const pipeline = objects[i + 1];
        if (pipeline !== bound) pass.setPipeline(bound = pipeline);
        pass.setBindGroup(0, objects[i + 2]);
        pass.dispatchWorkgroups(Math.min(Math.ceil(length / w[i + 3]), w[i + 6]), w[i + 4], w[i + 5]);
        i += 7;
        break;
      }
      case IMMEDIATES:
        pass.setImmediates(0, stepBlock);
        i += 1;
        break;
      case BEGIN_PASS:
        encoder ??= device.createCommandEncoder();
        pass = passes ? encoder.beginComputePass(profile.timedPass()) : encoder.beginComputePass();
        bound = null;
        i += 1;
        break;
      case END_PASS:
        pass.end();
        i += 1;
        break;
      case COPY:
        encoder ??= device.createCommandEncoder();
        encoder.copyBufferToBuffer(objects[i + 1], w[i + 2], objects[i + 3], w[i + 4], w[i + 5]);
        i += 6;
        break;
      case COPY_PAST:
        if (position && w[i + 3]) {
          encoder ??= device.createCommandEncoder();
          encoder.copyBufferToBuffer(objects[i + 1], 0, objects[i + 2], 0, position * w[i + 3]);
        }
        i += 4;
        break;
      case COPY_OUT:
        encoder ??= device.createCommandEncoder();
        encoder.copyBufferToBuffer(objects[i + 1], w[i + 2], objects[STAGING], 0, w[i + 3]);
        i += 4;
        break;
      case CLEAR:
        encoder ??= device.createCommandEncoder();
        encoder.clearBuffer(objects[i + 1], w[i + 2], w[i + 3]);
        i += 4;
        break;
      case WRITE:
        queue.writeBuffer(objects[i + 1], w[i + 2], w, i + 4, w[i + 3]);
        i += 4 + w[i + 3];
        break;
      case PARAMS: {
        const mask = w[i + 3];
        for (let word = 0; word < 4; word++) maskedBlock[word] = mask >> word & 1 ? stepBlock[word] : 0;
        queue.writeBuffer(objects[i + 1], w[i + 2], maskedBlock);
        i += 4;
        break;
      }
      case SCALARS:
        stepBlock[0] = position = w[i + 1];
        stepBlock[1] = w[i + 2];
        stepBlock[2] = length = w[i + 3];
        stepBlock[3] = w[i + 4];
        i += 6;
        break;
      case SUBMIT:
        if (encoder) {
          const commands = encoder.finish();
          if (spans) profile.endSpan(ENCODE);
          queue.submit([commands]);
          if (spans) profile.endSpan(SUBMITTING);
          encoder = null;
        }
        i += 1;
        break;
    }
  }
}
