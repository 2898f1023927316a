/** The form ↔ the request of docs/protocol.md ↔ the query string. Names of controls are the contract. */
import { LAUNCH_PREFIX, OPTION_PREFIX } from "./controls.js";
import { RUN_OPTIONS } from "./run_options.js";

/** The run options that have a control from the start. */
const EARLY = RUN_OPTIONS.filter(({ form }) => form !== "" && form !== "radio");
/** Radios that exist, all of them, only once Python has told what there is. */
const LATE_CHOICES = ["model", ...RUN_OPTIONS.filter(({ form }) => form === "radio").map(({ control }) => control)];
/** Formats of synthetic weights; listed once Python has told which there are, the default first. */
const FORMAT = "format";

/** The request that the form describes now, but for what is of one run: `readOnce` has that. */
export function readRequest(form) {
  const workload = chosenWorkload(form);
  const request = {
    ...(workload ? { workload } : {}),
    ...readRows(form, ({ once }) => !once),
    ...readOptions(form, OPTION_PREFIX, "policy_options", ({ value }) => value !== ""),
    ...readOptions(form, LAUNCH_PREFIX, "launch", isChanged),
  };
  if ("prompt_ids" in request || "prompt_length" in request) delete request.prompt;
  return request;
}

/** What a run that someone asked for does besides; runs that are compared do without. */
export function readOnce(form) {
  return readRows(form, ({ once }) => once);
}

/** What the controls of run options say. What has its default is left out, where a record can do without. */
function readRows(form, isWanted) {
  const kind = chosenWorkload(form) ? "workload" : "model";
  const rows = RUN_OPTIONS.filter((row) => row.form && ["any", kind].includes(row.where) && isWanted(row));
  const request = {};
  for (const row of rows) {
    const value = valueOf(row, form.elements[row.control]);
    const isSent = row.needs ? row.needs in request : row.always || (value !== null && value !== row.default);
    if (isSent) request[row.name] = value;
  }
  return request;
}

/** The value of a run option; null for an empty control. */
function valueOf({ kind, on }, control) {
  if (on) return control.value === on;
  if (kind === "bool") return control.checked && !control.disabled;
  if (kind === "texts") return stopStrings(control.value);
  if (kind === "text" || kind === "choice") return control.value;
  if (control.value === "") return null;
  return kind === "ids" ? control.value.split(",").map(Number) : Number(control.value);
}

/** Whether the prompt is given in ids, so that it needs no text. */
export function hasIds({ prompt_ids: ids, prompt_length: length }) {
  return ids.value !== "" || length.value !== "";
}

/** The workload that is chosen in place of a model, or null. */
export function chosenWorkload(form) {
  return form.querySelector("[name=model]:checked")?.dataset.workload ?? null;
}

/** The name of the synthetic model that is chosen, or null: its shape, and its format if that is not the default. */
function chosenSynthetic(form) {
  const shape = form.querySelector("[name=model]:checked")?.dataset.synthetic;
  const { value, selectedIndex } = form.elements[FORMAT];
  return shape ? shape + (selectedIndex > 0 ? `:${value}` : "") : null;
}

/** `{[name]: the options of another table that have been chosen}`; nothing if none has. */
function readOptions(form, prefix, name, isChosen) {
  const chosen = controls(form, prefix).filter(isChosen);
  if (!chosen.length) return {};
  return { [name]: Object.fromEntries(chosen.map((control) => [control.name.slice(prefix.length), optionValue(control)])) };
}

/** Set the launch path's options: those of `launch`, and the rest to their defaults. */
export function setLaunch(form, launch) {
  for (const control of controls(form, LAUNCH_PREFIX)) {
    const value = String(launch[control.name.slice(LAUNCH_PREFIX.length)] ?? control.dataset.initial);
    if (control.type === "checkbox") control.checked = value === "true";
    else control.value = control.type === "number" && value === control.dataset.initial ? "" : value;
  }
}

