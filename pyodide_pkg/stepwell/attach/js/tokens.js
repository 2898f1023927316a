const TOKEN_ROWS = 4096;
const FIRST_ROWS = 64;

/** One row of numbers per token, the last 4,096 of them. */
export class TokenTable {
  added = 0;
  #width;
  #capacity = FIRST_ROWS;
  #rows;

  constructor(width) {
    this.#width = width;
    this.#rows = new Float64Array(width * FIRST_ROWS);
  }

  /** Add a token's row: `now` less `before`, column by column. */
  add(now, before) {
    if (this.added === this.#capacity && this.#capacity < TOKEN_ROWS) {
      this.#capacity *= 2;
      const rows = new Float64Array(this.#width * this.#capacity);
      rows.set(this.#rows);
      this.#rows = rows;
    }
    const start = (this.added % this.#capacity) * this.#width;
    for (let i = 0; i < this.#width; i += 1) this.#rows[start + i] = now[i] - before[i];
    this.added += 1;
  }

  get length() {
    return Math.min(this.added, this.#capacity);
  }

  /** The column of the kept tokens without the first `skipped` of all, in order. */
  column(index, skipped = 0) {
    const first = Math.max(this.added - this.length, skipped);
    const found = [];
    for (let token = first; token < this.added; token += 1) {
      found.push(this.#rows[(token % this.#capacity) * this.#width + index]);
    }
    return found;
  }
}

export function medianOf(numbers) {
  if (!numbers.length) return 0;
  const sorted = Float64Array.from(numbers).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export function meanOf(numbers) {
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : 0;
}
