/** The form ↔ the request of docs/architecture.md ↔ the query string. Names of controls are the contract. */

/** Numbers that only a model needs. */
const MODEL_NUMBERS = ["context", "temperature", "top_k", "top_p", "seed", "top_logits"];
const NUMBERS = ["tokens", "start", "budget", "prompt_length", "tune_ms", ...MODEL_NUMBERS];
const TEXTS = ["prompt", "prompt_ids", "stop"];
const CHOICES = ["model", "kv", "policy", "eos"];
/** What K and V are stored in; the default first. */
const KV_TYPE = "kv_type";
/** Formats of synthetic weights; listed once Python has told which there are, the default first. */
const FORMAT = "format";
const SWITCHES = ["raw", "hard", "digest", "gpu_time", "trace", "kernel_times", "pool_trace", "tune"];
/** Radios that exist, all of them, only once Python has told what there is. */
const LATE_CHOICES = ["model", "kv", "policy"];
/** Controls of the chosen policy's options are named by this and the option's name. */
export const OPTION_PREFIX = "option-";
/** The same of the launch path's options; a control's `data-initial` is its default, "" for automatic. */
export const LAUNCH_PREFIX = "launch-";

/** The request that the form describes now. An empty number is null: the default of the package. */
export function readRequest(form) {
  const fields = form.elements;
  const shared = {
    policy: fields.policy.value,
    kv: fields.kv.value,
    tokens: number(fields.tokens),
    ...readPool(form),
    ...readLaunch(form),
  };
  const workload = chosenWorkload(form);
  if (workload) return { workload, start: number(fields.start), ...shared };
  return {
    ...readPrompt(fields),
    raw: fields.raw.checked,
    ...shared,
    ...(fields[KV_TYPE].selectedIndex > 0 ? { kv_type: fields[KV_TYPE].value } : {}),
    ...Object.fromEntries(MODEL_NUMBERS.map((name) => [name, number(fields[name])])),
    ban_eos: fields.eos.value === "ban",
    ignore_eos: fields.eos.value === "ignore",
    stop: stopStrings(fields.stop.value),
    ...switchedOn(fields, ["digest", "kernel_times"]),
  };
}

/** The text, unless there are ids or a number of ids in its place. */
function readPrompt({ prompt, prompt_ids: ids, prompt_length: length }) {
  if (!hasIds({ prompt_ids: ids, prompt_length: length })) return { prompt: prompt.value };
  return {
    ...(ids.value === "" ? {} : { prompt_ids: ids.value.split(",").map(Number) }),
    ...(length.value === "" ? {} : { prompt_length: number(length) }),
  };
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

/** What the request says about the pool beside its policy; what has its default is left out. */
function readPool(form) {
  const options = Object.fromEntries(
    controls(form, OPTION_PREFIX)
      .filter(({ value }) => value !== "")
      .map((control) => [control.name.slice(OPTION_PREFIX.length), optionValue(control)]),
  );
  const { budget, hard } = form.elements;
  return {
    ...(Object.keys(options).length ? { policy_options: options } : {}),
    ...(budget.value === "" ? {} : { budget_mib: Number(budget.value), hard_budget: hard.checked }),
  };
}

/** What the request says about the launch path and its measurement; what has its default is left out. */
function readLaunch(form) {
  const launch = Object.fromEntries(
    controls(form, LAUNCH_PREFIX)
      .filter(isChanged)
      .map((control) => [control.name.slice(LAUNCH_PREFIX.length), optionValue(control)]),
  );
  return {
    ...(Object.keys(launch).length ? { launch } : {}),
    ...switchedOn(form.elements, ["gpu_time", "trace", "pool_trace"]),
  };
}

/** What a run that someone asked for does first; runs that are compared are not tuned in between. */
export function readTuning(form) {
  const { tune, tune_ms: budget } = form.elements;
  return tune.checked && !chosenWorkload(form) ? { tune: true, tune_ms: Number(budget.value) } : {};
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

function switchedOn(fields, names) {
  const on = names.filter((name) => fields[name].checked && !fields[name].disabled);
  return Object.fromEntries(on.map((name) => [name, true]));
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
  return fill(form, query, [...NUMBERS, ...TEXTS, ...SWITCHES, KV_TYPE, "eos"]);
}

/** The same for what arrives with the environment: the choices, then the options of the chosen policy and of launches. */
export function applyLateQuery(form, query) {
  const options = [...query.keys()].filter((name) => name.startsWith(OPTION_PREFIX) || name.startsWith(LAUNCH_PREFIX));
  return [...fill(form, query, [...LATE_CHOICES, FORMAT]), ...fill(form, query, options)];
}

/** The query string that reproduces the form; what has its initial value is left out, but for the choices. */
export function queryOf(form) {
  const fields = form.elements;
  const query = new URLSearchParams(CHOICES.map((name) => [name, fields[name].value]));
  for (const name of [...NUMBERS, ...TEXTS]) {
    if (fields[name].value !== fields[name].defaultValue) query.set(name, fields[name].value);
  }
  if (chosenSynthetic(form) && fields[FORMAT].selectedIndex > 0) query.set(FORMAT, fields[FORMAT].value);
  if (fields[KV_TYPE].selectedIndex > 0) query.set(KV_TYPE, fields[KV_TYPE].value);
  for (const name of SWITCHES) if (fields[name].checked) query.set(name, "1");
  for (const { name, value } of controls(form, OPTION_PREFIX)) if (value !== "") query.set(name, value);
  for (const { name, type, checked, value } of controls(form, LAUNCH_PREFIX).filter(isChanged))
    query.set(name, type === "checkbox" ? String(checked) : value);
  return query;
}

function number({ value }) {
  return value === "" ? null : Number(value);
}

function fill(form, query, names) {
  return names.flatMap((name) => {
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
