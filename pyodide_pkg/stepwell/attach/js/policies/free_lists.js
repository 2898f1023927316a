/** Free buffers by size; the latest released is handed out first. */
export class FreeLists {
  #bySize = new Map(); // bytes -> ids

  /** The id of a free buffer of exactly `size`, or 0. */
  pop(size) {
    return this.#bySize.get(size)?.pop() ?? 0;
  }

  push(size, id) {
    const free = this.#bySize.get(size);
    if (free) free.push(id);
    else this.#bySize.set(size, [id]);
  }

  count(size) {
    return this.#bySize.get(size)?.length ?? 0;
  }

  /** Ids of `nbytes` or more in total, the largest first and of a size the oldest. */
  reclaim(nbytes) {
    const ids = [];
    for (const size of [...this.#bySize.keys()].sort((a, b) => b - a)) {
      if (nbytes <= 0) break;
      const taken = this.#bySize.get(size).splice(0, Math.ceil(nbytes / size));
      ids.push(...taken);
      nbytes -= taken.length * size;
    }
    return ids;
  }

  drain() {
    const ids = [...this.#bySize.values()].flat();
    this.#bySize.clear();
    return ids;
  }
}
