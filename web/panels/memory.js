import { Chart, colour, timeline } from "../chart.js";
import { element, lazyDetails, onNextFrame, scroller, table } from "../dom.js";
import { bytes, mebibytes, number } from "../format.js";
import { ON_PAGE } from "../messages.js";

/** Bottom to top; a role that is not listed goes above them. */
const ORDER = ["weights", "kv", "activation", "workspace", "uniform", "staging"];
const WEIGHTS = ORDER[0];

/** GPU memory reserved in the newest run by role, stacked, by position; a line shows how much of it is in use. */
export const memory = {
  id: "memory",
  title: "GPU memory by role, MiB",
  mount(root, bus) {
    root.hidden = true;
    const chart = new Chart(220);
    const legend = element("div", { className: "legend", role: "group", "aria-label": "Roles shown" });
    const hidden = new Set();
    let run = null;
    const data = lazyDetails("The same as a table", () => dataTable(run));
    const note = element("p", { className: "note" });
    root.querySelector(".body").append(chart.node, legend, note, data.node);

    const draw = onNextFrame(() => {
      root.hidden = !(run?.tokens.length > 0);
      if (root.hidden) return;
      const layers = layersOf(run);
      const shown = layers.filter(({ role }) => !hidden.has(role));
      const inUse = lineInUse(run, layers, hidden);
      const key = [run.label, inUse !== null, ...shown.map(({ role }) => role)].join();
      chart.update(
        key,
        () => options(shown, inUse !== null),
        [...stack(run, shown), ...(inUse ? [inUse] : [])],
        describe(run, layers),
      );
      note.textContent = noteText(run, hidden);
      root.querySelector(".aside").textContent = `run ${run.name}`;
      updateLegend(legend, layers, hidden, draw);
      data.refresh();
    });
    bus.on(ON_PAGE.RUNS, ({ current }) => {
      run = current;
      draw();
    });
  },
};

/** `[{role, values}]` bottom to top, values in bytes per token; roles that never hold a byte are left out. */
function layersOf({ byRole }) {
  const names = new Set(byRole.flatMap((roles) => Object.keys(roles)));
  const known = ORDER.filter((role) => names.has(role));
  const others = [...names].filter((role) => !ORDER.includes(role)).sort();
  const layers = [...known, ...others].map((role) => ({ role, values: byRole.map((roles) => roles[role] ?? 0) }));
  return layers.filter(({ values }) => values.some((size) => size > 0));
}

/**
 * MiB in use per token, to draw over the areas: null when a hidden layer other than the weights (always in use) makes
 * the line mean something else than the areas.
 */
function lineInUse({ tokens }, layers, hidden) {
  const gone = layers.filter(({ role }) => hidden.has(role));
  if (gone.some(({ role }) => role !== WEIGHTS)) return null;
  return tokens.map((token, i) => mebibytes(token.in_use_bytes - (gone[0]?.values[i] ?? 0)));
}

function noteText({ tokens }, hidden) {
  const { reserved_bytes: reserved, in_use_bytes: inUse } = tokens.at(-1);
  const advice = hidden.has(WEIGHTS) ? "" : " Press “weights” to hide them and see the rest.";
  return `Areas: reserved. Dotted line: in use, now ${bytes(inUse)}; ${bytes(reserved - inUse)} wait free in the pool.${advice}`;
}

/** uPlot's columns: positions, then the running sums from the top layer to the bottom one (painted in that order). */
function stack({ tokens }, layers) {
  const sums = [];
  let below = tokens.map(() => 0);
  for (const { values } of layers) {
    below = below.map((sum, i) => sum + mebibytes(values[i]));
    sums.unshift(below);
  }
  return [tokens.map(({ position }) => position), ...sums];
}

function options(layers, withLine) {
  const series = layers.toReversed().map(({ role }) => ({
    label: role,
    fill: () => colour(colourName(role)),
    stroke: () => colour("--panel"),
    width: 1,
    points: { show: false },
  }));
  const inUse = { label: "in use", stroke: () => colour("--ink"), width: 1.5, dash: [2, 3], points: { show: false } };
  return { ...timeline(withLine ? [...series, inUse] : series, 0.08), cursor: { show: false }, padding: [12, 14, 0, 0] };
}

function colourName(role) {
  const place = ORDER.indexOf(role);
  return `--role-${place < 0 ? ORDER.length : place}`;
}

/** Top to bottom as drawn; each entry hides or shows its layer (without the weights, the rest becomes visible). */
function updateLegend(legend, layers, hidden, redraw) {
  const wanted = layers.toReversed();
  const key = wanted.map(({ role }) => role).join();
  if (legend.dataset.key !== key) {
    legend.dataset.key = key;
    legend.replaceChildren(...wanted.map(({ role }) => legendButton(role, hidden, redraw)));
  }
  wanted.forEach(({ role, values }, i) => {
    const button = legend.children[i];
    button.setAttribute("aria-pressed", String(!hidden.has(role)));
    button.querySelector("b").textContent = bytes(values.at(-1));
  });
}

function legendButton(role, hidden, redraw) {
  const mark = element("span", { className: "square" });
  mark.style.background = `var(${colourName(role)})`;
  const button = element(
    "button",
    { type: "button", className: "chip", title: "Show or hide this layer" },
    mark,
    `${role} `,
    element("b"),
  );
  button.addEventListener("click", () => {
    if (!hidden.delete(role)) hidden.add(role);
    redraw();
  });
  return button;
}

function describe(run, layers) {
  const parts = layers.map(({ role, values }) => `${role} ${bytes(values.at(-1))}`);
  return `Stacked areas of GPU memory by role and position, run ${run.name}. At the last token: ${parts.join(", ")}.`;
}

function dataTable(run) {
  const layers = layersOf(run);
  const rows = run.tokens.map(({ position, in_use_bytes: inUse }, i) => [
    number(position),
    ...layers.map(({ values }) => bytes(values[i])),
    bytes(inUse),
  ]);
  const columns = ["Position", ...layers.map(({ role }) => role), "in use"];
  return scroller("GPU memory by role", table("GPU memory reserved by role, and in use, by position", columns, rows));
}