function isChanged(control) {
  const { initial } = control.dataset;
  if (control.type === "checkbox") return String(control.checked) !== initial;
  if (control.value === "") return false;
  const isNumber = control.type === "number" && initial !== "";
  return isNumber ? Number(control.value) !== Number(initial) : control.value !== initial;
}

function controls(form, prefix) {
  return [...form.querySelectorAll(`[name^="${prefix}"]`)];
}

function optionValue({ type, dataset, value, checked }) {
  if (type === "checkbox") return checked;
  if (type === "number") return Number(value);
  return dataset.kind === "bool" ? value === "true" : value;
}

/** The model that the form describes now, as the `load` message wants it; null when no file has been chosen. */
export function readModel(form, manifest) {
  const fields = form.elements;
  const workload = chosenWorkload(form);
  if (workload) return { kind: "workload", name: workload };
  if (fields.model.value === "file") {
    const [file] = fields.file.files;
    return file ? { kind: "file", file, name: file.name } : null;
  }
  if (chosenSynthetic(form)) return { kind: "synthetic", name: chosenSynthetic(form) };
  const { file, name, sha256 } = manifest.models.find(({ id }) => id === fields.model.value);
  return { kind: "url", url: new URL(file, document.baseURI).href, name, sha256 };
}

/** Set what is there already from a query string; returns a sentence for each value that cannot be set. */
export function applyQuery(form, query) {
  return fill(form, query, new Set(EARLY.map(({ control }) => control)));
}

/** The same for what arrives with the environment: the choices, then the options of the chosen policy and of launches. */
export function applyLateQuery(form, query) {
  const options = [...query.keys()].filter((name) => name.startsWith(OPTION_PREFIX) || name.startsWith(LAUNCH_PREFIX));
  return [...fill(form, query, [...LATE_CHOICES, FORMAT]), ...fill(form, query, options)];
}

/** The query string that reproduces the form; what has its initial value is left out, but for the choices. */
export function queryOf(form) {
  const fields = form.elements;
  const query = new URLSearchParams(LATE_CHOICES.map((name) => [name, fields[name].value]));
  if (chosenSynthetic(form) && fields[FORMAT].selectedIndex > 0) query.set(FORMAT, fields[FORMAT].value);
  for (const { control: name } of EARLY) {
    const control = fields[name];
    if (control.type === "checkbox") {
      if (control.checked) query.set(name, "1");
    } else if (control.options ? control.selectedIndex > 0 : control.value !== control.defaultValue) {
      query.set(name, control.value);
    }
  }
  for (const { name, value } of controls(form, OPTION_PREFIX)) if (value !== "") query.set(name, value);
  for (const { name, type, checked, value } of controls(form, LAUNCH_PREFIX).filter(isChanged))
    query.set(name, type === "checkbox" ? String(checked) : value);
  return query;
}

function fill(form, query, names) {
  return [...names].flatMap((name) => {
    const value = query.get(name);
    return value === null || setControl(form.elements[name], value)
      ? []
      : [`The link asks for ${name}=${value}, which is not there.`];
  });
}

function setControl(control, value) {
  if (!control) return false;
  if (control.type === "checkbox") {
    control.checked = ["1", "true", "on"].includes(value.toLowerCase());
    return true;
  }
  const options = control instanceof RadioNodeList ? [...control] : control.options ? [...control.options] : [control];
  if (options[0] !== control && !options.some((option) => option.value === value && !option.disabled)) return false;
  control.value = value;
  options[0].dispatchEvent(new Event("change", { bubbles: true }));
  return control.value === value;
}

/** "###|\n\n" → ["###", "␤␤"]: parts between bars; \n, \t and \\ are written as in code, \| is a bar. */
function stopStrings(text) {
  const escapes = { n: "\n", t: "\t" };
  const parts = text.match(/(?:\\.|[^|])+/gs) ?? [];
  return parts.map((part) => part.replace(/\\(.)/gs, (_, letter) => escapes[letter] ?? letter));
}
