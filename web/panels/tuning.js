import { runFields, switchOf } from "../controls.js";
import { element, scroller, table } from "../dom.js";
import { number } from "../format.js";
import { FROM_WORKER, ON_PAGE } from "../messages.js";
import { remember } from "../remembered.js";

/** Time the kernels of the next run's model on this adapter, and keep in this browser what is faster than the rules. */
export const tuning = {
  id: "tuning",
  title: "Kernel tuning",
  mount(root, bus) {
    const note = element("p", { className: "note", hidden: true });
    const choices = element("div");
    root.classList.add("model-only");
    root.querySelector(".body").append(...runFields("tuning", switchOf), note, choices);
    bus.on(FROM_WORKER.TUNING, ({ notices, outcome, text }) => {
      for (const notice of notices) bus.emit({ type: ON_PAGE.WARNING, text: notice });
      if (!outcome) return;
      root.closest("form").elements.tune.checked = false; // once is enough
      note.textContent = `${describe(outcome)} ${remember(text) ? "Remembered in this browser." : "This browser keeps nothing: it is for this page only."}`;
      note.hidden = false;
      choices.replaceChildren(...(outcome.choices.length ? [listed(outcome.choices)] : []));
    });
  },
};

/** What is faster than the rule, and by how much. */
function listed(choices) {
  const rows = choices.map(({ before, after, format, k, n, spread, us, default_us: usual }) => [
    `${before ? `${before} + ` : ""}${after}, ${format}, ${number(n)} × ${number(k)}`,
    number(usual),
    number(us),
    Object.entries(spread)
      .map(([name, value]) => `${name} ${value}`)
      .join(", "),
  ]);
  const columns = ["Product", "Rule, µs", "Chosen, µs", "Shared out by"];
  return scroller("Tuned products", table("Products for which another way is faster than the rule's", columns, rows));
}

function describe({ products, measured, faster, complete }) {
  const all = complete ? `${products} products measured` : `${measured} of ${products} products measured in the time`;
  return `${all}; for ${faster} another way is faster than the rule's.`;
}
