import { numberInput, OPTION_PREFIX, runFields, select } from "../controls.js";
import { element, field } from "../dom.js";
import { number } from "../format.js";
import { FROM_WORKER, ON_PAGE } from "../messages.js";
import { summarise } from "../runs.js";

const DEFAULTS = { kv: "grow", policy: "adaptive" };

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
      element("div", {}, element("div", { className: "fields" }, ...runFields("budget")), options),
    );
    root.querySelector(".body").append(waiting, modes, modeSummary, ...runFields("cache"), policies, details);

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

/** One option of the chosen policy; an empty control is the package's default, which it shows. */
function optionField({ name, kind, default: initial, summary, minimum, maximum, choices }) {
  const shared = { name: OPTION_PREFIX + name, dataset: { kind } };
  if (kind === "choice" || kind === "bool") {
    const values = kind === "bool" ? ["true", "false"] : choices;
    return field(name, summary, select(shared, ["", ...values], { "": `${initial} (default)` }));
  }
  if (kind === "limits") {
    const text = element("input", { type: "text", autocomplete: "off", placeholder: "4 MiB:64, 8 MiB:64", ...shared });
    return field(name, `${summary}. Default: ${initial}`, text, "wide");
  }
  return field(name, summary, numberInput({ kind, minimum, maximum }, { placeholder: String(initial), ...shared }));
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
