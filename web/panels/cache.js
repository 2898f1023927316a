import { element, field } from "../dom.js";
import { OPTION_PREFIX } from "../form.js";
import { number } from "../format.js";
import { FROM_WORKER, ON_PAGE } from "../messages.js";
import { summarise } from "../runs.js";

const DEFAULTS = { kv: "grow", policy: "adaptive" };
/** What K and V can be stored in; the default first. */
const KV_TYPES = ["f32", "f16"];

/** How the KV cache is kept and which policy serves its buffers; both are listed by the package itself. */
export const cache = {
  id: "cache",
  title: "KV cache and policy",
  mount(root, bus) {
    const modes = element("div", { className: "segments", role: "radiogroup", "aria-label": "KV cache mode" });
    const modeSummary = element("p", { className: "note", id: "kv-summary" });
    const policies = element("div", { className: "options", role: "radiogroup", "aria-label": "Cache policy" });
    const waiting = element("p", { className: "note" }, "Listed as soon as Python runs.");
    const options = element("div", { className: "fields" });
    const details = element(
      "details",
      { hidden: true },
      element("summary", {}, "Budget and the policy's options"),
      element("div", {}, budgetFields(), options),
    );
    root.querySelector(".body").append(waiting, modes, modeSummary, typeField(), policies, details);

    bus.on(FROM_WORKER.ENVIRONMENT, ({ policies: foundPolicies, kv_modes: foundModes }) => {
      if (modes.childElementCount) return; // a restarted worker: keep what is chosen
      waiting.remove();
      modes.append(...foundModes.map(({ name }) => segment(name)));
      policies.append(...foundPolicies.map(({ name, summary }) => option(name, summary)));
      const showMode = () => {
        const chosen = modes.querySelector(":checked")?.value;
        modeSummary.textContent = foundModes.find(({ name }) => name === chosen)?.summary ?? "";
      };
      modes.addEventListener("change", showMode);
      showMode();
      const showOptions = () => {
        const chosen = policies.querySelector(":checked")?.value;
        const policy = foundPolicies.find(({ name }) => name === chosen);
        options.replaceChildren(...(policy?.options ?? []).map(optionField));
      };
      policies.addEventListener("change", showOptions);
      showOptions();
      details.hidden = false;
    });
    bus.on(ON_PAGE.RUNS, ({ runs }) => showMeasured(policies, runs));
  },
};

/** Beside each policy: buffers created per token in its newest run on this page. */
function showMeasured(policies, runs) {
  for (const aside of policies.querySelectorAll(".aside")) {
    const run = runs.findLast(({ request, steps }) => request.policy === aside.dataset.policy && steps.length > 0);
    aside.textContent = run ? `${number(summarise(run).created_per_token)} /token` : "";
    aside.title = run ? `buffers created per token, mean of ${run.steps.length} steps of run ${run.label}` : "";
  }
}

/** Numbers of K and V in memory; kernels compute in f32 either way. */
function typeField() {
  return field(
    "K and V stored as",
    "f16: half the memory of the KV cache, half the bytes that attention reads, 11 bits of precision up to 65,504",
    element("select", { name: "kv_type" }, ...KV_TYPES.map((value) => element("option", { value }, value))),
    "model-only",
  );
}

/** The pool's own limit, whatever the policy. */
function budgetFields() {
  const budget = element("input", { type: "number", name: "budget", min: 1, step: 1, placeholder: "none" });
  const hard = element("input", { type: "checkbox", name: "hard" });
  return element(
    "div",
    { className: "fields" },
    field("Budget, MiB", "what the pool may reserve in all; empty: no limit", budget),
    element("label", { className: "check" }, hard, element("span", {}, "Fail rather than exceed it")),
  );
}

/** One option of the chosen policy; an empty control is the package's default, which it shows. */
function optionField({ name, kind, default: initial, summary, minimum, maximum, choices }) {
  const shared = { name: OPTION_PREFIX + name, dataset: { kind } };
  if (kind === "choice" || kind === "bool") {
    const values = kind === "bool" ? ["true", "false"] : choices;
    const first = element("option", { value: "" }, `${initial} (default)`);
    const all = [first, ...values.map((value) => element("option", { value }, value))];
    return field(name, summary, element("select", shared, ...all));
  }
  if (kind === "limits") {
    const text = element("input", { type: "text", autocomplete: "off", placeholder: "4 MiB:64, 8 MiB:64", ...shared });
    return field(name, `${summary}. Default: ${initial}`, text, "wide");
  }
  const range = { min: minimum, max: maximum, step: kind === "int" ? 1 : "any", inputMode: "decimal" };
  return field(name, summary, element("input", { type: "number", placeholder: String(initial), ...range, ...shared }));
}

function segment(name) {
  const input = element("input", {
    type: "radio",
    name: "kv",
    value: name,
    required: true,
    checked: name === DEFAULTS.kv,
  });
  input.setAttribute("aria-describedby", "kv-summary");
  return element("label", {}, input, element("span", {}, name));
}

function option(name, summary) {
  return element(
    "label",
    { className: "option" },
    element("input", { type: "radio", name: "policy", value: name, required: true, checked: name === DEFAULTS.policy }),
    element("span", {}, name, element("small", {}, summary)),
    element("span", { className: "aside", dataset: { policy: name } }),
  );
}
