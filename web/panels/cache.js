import { element } from "../dom.js";
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
    root.querySelector(".body").append(waiting, modes, modeSummary, policies);

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
