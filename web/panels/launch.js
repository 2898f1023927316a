import { saveText } from "../clipboard.js";
import { inTurns } from "../comparing.js";
import { LAUNCH_PREFIX, numberInput, runFields, select, switchOf } from "../controls.js";
import { element, field, onNextFrame } from "../dom.js";
import { readRequest, setLaunch } from "../form.js";
import { number, percent } from "../format.js";
import { readListing, replayShare } from "../launch.js";
import { FROM_WORKER, ON_PAGE, TO_WORKER } from "../messages.js";
import { summarise } from "../runs.js";
import { AB } from "./ab.js";

const ROUNDS = 3;
const MOST_ROUNDS = 12; // two arms of so many rounds: what runs.js keeps
/** What people call an option; one that is not listed goes by its own name. */
const TITLES = {
  shared_pass: "Shared compute pass",
  bind_group_cache: "Bind-group cache",
  skip_uploads: "Skip equal uploads",
  replay: "Replay the recorded plan",
  width_ladder: "Prefill in fixed widths",
  submit_every: "Dispatches/submit",
  submit_every_ms: "ms/submit",
  params: "Step's scalars by",
  readback_depth: "Ids lag, steps",
  bind_groups: "Bind groups kept",
  variants_per_node: "Variants per node",
  kernels: "Kernels",
  fused: "Fused decode steps",
  subgroups: "Subgroups",
  dot4: "Integer products",
  f16: "Prompts in f16",
};
/** Beside a switch: what it is about, per token of the newest run. */
const MEASURED = {
  shared_pass: ({ median_of: of }) => count(of("passes"), "pass", "es"),
  bind_group_cache: ({ median_of: of }) => `${number(of("bind_groups_created"))} new`,
  skip_uploads: ({ median_of: of }) => count(of("uploads"), "upload", "s"),
  replay: (_, { replayed }, n) => percent(replayed / n),
};

/** How steps are launched: the package's switches, what they cost in the newest run, and the A/B of them against main. */
export const launch = {
  id: "launch",
  title: "Launch path",
  mount(root, bus) {
    root.hidden = true; // until a worker lists its options
    const form = root.closest("form");
    const switches = element("div", { className: "options", role: "group", "aria-labelledby": "launch-title" });
    const fields = element("div", { className: "fields" });
    const measurements = runFields("launch", switchOf);
    const details = element(
      "details",
      {},
      element("summary", {}, "Kernels, submission, scalars, bounds, measuring"),
      element("div", {}, fields, element("div", { className: "options" }, ...measurements)),
    );
    disable(measurements, true);
    details.addEventListener("invalid", () => (details.open = true), true); // what is wrong must be seen
    root.querySelector(".body").append(switches, details, comparing(form, bus), traceButton(bus));

    bus.on(FROM_WORKER.ENVIRONMENT, (message) => {
      const { options, arms } = readListing(message);
      root.hidden = options.length === 0;
      disable(measurements, root.hidden);
      if (root.hidden || switches.childElementCount) return; // a restarted worker: keep what is chosen
      const isSwitch = ({ kind }) => kind === "bool";
      switches.append(...options.filter(isSwitch).map(switchRow));
      fields.append(...options.filter((option) => !isSwitch(option)).map(optionField));
      root
        .querySelector(".actions")
        .append(
          ...(arms.length ? [setter(`All off (${arms[0].name})`, form, arms[0].launch)] : []),
          setter("Defaults", form, {}),
        );
    });
    let newest = null;
    const draw = onNextFrame(() => showMeasured(switches, newest));
    bus.on(ON_PAGE.RUNS, ({ runs }) => {
      newest = runs.findLast(({ steps }) => steps.length > 0) ?? null;
      draw();
    });
  },
};

function showMeasured(switches, run) {
  const summary = run && summarise(run);
  for (const aside of switches.querySelectorAll(".aside")) {
    const write = MEASURED[aside.dataset.option];
    aside.textContent = run && write ? write(summary, replayShare(run.steps), run.steps.length) : "";
    aside.title = aside.textContent ? `per token, median of ${run.steps.length} steps of run ${run.label}` : "";
  }
}

