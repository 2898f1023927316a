import { BadRequest } from "../errors.js";

const UNITS = { "": 1, b: 1, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30 };
const ENTRY = /^\s*([\d.]+)\s*([A-Za-z]*)\s*:\s*(\d+)\s*$/;
const WHOLE = /^\s*[+-]?\d+\s*$/;

/**
 * The parameters of a policy: a list of { name, kind: "int" | "float" | "bool" | "choice" | "limits", minimum, maximum,
 * choices }. The same tables, ranges and texts as in memory/policies/, with which a test compares them.
 */
export function parseOptions(policy, table, values) {
  const unknown = Object.keys(values)
    .filter((name) => !table.some((option) => option.name === name))
    .sort();
  if (unknown.length > 0) {
    const names = table.map((option) => option.name).join(", ") || "none";
    throw new BadRequest(`policy ${policy}: no option '${unknown[0]}'. It has ${names}.`);
  }
  const parsed = {};
  for (const option of table) {
    if (!(option.name in values)) continue;
    const value = parse(option, values[option.name]);
    if (value === undefined) {
      const given = shown(values[option.name]);
      throw new BadRequest(`policy ${policy}, option ${option.name}: ${given}; ${expected(option)}.`);
    }
    parsed[option.name] = value;
  }
  return parsed;
}

/** The value in the option's type, or undefined if it is none. Text is read as in a form. */
function parse(option, value) {
  if (option.kind === "bool") return boolean(value);
  if (option.kind === "choice") return option.choices.includes(value) ? value : undefined;
  if (option.kind === "limits") return parseLimits(value);
  const number = option.kind === "int" ? wholeNumber(value) : realNumber(value);
  return option.minimum <= number && number <= option.maximum ? number : undefined;
}

function boolean(value) {
  if (typeof value === "string") return { true: true, false: false }[value.toLowerCase()];
  return typeof value === "boolean" ? value : undefined;
}

function wholeNumber(value) {
  if (typeof value === "string") return WHOLE.test(value) ? Number(value) : NaN;
  return Number.isInteger(value) ? value : NaN;
}

function realNumber(value) {
  if (typeof value === "string") return value.trim() === "" ? NaN : Number(value);
  return typeof value === "number" ? value : NaN;
}

/** A limit table: an object of bytes -> count, or text such as `4 MiB:64, 8388608:10`; a Map, or undefined. */
function parseLimits(value) {
  const entries = typeof value === "string" ? value.split(",").map(limitOfText) : limitsOfObject(value);
  if (entries.length === 0 || entries.includes(undefined)) return undefined;
  for (const [size, count] of entries) {
    if (size > 0 && size % 4 === 0 && count >= 0) continue;
    throw new BadRequest(
      `limit table: ${number(size)} B keeps ${count}; need a multiple of 4 B and a count of 0 or more.`,
    );
  }
  return new Map(entries);
}

function limitOfText(entry) {
  const [, amount, unit, count] = ENTRY.exec(entry) ?? [];
  const size = Math.trunc(Number(amount) * UNITS[unit?.toLowerCase()]);
  return Number.isNaN(size) ? undefined : [size, Number(count)];
}

function limitsOfObject(value) {
  if (value === null || typeof value !== "object") return [];
  const entries = value instanceof Map ? [...value] : Object.entries(value);
  return entries.map((entry) => {
    const [size, count] = entry.map(Number);
    return Number.isInteger(size) && Number.isInteger(count) ? [size, count] : undefined;
  });
}

function expected({ kind, minimum, maximum, choices }) {
  if (kind === "bool") return "it must be true or false";
  if (kind === "choice") return `it must be one of ${choices.join(", ")}`;
  if (kind === "limits") {
    return "it must be a table such as '4 MiB:64, 8 MiB:64' (sizes are multiples of 4 B, counts 0 or more)";
  }
  return `it must be a ${kind === "int" ? "whole " : ""}number from ${number(minimum)} to ${number(maximum)}`;
}

function shown(value) {
  if (typeof value === "string") return `'${value}'`;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function number(value) {
  return value.toLocaleString("en");
}
