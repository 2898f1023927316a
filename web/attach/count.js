// Counts what a page really asks of WebGPU's buffers: wrapped before anything else is, so that it sees what comes through.

/**
 * Count from now on, on all devices.  `now()` gives what happened so far: `created` and `created_bytes` of storage buffers
 * that cannot be mapped, `others` (all the rest), `destroyed` (of either), `live` and `live_bytes` (of either; a buffer
 * that was dropped without destroy() counts until it is collected), `peak_bytes` (the most there was since `rewind()`).
 */
export function countBuffers() {
  const counts = { created: 0, created_bytes: 0, others: 0, destroyed: 0, live: 0, live_bytes: 0, peak_bytes: 0 };
  const sizes = new WeakMap();
  const collected = new FinalizationRegistry((entry) => gone(entry));
  const mappable = GPUBufferUsage.MAP_READ | GPUBufferUsage.MAP_WRITE;
  const { createBuffer } = GPUDevice.prototype;
  const { destroy } = GPUBuffer.prototype;

  function gone(entry) {
    if (entry.gone) return false;
    entry.gone = true;
    counts.live -= 1;
    counts.live_bytes -= entry.size;
    return true;
  }

  GPUDevice.prototype.createBuffer = function (descriptor) {
    const buffer = createBuffer.call(this, descriptor);
    const { size, usage } = buffer;
    if (usage & GPUBufferUsage.STORAGE && !(usage & mappable)) {
      counts.created += 1;
      counts.created_bytes += size;
    } else counts.others += 1;
    counts.live += 1;
    counts.live_bytes += size;
    counts.peak_bytes = Math.max(counts.peak_bytes, counts.live_bytes);
    const entry = { size, gone: false };
    sizes.set(buffer, entry);
    collected.register(buffer, entry);
    return buffer;
  };
  GPUBuffer.prototype.destroy = function () {
    const entry = sizes.get(this);
    if (entry && gone(entry)) counts.destroyed += 1;
    return destroy.call(this);
  };
  return {
    now: () => ({ ...counts }),
    rewind: () => void (counts.peak_bytes = counts.live_bytes),
    restore() {
      GPUDevice.prototype.createBuffer = createBuffer;
      GPUBuffer.prototype.destroy = destroy;
    },
  };
}
