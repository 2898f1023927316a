/** Controls of the form, made from rows of option tables: run options, and those of policies and of the launch path. */
import { element, field } from "./dom.js";
import { RUN_OPTIONS } from "./run_options.js";

/** Controls of the chosen policy's options are named by this and the option's name. */
export const OPTION_PREFIX = "option-";
/** The same of the launch path's options; a control's `data-initial` is its default, "" for automatic. */
export const LAUNCH_PREFIX = "launch-";

/** The row of a run option. */
export function rowOf(name) {
  return RUN_OPTIONS.find((row) => row.name === name);
}

/**
 * The run options whose controls a panel makes from their rows: a node for each, in the order of the table. `boxOf` makes
 * that of a switch.
 */
export function runFields(panel, boxOf = checkOf) {
  const rows = RUN_OPTIONS.filter(({ form }) => form === panel);
  const first = rows.filter(({ control }, i) => rows.findIndex((row) => row.control === control) === i);
  return first.map((row) => {
    if (row.on) return choiceOf(rows.filter(({ control }) => control === row.control));
    return row.kind === "bool" ? boxOf(row) : fieldOf(row);
  });
}

/** A switch with what it does below it. */
export function switchOf(row) {
  return element(
    "label",
    { className: `option ${kindClass(row)}` },
    runControl(row),
    element("span", {}, row.label),
    element("small", {}, row.summary),
  );
}

/** An input for a number within the range of its row. */
export function numberInput({ kind, minimum, maximum }, properties) {
  const range = { min: minimum, max: maximum, step: kind === "int" ? 1 : "any", inputMode: "decimal" };
  return element("input", { type: "number", ...range, ...properties });
}

/** A choice of texts, with other `labels` for some of them; the first is chosen, or `initial`. */
export function select(properties, values, labels = {}, initial = values[0]) {
  const options = values.map((value) =>
    element("option", { value, defaultSelected: value === initial }, labels[value] ?? value),
  );
  return element("select", properties, ...options);
}

/** The control of one run option, which starts with its default; empty stands for a default of null. */
export function runControl(row, properties = {}) {
  const { control: name, kind, default: initial, choices, empty } = row;
  if (kind === "bool") return element("input", { type: "checkbox", name, defaultChecked: initial, ...properties });
  if (kind === "choice") return select({ name, ...properties }, [initial, ...choices.filter((value) => value !== initial)]);
  if (kind === "int" || kind === "float")
    return numberInput(row, {
      name,
      defaultValue: initial ?? "",
      required: initial !== null,
      placeholder: initial === null ? empty : null,
      ...properties,
    });
  const ids = { inputMode: "numeric", pattern: "\\s*\\d+(\\s*,\\s*\\d+)*\\s*" };
  return element("input", { type: "text", name, autocomplete: "off", ...(kind === "ids" ? ids : {}), ...properties });
}

function fieldOf(row) {
  return field(row.label, row.summary, runControl(row), `${row.kind === "texts" ? "wide " : ""}${kindClass(row)}`);
}

/** A switch in a line: as wide as all fields, or beside what it needs. */
function checkOf(row) {
  return element(
    "label",
    { className: `check ${row.needs ? "" : "wide "}${kindClass(row)}`, title: row.summary },
    runControl(row),
    element("span", {}, row.label),
  );
}

/** Switches that share one control: a select of which each is a choice, after the one for none of them. */
function choiceOf(rows) {
  const labels = Object.fromEntries(rows.map(({ on, label }) => [on, label]));
  const control = select({ name: rows[0].control }, ["stop", ...Object.keys(labels)], { stop: "stops", ...labels });
  const hint = "the model's end-of-text token stops the answer, is never chosen, or is fed back like any other";
  return field("End of text", hint, control, kindClass(rows[0]));
}

/** Shown while a model, or while a workload, is chosen. */
function kindClass({ where }) {
  return where === "any" ? "" : `${where}-only`;
}
