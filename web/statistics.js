/** Order statistics of small samples. Every function takes an array of numbers, in any order, and leaves it as it is. */

/** The `q` quantile (0 to 1), interpolated between neighbours; NaN without data. */
export function quantile(values, q) {
  if (values.length === 0) return NaN;
  const sorted = Float64Array.from(values).sort();
  const place = (sorted.length - 1) * q;
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (place - below);
}

export function median(values) {
  return quantile(values, 0.5);
}

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN;
}

/** Ratios `above ÷ below` of what was measured in the same round, `[{round, ratio}]`; both are Maps of round → value. */
export function pairedRatios(above, below) {
  return [...above]
    .filter(([round]) => below.has(round))
    .map(([round, value]) => ({ round, ratio: value / below.get(round) }))
    .sort((a, b) => a.round - b.round);
}

/** A small sample in three numbers; NaN without data. */
export function spread(values) {
  const [least, greatest] = values.length ? [Math.min(...values), Math.max(...values)] : [NaN, NaN];
  return { middle: median(values), least, greatest };
}

/** The slow end of a sample: p99 where 100 values or more can tell it, else the slowest value, and its name. */
export function tail(values) {
  return values.length >= 100
    ? { name: "p99", value: quantile(values, 0.99) }
    : { name: "slowest", value: values.length ? Math.max(...values) : NaN };
}
