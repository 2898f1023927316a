import { element, lazyDetails, table } from "../dom.js";
import { bytes, number, seconds } from "../format.js";
import { FROM_WORKER, ON_PAGE } from "../messages.js";
import { copyButton } from "../clipboard.js";

/** The header's chips: what this page runs on, in a glance. */
export const chips = {
  id: "chips",
  title: "",
  mount(root, bus) {
    bus.on(FROM_WORKER.ENVIRONMENT, ({ environment: found, boot_ms: bootMs, limits }) => {
      const { adapter } = found;
      root.replaceChildren(
        chip(bold(adapterName(adapter)), adapterTraits(found)),
        chip(
          "limits ",
          bold(bytes(limits.maxStorageBufferBindingSize)),
          " binding · ",
          bold(bytes(limits.maxBufferSize)),
          " buffer",
        ),
        chip("timer ", bold(`${number(found.timer_resolution_us)} µs`)),
        chip("Pyodide ", bold(found.pyodide), " · ready in ", bold(seconds(bootMs))),
      );
      root.firstElementChild.classList.toggle("warn", adapter.is_software);
    });
    bus.on(ON_PAGE.STATE, ({ state, previous }) => {
      if (state === "error" && previous === "booting") root.replaceChildren(chip("not started"));
      if (state === "booting") root.replaceChildren(chip("Starting Python …"));
    });
  },
};

/** The whole environment, to read and to copy into a report. */
export const environment = {
  id: "environment",
  title: "Environment",
  mount(root, bus) {
    root.hidden = true;
    bus.on(FROM_WORKER.ENVIRONMENT, ({ environment: found, boot_ms: bootMs, limits }) => {
      const { adapter, features, ...host } = found;
      const facts = Object.entries({ ...adapter, ...host, boot_ms: bootMs, features }).map(([name, value]) => [
        name,
        text(value),
      ]);
      const limitRows = Object.entries(limits).map(([name, value]) => [name, value.toLocaleString("en")]);
      const report = JSON.stringify({ environment: found, boot_ms: bootMs, limits }, null, 2);
      const { node } = lazyDetails("Adapter, browser, limits", () =>
        element(
          "div",
          { className: "facts" },
          table("Environment", ["What", "Value"], facts),
          table("Limits of the device", ["Limit", "Value"], limitRows),
        ),
      );
      root.querySelector(".actions").replaceChildren(copyButton("Copy report", () => report));
      root.querySelector(".body").replaceChildren(node);
      root.hidden = false;
    });
  },
};

export function adapterName({ vendor, architecture, description }) {
  return description || [vendor, architecture].filter(Boolean).join(" ") || "unnamed adapter";
}

function adapterTraits({ adapter, features }) {
  const traits = [
    adapter.is_software ? "CPU adapter" : "",
    adapter.subgroup_size ? `subgroups ${adapter.subgroup_size}` : "no subgroups",
    features.includes("shader-f16") ? "f16" : "",
  ];
  return traits
    .filter(Boolean)
    .map((trait) => ` · ${trait}`)
    .join("");
}

function chip(...content) {
  return element("li", { className: "chip" }, ...content);
}

function bold(content) {
  return element("b", {}, content);
}

function text(value) {
  if (Array.isArray(value)) return value.join(", ") || "none";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? number(value) : String(value);
}
