/** Numbers for people: every one with its unit, digits by magnitude, no more than what was measured. */

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NO_BREAK_SPACE = "\u00a0";

/** `value` with three significant digits below 100, none behind the point above. */
export function number(value) {
  if (!Number.isFinite(value)) return "–";
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function milliseconds(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 10_000 ? seconds(value) : `${number(value)}${NO_BREAK_SPACE}ms`;
}

export function seconds(ms) {
  return Number.isFinite(ms) ? `${number(ms / 1000)}${NO_BREAK_SPACE}s` : "–";
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const power = bytePower(value);
  return `${short(value / 1024 ** power)}${NO_BREAK_SPACE}${BYTE_UNITS[power]}`;
}

/** "256 → 512 KiB": the unit once when both sizes share it. */
export function byteStep(from, to) {
  const power = bytePower(to);
  return bytePower(from) === power
    ? `${short(from / 1024 ** power)} → ${short(to / 1024 ** power)} ${BYTE_UNITS[power]}`
    : `${bytes(from)} → ${bytes(to)}`;
}

export function mebibytes(value) {
  return value / 1024 ** 2;
}

/** A share of 1 in whole percent, rounded down: 100 % is all. */
export function percent(share) {
  return Number.isFinite(share) ? `${number(Math.floor(100 * share + 1e-9))}${NO_BREAK_SPACE}%` : "–";
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** As `number`, without zeros at the end. */
function short(value) {
  return value.toLocaleString("en", {
    maximumFractionDigits: Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2,
  });
}

function bytePower(value) {
  let power = 0;
  while (Math.abs(value) >= 1024 ** (power + 1) && power < BYTE_UNITS.length - 1) power += 1;
  return power;
}
