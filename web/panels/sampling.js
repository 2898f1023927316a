import { runFields } from "../controls.js";
import { element } from "../dom.js";
import { hasIds } from "../form.js";

/** How tokens are chosen, and when the answer ends. */
export const sampling = {
  id: "sampling",
  title: "Sampling and length",
  mount(root) {
    const fields = element("div", { className: "fields" }, ...runFields("sampling"));
    for (const type of ["input", "change"]) fields.addEventListener(type, askForText);
    root.querySelector(".body").append(fields);
  },
};

/** The text of the prompt is needed unless there are ids. */
function askForText({ target }) {
  const { elements } = target.form;
  elements.prompt.required = !hasIds(elements);
}