function count(value, noun, ending) {
  return `${number(value)} ${noun}${value === 1 ? "" : ending}`;
}

function title(name) {
  return TITLES[name] ?? name.replaceAll("_", " ");
}

function switchRow({ name, kind, initial, summary }) {
  const box = element("input", {
    type: "checkbox",
    name: LAUNCH_PREFIX + name,
    defaultChecked: initial,
    dataset: { kind, initial },
  });
  return element(
    "label",
    { className: "option" },
    box,
    element("span", {}, title(name)),
    element("span", { className: "aside", dataset: { option: name } }),
    element("small", {}, summary),
  );
}

/** A number or a choice. An empty number is the default, which it shows. */
function optionField({ name, kind, initial, summary, choices, minimum, maximum }) {
  const shared = { name: LAUNCH_PREFIX + name, dataset: { kind, initial: initial ?? "" } };
  if (kind === "choice") {
    return field(title(name), summary, select(shared, choices, { [initial]: `${initial} (default)` }, initial), "wide");
  }
  const placeholder = initial === null ? "auto" : String(initial);
  return field(title(name), summary, numberInput({ kind, minimum, maximum }, { placeholder, ...shared }));
}

function disable(switches, isDisabled) {
  for (const node of switches) node.querySelector("input").disabled = isDisabled;
}

function setter(label, form, options) {
  const button = element("button", { type: "button" }, label);
  button.addEventListener("click", () => setLaunch(form, options));
  return button;
}

/** The rounds and the button that runs the form's switches and main in turns. */
function comparing(form, bus) {
  const rounds = element("input", {
    type: "number",
    id: "ab-rounds",
    min: 1,
    max: MOST_ROUNDS,
    step: 1,
    defaultValue: ROUNDS,
    required: true,
    inputMode: "numeric",
  });
  const button = element("button", { type: "button", id: "ab-run", disabled: true }, "A/B");
  button.title = "The same prompt and settings in turns, with every switch off and with those chosen here";
  let main = null;
  button.addEventListener("click", () => {
    if (!form.reportValidity()) return;
    const chosen = readRequest(form);
    const arms = [
      { arm: main.name, request: withLaunch(chosen, main.launch) },
      { arm: AB.CHOSEN, request: chosen },
    ];
    bus.emit({ type: ON_PAGE.COMPARE, requests: inTurns(AB.KIND, arms, Number(rounds.value)) });
  });
  const row = element(
    "div",
    { className: "row" },
    element("label", { className: "inline" }, element("span", {}, "Rounds"), rounds),
    button,
  );
  let canRun = false;
  const enable = () => (button.disabled = !(canRun && main));
  bus.on(FROM_WORKER.ENVIRONMENT, (message) => {
    main = readListing(message).arms[0] ?? null;
    row.hidden = main === null;
    rounds.disabled = row.hidden;
    if (main) button.textContent = `A/B against ${main.name}`;
    enable();
  });
  bus.on(ON_PAGE.STATE, (message) => {
    canRun = message.canRun;
    enable();
  });
  return row;
}

function withLaunch({ launch: _, ...request }, options) {
  return { ...request, launch: options };
}

/** Shown while the newest run has a trace. */
function traceButton(bus) {
  const button = element("button", { type: "button", id: "save-trace", hidden: true }, "Download Chrome trace");
  let label = "";
  let trace = "";
  bus.on(ON_PAGE.RUNS, ({ current }) => (label = current?.label ?? ""));
  bus.on(TO_WORKER.RUN, () => (button.hidden = true));
  bus.on(FROM_WORKER.TRACE, ({ text }) => {
    trace = text;
    button.textContent = `Download Chrome trace of run ${label}`;
    button.dataset.run = label;
    button.hidden = false;
  });
  button.addEventListener("click", () => saveText(`stepwell-${button.dataset.run}-trace.json`, trace));
  return button;
}
