import { announcer, element, onNextFrame } from "../dom.js";
import { bytes, milliseconds, number, plural } from "../format.js";
import { FROM_WORKER, ON_PAGE, TO_WORKER } from "../messages.js";
import { summarise } from "../runs.js";

const FIRST_PROMPT = "Why does the sky look blue? Answer in two sentences.";
const ENDINGS = {
  stop: "the model ended its answer",
  length: "the number of tokens was reached",
  stop_string: "a stop text was reached",
  cancelled: "you stopped it",
};

/** The prompt, Run and Stop, how far things are, the answer as it comes, and the figures of the run. */
export const answer = {
  id: "answer-panel",
  title: "Prompt",
  mount(root, bus) {
    root.querySelector(".body").append(promptRow(bus), progressRow(bus), answerText(bus), figures(bus));
  },
};

function promptRow(bus) {
  const prompt = element("textarea", {
    id: "prompt",
    name: "prompt",
    rows: 2,
    defaultValue: FIRST_PROMPT,
    required: true,
  });
  prompt.setAttribute("aria-labelledby", "answer-panel-title");
  prompt.classList.add("model-only");
  bus.on(ON_PAGE.KIND, ({ workload }) => {
    prompt.disabled = workload !== null; // and so not required
    prompt.closest(".panel").querySelector("h2").textContent = workload ? `Workload ${workload}` : "Prompt";
  });
  const run = element(
    "button",
    { type: "submit", id: "run", className: "primary", disabled: true, title: "Ctrl+Enter or ⌘+Enter in the prompt" },
    "Run",
  );
  const cancel = element("button", { type: "button", id: "cancel", disabled: true, title: "Esc" }, "Stop");

  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if (!run.disabled) prompt.form.requestSubmit(run);
  });
  cancel.addEventListener("click", () => bus.emit({ type: TO_WORKER.CANCEL }));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !cancel.disabled) bus.emit({ type: TO_WORKER.CANCEL });
  });
  bus.on(TO_WORKER.CANCEL, () => (cancel.textContent = "Stop now"));
  bus.on(ON_PAGE.STATE, ({ state, canRun }) => {
    const busy = ["loading", "running", "replaying"].includes(state);
    const hadFocus = document.activeElement === (busy ? run : cancel);
    run.disabled = !canRun;
    cancel.disabled = !busy;
    cancel.textContent = "Stop";
    if (hadFocus) (busy ? cancel : run).focus(); // a disabled button would drop the keyboard user
  });
  return element("div", { className: "prompt" }, prompt, element("div", { className: "buttons" }, run, cancel));
}

/** One visible line with a bar, and the same for screen readers once a second. */
function progressRow(bus) {
  const line = element("span", { id: "status" }, "Starting …");
  const bar = element("progress", { hidden: true });
  bar.setAttribute("aria-labelledby", "status");
  const spoken = element("p", { className: "visually-hidden", role: "status" });
  const speak = announcer(spoken);
  let text = "";
  let wanted = 0;
  const show = (next) => {
    line.textContent = next;
    speak(next);
  };

  bus.on(FROM_WORKER.PHASE, (message) => {
    if (message.phase === "ready") return; // the state says it better
    text = message.text;
    bar.hidden = true;
    show(text);
  });
  bus.on(FROM_WORKER.PROGRESS, ({ done, total, unit }) => {
    bar.hidden = false;
    if (total === null) bar.removeAttribute("value");
    else Object.assign(bar, { max: total, value: done });
    show(`${text}: ${amount(done, total, unit)}`);
  });
  bus.on(TO_WORKER.RUN, ({ request }) => (wanted = request.tokens));
  bus.on(FROM_WORKER.TOKEN, ({ token }) => {
    if (!token) return; // the last characters, held back until it was clear that no stop text begins in them
    bar.hidden = false;
    Object.assign(bar, { max: wanted, value: token.index + 1 });
    show(`Token ${number(token.index + 1)} of at most ${number(wanted)} · ${milliseconds(token.ms)}`);
  });
  bus.on(FROM_WORKER.DONE, ({ record }) => {
    bar.hidden = true;
    show(`${plural(record.token_ids.length, "token")}; ${ENDINGS[record.finish_reason] ?? record.finish_reason}.`);
  });
  bus.on(ON_PAGE.STATE, ({ state }) => {
    if (["booting", "loading", "running", "replaying"].includes(state)) return;
    bar.hidden = true;
    if (state === "ready") show("Ready. Ctrl+Enter (⌘+Enter) in the prompt runs, Esc stops.");
    if (state === "error") show("Stopped by an error; it is described at the top of the page.");
  });
  return element("div", { className: "progress" }, line, bar, spoken);
}

function amount(done, total, unit) {
  const write = unit === "bytes" ? bytes : number;
  const noun = unit === "bytes" ? "" : ` ${unit}`;
  return total === null ? `${write(done)}${noun}` : `${write(done)} of ${write(total)}${noun}`;
}

/** The text is appended to one text node, at most once per frame. */
function answerText(bus) {
  const node = document.createTextNode("");
  const region = element(
    "div",
    { id: "answer", className: "answer model-only", tabIndex: 0, role: "region", "aria-label": "Answer", "aria-busy": "false" },
    node,
  );
  let pending = "";
  const draw = onNextFrame(() => {
    const follows = region.scrollTop + region.clientHeight >= region.scrollHeight - 4; // the reader has not scrolled up
    node.appendData(pending);
    pending = "";
    if (follows) region.scrollTop = region.scrollHeight;
  });

  bus.on(TO_WORKER.RUN, () => {
    pending = "";
    node.data = "";
  });
  bus.on(FROM_WORKER.TOKEN, ({ text }) => {
    pending += text;
    if (text) draw();
  });
  bus.on(FROM_WORKER.DONE, ({ record }) => {
    pending = "";
    node.data = record.text;
  });
  bus.on(ON_PAGE.STATE, ({ state }) => region.setAttribute("aria-busy", String(state === "running")));
  return region;
}

function figures(bus) {
  const list = element("dl", { className: "figures", hidden: true });
  const note = element("p", { className: "note", hidden: true });
  let run = null;
  const draw = onNextFrame(() => {
    list.hidden = note.hidden = !run?.tokens.length;
    if (list.hidden) return;
    const now = summarise(run);
    list.replaceChildren(
      figure(milliseconds(now.median_ms), "median per token"),
      figure(milliseconds(now.tail.value), now.tail.name === "p99" ? "p99" : "slowest token"),
      figure(number(now.tokens_per_s), "tokens/s"),
      figure(milliseconds(now.ttft_ms), "first token"),
      figure(number(now.created_per_token), "buffers created/token"),
      figure(`${number(now.reserved_ratio)}×`, "reserved ÷ in use"),
    );
    const rest = run.request.workload
      ? "the fill and the two steps after it, in which every policy makes its first tensors, do not count"
      : "the prefill counts as the first token only";
    note.textContent = `Run ${run.name}: ${plural(now.n, "decode step")}; ${rest}.`;
  });
  bus.on(ON_PAGE.RUNS, ({ current }) => {
    run = current;
    draw();
  });
  return element("div", {}, list, note);
}

function figure(value, label) {
  return element("div", {}, element("dt", {}, label), element("dd", {}, value));
}
