import { element, field } from "../dom.js";
import { acceptDrops } from "../drops.js";
import { bytes, number } from "../format.js";
import { FROM_WORKER, ON_PAGE } from "../messages.js";

/**
 * Which model: one that this build ships, or a local file, by button or dropped anywhere on the page; a published shape
 * with random weights, made on the GPU; or a workload that needs none.
 */
export const model = {
  id: "model",
  title: "Model",
  mount(root, bus) {
    const body = root.querySelector(".body");
    const choices = element("div", { className: "options", role: "radiogroup", "aria-labelledby": "model-title" });
    const file = element("input", {
      type: "file",
      id: "file",
      name: "file",
      accept: ".gguf",
      className: "visually-hidden",
    });
    const fileNote = element("small");
    const loaded = element("p", { className: "note", hidden: true });
    const local = option("file", "Your .gguf file", fileNote, "");
    choices.append(
      local,
      element(
        "div",
        { className: "pick" },
        file,
        element("label", { className: "button", htmlFor: "file" }, "Choose a file …"),
      ),
    );
    const synthetic = syntheticModels();
    choices.append(synthetic.node);
    body.append(choices, loaded);

    const showFile = () => {
      const [chosen] = file.files;
      fileNote.textContent = chosen ? chosen.name : "or drop one anywhere on this page; it stays on your machine";
      local.querySelector(".aside").textContent = chosen ? bytes(chosen.size) : "";
      if (chosen) local.querySelector("input").checked = true;
    };
    file.addEventListener("change", showFile);
    showFile();
    acceptDrops(file, bus);

    bus.on(ON_PAGE.MANIFEST, ({ manifest }) => {
      const shipped = manifest?.models ?? [];
      const options = shipped.map((entry) =>
        option(entry.id, entry.name, `${entry.licence} · read when you press Run`, bytes(entry.bytes)),
      );
      choices.prepend(...options);
      const first = options[0] ?? local;
      if (!file.files.length) first.querySelector("input").checked = true;
      if (!shipped.length)
        body.prepend(
          element("p", { className: "note" }, "This build ships no model. Choose a .gguf file of your own."),
        );
    });
    bus.on(FROM_WORKER.ENVIRONMENT, ({ workloads, synthetic: listed = [] }) => {
      if (choices.querySelector("[data-workload]")) return; // a restarted worker
      const options = workloads.map(({ name, summary }) => option(name, `KV pattern ${name}`, summary, "0 MB"));
      options.forEach((node, i) => (node.querySelector("input").dataset.workload = workloads[i].name));
      local.before(...options);
      synthetic.list(listed);
    });
    bus.on(FROM_WORKER.MODEL, (message) => {
      loaded.textContent = describe(message.model);
      loaded.hidden = false;
    });
  },
};

/** The group of the synthetic models, hidden until it is told which there are; one format for all of them. */
function syntheticModels() {
  const format = element("select", { name: "format" });
  const title = element("p", { id: "synthetic-title" }, "Synthetic (no download)");
  const note = element("p", { className: "note" }, "published shapes, random weights, made on the GPU when you press Run");
  const label = field("Weights", "the tensor format whose layout the random weights have in GPU memory", format);
  const node = element("div", { className: "synthetic", role: "group", hidden: true }, title, note, label);
  node.setAttribute("aria-labelledby", title.id);

  const list = (models) => {
    if (!models.length) return;
    const formats = Object.keys(models[0].sizes);
    format.replaceChildren(...formats.map((name) => element("option", { value: name }, name)));
    const options = models.map(({ name, title }) => {
      const made = option(name, title, "", "");
      made.querySelector("input").dataset.synthetic = name;
      return made;
    });
    const showSizes = () =>
      models.forEach(({ sizes }, i) => (options[i].querySelector(".aside").textContent = bytes(sizes[format.value])));
    format.addEventListener("change", showSizes);
    showSizes();
    label.before(...options);
    node.hidden = false;
  };
  return { node, list };
}

function describe({
  name,
  architecture,
  layers,
  kv_heads: heads,
  head_dim: dim,
  context_length: context,
  bytes: size,
  tensor_types: types,
}) {
  const tensors = Object.entries(types).map(([type, count]) => `${number(count)} ${type}`);
  return (
    `Loaded: ${name}. ${architecture}, ${layers} layers, ${heads} KV heads of ${dim}, context ${number(context)}, ` +
    `${bytes(size)}; tensors: ${tensors.join(", ")}.`
  );
}

function option(value, title, note, aside) {
  return element(
    "label",
    { className: "option" },
    element("input", { type: "radio", name: "model", value, required: true }),
    element("span", {}, title, note instanceof Node ? note : element("small", {}, note)),
    element("span", { className: "aside" }, aside),
  );
}
