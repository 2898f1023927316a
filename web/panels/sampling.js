import { element, field } from "../dom.js";
import { hasIds } from "../form.js";

/** name, label, value, min, max, step, hint */
const NUMBERS = [
  ["tokens", "Tokens", 64, 1, null, 1, "how many to generate at most"],
  ["context", "Context", "", 1, null, 1, "positions the KV cache has room for; empty: prompt + tokens"],
  ["temperature", "Temperature", 0, 0, null, "any", "0: greedy, chosen on the GPU"],
  ["seed", "Seed", 0, 0, 2 ** 32 - 1, 1, "the same seed gives the same answer"],
  ["top_k", "Top-k", 0, 0, null, 1, "0: off"],
  ["top_p", "Top-p", 1, 0, 1, "any", "1: off"],
  [
    "top_logits",
    "Logits kept",
    0,
    0,
    null,
    1,
    "largest logits stored per token in the record; reading them costs time",
  ],
];

const ENDINGS = [
  ["stop", "stops"],
  ["ban", "is banned"],
  ["ignore", "is ignored"],
];

/** How tokens are chosen, and when the answer ends. */
export const sampling = {
  id: "sampling",
  title: "Sampling and length",
  mount(root) {
    root
      .querySelector(".body")
      .append(
        element(
          "div",
          { className: "fields" },
          ...NUMBERS.map(([name, label, value, min, max, step, hint]) =>
            field(
              label,
              hint,
              element("input", {
                type: "number",
                name,
                defaultValue: value,
                min,
                max,
                step,
                inputMode: "decimal",
                required: value !== "",
                placeholder: value === "" ? "auto" : null,
              }),
              name === "tokens" ? "" : "model-only",
            ),
          ),
          field(
            "End of text",
            "the model's end-of-text token stops the answer, is never chosen, or is fed back like any other",
            element("select", { name: "eos" }, ...ENDINGS.map(([value, text]) => element("option", { value }, text))),
            "model-only",
          ),
          field(
            "Stop at",
            "texts that end the answer; | between several, \\n is a line break",
            element("input", { type: "text", name: "stop", autocomplete: "off" }),
            "wide model-only",
          ),
          field(
            "Prompt as ids",
            "token ids in place of the text, such as 1,2,3; taken as they are",
            element("input", {
              type: "text",
              name: "prompt_ids",
              autocomplete: "off",
              inputMode: "numeric",
              pattern: "\\s*\\d+(\\s*,\\s*\\d+)*\\s*",
              oninput: askForText,
              onchange: askForText,
            }),
            "model-only",
          ),
          field(
            "Random ids",
            "so many pseudo-random ids in place of the text, by the seed: to time long prompts",
            element("input", {
              type: "number",
              name: "prompt_length",
              min: 1,
              step: 1,
              inputMode: "decimal",
              placeholder: "none",
              oninput: askForText,
              onchange: askForText,
            }),
            "model-only",
          ),
          element(
            "label",
            { className: "check wide model-only" },
            element("input", { type: "checkbox", name: "raw" }),
            element("span", {}, "Raw prompt, without the chat template"),
          ),
        ),
      );
  },
};

/** The text of the prompt is needed unless there are ids. */
function askForText({ target }) {
  const { elements } = target.form;
  elements.prompt.required = !hasIds(elements);
}
