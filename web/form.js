/** The form ↔ the request of docs/architecture.md ↔ the query string. Names of controls are the contract. */

const NUMBERS = ["tokens", "context", "temperature", "top_k", "top_p", "seed", "top_logits"];
const TEXTS = ["prompt", "stop"];
const CHOICES = ["model", "kv", "policy", "eos"];
const SWITCHES = ["raw"];
/** Radios that exist only once Python has told what there is. */
const LATE_CHOICES = ["kv", "policy"];

/** The request that the form describes now. An empty number is null: the default of the package. */
export function readRequest(form) {
  const fields = form.elements;
  const numbers = NUMBERS.map((name) => [name, fields[name].value === "" ? null : Number(fields[name].value)]);
  return {
    prompt: fields.prompt.value,
    raw: fields.raw.checked,
    policy: fields.policy.value,
    kv: fields.kv.value,
    ...Object.fromEntries(numbers),
    ban_eos: fields.eos.value === "ban",
    ignore_eos: fields.eos.value === "ignore",
    stop: stopStrings(fields.stop.value),
  };
}

/** The model that the form describes now, as the `load` message wants it; null when no file has been chosen. */
export function readModel(form, manifest) {
  const fields = form.elements;
  if (fields.model.value === "file") {
    const [file] = fields.file.files;
    return file ? { kind: "file", file, name: file.name } : null;
  }
  const { file, name, sha256 } = manifest.models.find(({ id }) => id === fields.model.value);
  return { kind: "url", url: new URL(file, document.baseURI).href, name, sha256 };
}

/** Set what is there already from a query string; returns a sentence for each value that cannot be set. */
export function applyQuery(form, query) {
  return fill(form, query, [...NUMBERS, ...TEXTS, ...SWITCHES, "model", "eos"]);
}

/** The same for the choices that arrive with the environment. */
export function applyLateQuery(form, query) {
  return fill(form, query, LATE_CHOICES);
}

/** The query string that reproduces the form; what has its initial value is left out, but for the choices. */
export function queryOf(form) {
  const fields = form.elements;
  const query = new URLSearchParams(CHOICES.map((name) => [name, fields[name].value]));
  for (const name of [...NUMBERS, ...TEXTS]) {
    if (fields[name].value !== fields[name].defaultValue) query.set(name, fields[name].value);
  }
  for (const name of SWITCHES) if (fields[name].checked) query.set(name, "1");
  return query;
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
    control.checked = ["1", "true", "on"].includes(value);
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
