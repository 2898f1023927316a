/**
 * Keeps every buffer it is given back and hands it out again at once: what the pool has to get right whatever decides.
 * The methods are those of stepwell/attach/js/keeper.js.
 */
export class EagerKeeper {
  #lists = new Map();
  #known = new Map(); // id → {key, nbytes, free}
  #next = 1;
  #stats = { created: 0, reused: 0, destroyed: 0, runs: 0 };

  constructor() {
    for (const name of ["live_buffers", "live_bytes", "free_buffers", "free_bytes"]) this.#stats[name] = 0;
  }

  acquire(usage, nbytes) {
    const id = this.#lists.get(`${usage} ${nbytes}`)?.pop() ?? 0;
    if (id > 0) this.#move(id, false);
    if (id > 0) this.#stats.reused += 1;
    return id;
  }

  created(usage, nbytes) {
    const id = this.#next++;
    this.#known.set(id, { key: `${usage} ${nbytes}`, nbytes, free: false });
    this.#stats.created += 1;
    this.#stats.live_buffers += 1;
    this.#stats.live_bytes += nbytes;
    return id;
  }

  room() {
    return "";
  }

  release(id) {
    const { key } = this.#known.get(id);
    if (!this.#lists.has(key)) this.#lists.set(key, []);
    this.#lists.get(key).push(id);
    this.#move(id, true);
    return "";
  }

  forget(id) {
    const { nbytes } = this.#known.get(id);
    this.#known.delete(id);
    this.#stats.live_buffers -= 1;
    this.#stats.live_bytes -= nbytes;
  }

  flush() {
    return "";
  }

  begin_run() {
    this.#stats.runs += 1;
    return "";
  }

  drain() {
    const ids = [...this.#lists.values()].flat();
    for (const id of ids) {
      this.#move(id, false);
      this.forget(id);
    }
    this.#stats.destroyed += ids.length;
    this.#lists.clear();
    return ids.join(" ");
  }

  shrink() {
    return this.drain();
  }

  stats() {
    return JSON.stringify(this.#stats);
  }

  #move(id, free) {
    const entry = this.#known.get(id);
    const [from, to] = free ? ["live", "free"] : ["free", "live"];
    entry.free = free;
    this.#stats[`${from}_buffers`] -= 1;
    this.#stats[`${from}_bytes`] -= entry.nbytes;
    this.#stats[`${to}_buffers`] += 1;
    this.#stats[`${to}_bytes`] += entry.nbytes;
  }
}
