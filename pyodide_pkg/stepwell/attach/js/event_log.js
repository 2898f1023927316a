/** The ops that the recorder notes. Those before `DETAILS` make a memory trace. */
export const OP = Object.freeze({
  CREATE: 0, // subject: the buffer's number; value: bytes; extra: see packExtra
  DESTROY: 1, // subject: the buffer's number; value: bytes
  SUBMIT: 2, // value: command buffers
  READBACK: 3, // mapAsync for reading; value: bytes
  BOUNDARY: 4, // a token ends and another begins; subject: the number of that; value: 1 if marked
  GONE: 5, // a device was lost or destroyed, and all its buffers with it; subject: the device's number
  DETAILS: 6,
  MAP_WRITE: 6, // value: bytes
  UNMAP: 7,
  CLEAR: 8, // value: bytes
  COPY: 9, // value: bytes, 0 where textures are concerned
  UPLOAD: 10, // writeBuffer, writeTexture; value: bytes
  BIND_GROUP: 11, // value: entries
  PASS: 12,
  DISPATCH: 13, // value: workgroups, 0 if they are read from a buffer
  DRAW: 14,
  COUNT: 15,
});

/** By op, for people. */
export const OP_NAMES = [
  ...["createBuffer", "destroy", "submit", "mapAsync(READ)", "token", "device gone", "mapAsync(WRITE)", "unmap"],
  ...["clearBuffer", "copy", "write", "createBindGroup", "beginPass", "dispatch", "draw"],
];

const CHUNK = 1 << 14;

class Chunk {
  ops = new Uint8Array(CHUNK);
  subjects = new Uint32Array(CHUNK);
  values = new Float64Array(CHUNK);
  extras = new Uint32Array(CHUNK);
  times = new Float64Array(CHUNK);
}

/**
 * Events in columns, 25 bytes each, up to a limit. The first half of it is open to all of them, the rest to those of a
 * memory trace only, so that the trace goes on for longer. Later ones are counted and not kept.
 */
export class EventLog {
  length = 0;
  dropped = 0; // of a memory trace: the trace ends there
  droppedDetails = 0;
  #chunks = [];
  #last = null; // the chunk that is being filled
  #at = CHUNK; // the place in it
  #limit;
  #detailLimit;

  /** @param {number} limit events at most */
  constructor(limit) {
    this.#limit = limit;
    this.#detailLimit = limit >> 1;
  }

  add(op, subject, value, extra, time) {
    if (op >= OP.DETAILS) {
      if (this.length >= this.#detailLimit) {
        this.droppedDetails += 1;
        return;
      }
    } else if (this.length >= this.#limit) {
      this.dropped += 1;
      return;
    }
    let at = this.#at;
    if (at === CHUNK) {
      this.#chunks.push((this.#last = new Chunk()));
      at = 0;
    }
    const chunk = this.#last;
    chunk.ops[at] = op;
    chunk.subjects[at] = subject;
    chunk.values[at] = value;
    chunk.extras[at] = extra;
    chunk.times[at] = time;
    this.#at = at + 1;
    this.length += 1;
  }

  /** Call `visit(op, subject, value, extra, time)` for every event in order. */
  each(visit) {
    let left = this.length;
    for (const chunk of this.#chunks) {
      const count = Math.min(left, CHUNK);
      for (let i = 0; i < count; i += 1) {
        visit(chunk.ops[i], chunk.subjects[i], chunk.values[i], chunk.extras[i], chunk.times[i]);
      }
      left -= count;
    }
  }
}

/** A created buffer's `extra`: usage (10 bits), mappedAtCreation, device (5 bits), label (16 bits). */
export function packExtra(usage, mapped, device, label) {
  return ((usage & 0x3ff) | (mapped ? 0x400 : 0) | (Math.min(device, 31) << 11) | (label << 16)) >>> 0;
}

export function unpackExtra(extra) {
  return { usage: extra & 0x3ff, mapped: (extra & 0x400) !== 0, device: (extra >> 11) & 31, label: extra >>> 16 };
}

/** The roles of a trace, by what a buffer may be used for; their letters are those of the trace format. */
export const ROLE_NAMES = ["activation", "uniform", "staging", "weights"];
export const ROLE_LETTERS = ["a", "u", "s", "w"];
const USAGE_MAP = 0x3; // MAP_READ | MAP_WRITE
const USAGE_UNIFORM = 0x40;
const USAGE_STORAGE = 0x80;
const USAGE_COPY_DST = 0x8;
const USAGE_ONLY_COPIED = 0xc; // COPY_SRC | COPY_DST and nothing else

/**
 * The index of a buffer's role. Role 0 is all that a pool under the runtime serves: storage buffers that it can clear. A
 * storage buffer that is filled where it is created holds constants ("weights"), as do vertices and indices.
 */
export function roleOf(usage, mapped, bytes) {
  if (usage & USAGE_MAP || (usage & ~USAGE_ONLY_COPIED) === 0) return 2;
  if (usage & USAGE_STORAGE) return mapped || bytes % 4 || !(usage & USAGE_COPY_DST) ? 3 : 0;
  return usage & USAGE_UNIFORM ? 1 : 3;
}
