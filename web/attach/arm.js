// One run of an arm, step by step, with what really reached WebGPU counted under whatever is attached.
// The harness measures with it (harness/arms/attach.py), and so do the tests.

import { countBuffers } from "./count.js";
import { Decoder, loadRuntime } from "./ort.js";

const ATTACH = new URL("../stepwell-attach.js", import.meta.url).href;
const COUNTED = ["created", "created_bytes", "others", "destroyed"];

/** `stepwell.attach` of the single-file build; the counters must be there before. */
export async function attach(options) {
  await import(ATTACH);
  return globalThis.stepwell.attach(options);
}

export class Arm {
  /**
   * @param {object} options of Decoder.open(), and
   * @param {object | null} [options.attach] the options of stepwell.attach(), or null: nothing is attached
   * @param {boolean} [options.alternate] attached for every second step only, from the second one on
   */
  static async open({ attach: options = null, alternate = false, ...decoding }) {
    const counter = countBuffers();
    const attachment = options && !alternate ? await attach(options) : null;
    try {
      const decoder = await Decoder.open(await loadRuntime(), decoding);
      return new Arm(counter, attachment, decoder, alternate ? options : null);
    } catch (error) {
      attachment?.detach();
      counter.restore();
      throw error;
    }
  }

  constructor(counter, attachment, decoder, alternating) {
    Object.assign(this, { counter, attachment, decoder, alternating });
  }

  /**
   * A step: what Decoder.next() gives, whether it was `attached`, what it created and destroyed, and the bytes there are
   * after it.
   */
  async next() {
    const during = this.alternating && this.decoder.step % 2 ? await attach(this.alternating) : null;
    const attached = Boolean(during ?? this.attachment);
    const before = this.counter.now();
    const step = await this.decoder.next();
    const after = this.counter.now();
    during?.detach();
    const counts = Object.fromEntries(COUNTED.map((name) => [name, after[name] - before[name]]));
    return { ...step, attached, ...counts, live_bytes: after.live_bytes };
  }

  /** Ends the run: the digest of all K and V, the most bytes there were, what the attachment says, and what is left. */
  async finish() {
    const digest = await this.decoder.digest();
    const { peak_bytes } = this.counter.now();
    const stats = this.attachment?.stats() ?? null;
    await this.decoder.close();
    this.attachment?.detach();
    const { live, live_bytes } = this.counter.now();
    this.counter.restore();
    return { digest, peak_bytes, stats, left: live, left_bytes: live_bytes };
  }
}
