import { rowOf, runControl } from "../controls.js";
import { element } from "../dom.js";
import { bytes, number } from "../format.js";
import { FROM_WORKER, ON_PAGE } from "../messages.js";
import { readRequest } from "../form.js";
import { comparisonOf, CONTROL } from "./comparison.js";

const ROUNDS = 2;
/** Arms that a comparison has at first: what everyone asks about. */
const FIRST_ARMS = new Set(["adaptive", "bucket", CONTROL]);

/** Where a workload starts and ends, and several policies in turns. Shown while a workload is chosen. */
export const pattern = {
  id: "pattern",
  title: "Growing KV tensors, no model",
  mount(root, bus) {
    root.classList.add("workload-only");
    const form = root.closest("form");
    const first = rowOf("start");
    const start = runControl(first, { defaultValue: first.empty, required: true, disabled: true });
    const end = count({ id: "pattern-end", required: true });
    const size = element("p", { className: "note", "aria-live": "polite" });
    const arms = element("div", { className: "arms", role: "group", "aria-label": "Arms of the comparison" });
    const rounds = count({ id: "rounds", defaultValue: ROUNDS, max: 20, required: true });
    const compare = element("button", { type: "button", id: "compare", disabled: true }, "Compare");
    root
      .querySelector(".body")
      .append(
        element(
          "div",
          { className: "fields three" },
          field(first.label, start),
          field("To position", end),
          field("Rounds to compare", rounds),
        ),
        size,
        element("div", { className: "row" }, arms, compare),
      );

    let workloads = [];
    let limits = null;
    const chosen = () => workloads.find(({ name }) => name === form.dataset.workload);
    const show = () => {
      const problem = limits && chosen() ? tooLarge(chosen(), Number(end.value), limits) : "";
      end.setCustomValidity(chosen() ? problem : "");
      size.textContent = chosen() ? problem || describe(chosen(), Number(start.value), Number(end.value)) : "";
    };
    const tokens = () => form.elements.tokens;
    const follow = () => {
      end.min = start.value;
      end.value = Number(start.value) + Number(tokens().value) - 1;
      show();
    };
    start.addEventListener("input", follow);
    end.addEventListener("input", () => {
      tokens().value = Math.max(1, Number(end.value) - Number(start.value) + 1);
      show();
    });
    form.addEventListener("input", ({ target }) => target.name === "tokens" && follow());
    compare.addEventListener("click", () => {
      if (!form.reportValidity()) return;
      const picked = [...arms.querySelectorAll(":checked")].map(({ value }) => value);
      bus.emit({ type: ON_PAGE.COMPARE, requests: comparisonOf(readRequest(form), picked, Number(rounds.value)) });
    });

    bus.on(FROM_WORKER.ENVIRONMENT, ({ workloads: found, policies, limits: granted }) => {
      workloads = found;
      limits = granted;
      if (!arms.childElementCount) arms.append(...[...policies.map(({ name }) => name), CONTROL].map(arm));
    });
    bus.on(ON_PAGE.KIND, ({ workload }) => {
      for (const control of [start, end, rounds]) control.disabled = workload === null;
      follow();
    });
    bus.on(ON_PAGE.STATE, ({ canRun }) => (compare.disabled = !canRun));
  },
};

function describe({ tensors, position_bytes: width }, start, end) {
  if (!(end >= start && start >= 1)) return "";
  return (
    `${number(tensors)} tensors grow from ${bytes(start * width)} to ${bytes(end * width)} each; with the past beside ` +
    `them they hold ${bytes(2 * tensors * end * width)}. Their sums are checked at every token. “static” is the control: ` +
    "the same commands on tensors that are allocated once."
  );
}

/** Why this device cannot hold the last tensor, or "". */
function tooLarge({ name, position_bytes: width }, end, limits) {
  const limit = Math.min(limits.maxBufferSize, limits.maxStorageBufferBindingSize);
  if (end * width <= limit) return "";
  return (
    `${name} up to ${number(end)} positions needs tensors of ${bytes(end * width)}; this device allows ` +
    `${bytes(limit)}: ${number(Math.floor(limit / width))} positions.`
  );
}

function count(properties) {
  return element("input", { type: "number", min: 1, step: 1, inputMode: "numeric", disabled: true, ...properties });
}

function field(label, control) {
  return element("label", { className: "field" }, element("span", {}, label), control);
}

function arm(name) {
  return element(
    "label",
    { className: "check" },
    element("input", { type: "checkbox", value: name, checked: FIRST_ARMS.has(name) }),
    element("span", {}, name === CONTROL ? `${CONTROL} (control)` : name),
  );
}
