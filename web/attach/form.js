/** The example's controls: what to run and how to attach, Start and Stop, and how far it is. */
import { announcer, element, field } from "../dom.js";
import { TENSORS, WORKLOADS } from "../models/onnx/models.js";

const ZEROS = [
  ["always", "always: as WebGPU promises"],
  ["never", "never: old contents may show"],
];
const NAMES = ["model", "start", "steps", "rounds", "policy", "zero", "budget"];

/**
 * `acts` has `start`, `record` and `stop`, and `check(request)` → `{problem, note}` of the sizes. Returns what the page does
 * with the form: `offer`, `fill`, `read`, `query`, `setState`, `say`, `progress`.
 */
export function mountForm(form, acts) {
  const model = select("model", WORKLOADS.map((name) => [name, `${TENSORS[name]} growing tensors`]));
  const start = count("start", 1, 1_000_000);
  const steps = count("steps", 6, 1000);
  const rounds = count("rounds", 1, 20);
  const policy = select("policy", []);
  const zero = select("zero", ZEROS);
  const budget = count("budget", 1, 1 << 20);
  budget.required = false;
  budget.placeholder = "none";
  const note = element("p", { className: "note", "aria-live": "polite" });
  const go = button("run", "Start", "submit", "primary");
  const record = button("record", "Record a trace");
  record.title = "one run of the runtime as it is, with stepwell.attach({ record: true })";
  const stop = button("stop", "Stop");
  stop.title = "Esc";
  const line = element("span", { id: "status" }, "Starting …");
  const spoken = element("p", { className: "visually-hidden", role: "status" });
  const speak = announcer(spoken);
  const bar = element("progress", { hidden: true });
  bar.setAttribute("aria-labelledby", "status");

  document.getElementById("side").append(
    panel(
      "workload",
      "onnxruntime-web",
      field("Model", "an ONNX graph whose K and V grow by a position per step", model),
      element(
        "div",
        { className: "fields" },
        field("From position", "positions that K and V have before the first step; ONNX Runtime's cliffs are at 2,048, 4,096 and 6,144", start),
        field("Steps", "per arm and round; the first four, in which every pool fills, do not count", steps),
        field("Rounds", "each runs all three arms, in an order that rotates", rounds),
      ),
      note,
    ),
    panel(
      "attached",
      "stepwell.attach",
      field("Policy", "which buffers are kept: docs/pool.md describes them", policy),
      field("Zero", "whether a buffer that is handed out again is cleared first", zero),
      field("Budget, MiB", "that the pool may reserve; empty: no limit", budget),
    ),
  );
  document.getElementById("work").append(
    panel(
      "control",
      "Off, on, and static",
      element(
        "p",
        {},
        "The same steps of the same model three times: onnxruntime-web as it is, with stepwell attached under it, and with K and V in " +
          "tensors that are allocated once, as a control.",
      ),
      element("div", { className: "row start" }, go, stop, record),
      element("div", { className: "progress" }, line, bar, spoken),
    ),
  );

  const read = () => {
    const attach = { policy: policy.value, zero: zero.value };
    if (budget.value !== "") attach.budget = Number(budget.value) * 2 ** 20;
    const sizes = { start: Number(start.value), steps: Number(steps.value), rounds: Number(rounds.value) };
    return { model: model.value, ...sizes, attach };
  };
  const check = () => {
    const found = acts.check(read());
    start.setCustomValidity(found.problem);
    note.textContent = found.problem || found.note;
  };
  form.addEventListener("input", check);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!go.disabled) acts.start();
  });
  record.addEventListener("click", () => form.reportValidity() && acts.record());
  const halt = () => {
    stop.textContent = "Stopping …";
    acts.stop();
  };
  stop.addEventListener("click", halt);
  addEventListener("keydown", (event) => event.key === "Escape" && !stop.disabled && halt());

  return {
    offer: (policies) => policy.replaceChildren(...choices(policies.map((name) => [name, name]))),
    fill(values) {
      for (const name of NAMES.filter((known) => known in values)) form.elements[name].value = values[name];
      check();
    },
    read,
    query: () => new URLSearchParams(NAMES.map((name) => [name, form.elements[name].value])),
    setState(state, canRun) {
      const busy = state === "running";
      const hadFocus = document.activeElement === (busy ? go : stop);
      go.disabled = record.disabled = !canRun;
      stop.disabled = !busy;
      stop.textContent = "Stop";
      bar.hidden = !busy;
      bar.removeAttribute("value");
      if (hadFocus) (busy ? stop : go).focus(); // a disabled button would drop the keyboard user
      if (state === "ready") this.say("Ready. Enter starts, Esc stops.");
    },
    say(text) {
      line.textContent = text;
      speak(text);
    },
    progress: (done, total) => Object.assign(bar, { max: total, value: done }),
  };
}

export function panel(id, title, ...content) {
  const head = element(
    "div",
    { className: "head" },
    element("h2", { id: `${id}-title` }, title),
    element("div", { className: "actions" }),
  );
  return element(
    "section",
    { id, className: "panel", "aria-labelledby": `${id}-title` },
    head,
    element("div", { className: "body" }, ...content),
  );
}

function count(name, min, max) {
  return element("input", { type: "number", name, min, max, step: 1, required: true, inputMode: "numeric" });
}

function select(name, options) {
  return element("select", { name }, ...choices(options));
}

function choices(options) {
  return options.map(([value, text]) => element("option", { value }, text));
}

function button(id, text, type = "button", className = "") {
  return element("button", { id, type, className, disabled: true }, text);
}
