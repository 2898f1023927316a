/**
 * What the charts share: loading uPlot, colours from style.css, size, redraw when the colour scheme changes.
 * A chart is a picture; its panel gives the same data as a table.
 */
import { element } from "./dom.js";
import { number } from "./format.js";

/** Line patterns by run style, in CSS pixels; [] is solid. */
export const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [16, 5], [5, 2, 2, 2, 2, 2]];

let library = null;

/** Resolves to uPlot's constructor, or null when this build does not ship it: the tables still hold the data. */
function loadUPlot() {
  library ??= import("./vendor/uplot/uPlot.esm.js").then(
    (module) => module.default,
    (error) => {
      console.warn("uPlot:", error);
      return null;
    },
  );
  return library;
}

/** The value of a custom property of the page, e.g. `colour("--muted")`. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * A chart in a box of its own. `update(key, options, data, label)` draws: `options` (a function, so that it is called
 * only when `key` changes and the chart is built anew) are uPlot's without width and height; `label` is the
 * text alternative.
 */
export class Chart {
  #height;
  #key = null;
  #plot = null;
  #latest = 0;

  constructor(height) {
    this.#height = height;
    this.node = element("div", { className: "chart", role: "img" });
    this.node.style.height = `${height}px`;
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(this.node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#plot?.redraw());
  }

  async update(key, options, data, label) {
    const call = ++this.#latest;
    this.node.setAttribute("aria-label", label);
    const UPlot = await loadUPlot();
    if (call !== this.#latest) return; // newer data came while the library was loading
    if (!UPlot) {
      this.node.textContent = "The chart library is missing from this build; the table below holds the data.";
    } else if (key !== this.#key) {
      this.#plot?.destroy();
      this.#plot = new UPlot({ ...options(), ...this.#size() }, data, this.node);
      this.#key = key;
    } else {
      this.#plot.setData(data);
    }
  }

  #size() {
    return { width: Math.max(this.node.clientWidth, 200), height: this.#height };
  }
}

/**
 * uPlot's options for figures of 0 or more over positions or tokens; `room` is what of the height stays free above the
 * largest. A panel spreads its own over them.
 */
export function timeline(series, room = 0.1) {
  return {
    legend: { show: false },
    cursor: { y: false, points: { size: 7 } },
    padding: [14, 26, 0, 0],
    scales: {
      x: { time: false, range: (_, low, high) => [low, Math.max(high, low + 1)] },
      y: { range: (_, low, high) => [0, high > 0 ? high * (1 + room) : 1] },
    },
    axes: axes(number),
    series: [{}, ...series],
  };
}

/** A run's line in its style, for `timeline`. */
export function line(label, style) {
  return { label, stroke: () => colour(`--run-${style}`), width: 2, dash: DASHES[style] };
}

/** Axes in the page's type and colours; `format` writes the values of the vertical one. */
function axes(format) {
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const stroke = () => colour("--muted");
  const shared = { font, stroke, ticks: { show: false } };
  return [
    {
      ...shared,
      grid: { show: false },
      size: 28,
      incrs: WHOLE_STEPS,
      values: (_, values) => values.map((value) => value.toLocaleString("en")),
    },
    {
      ...shared,
      grid: { stroke: () => colour("--line"), width: 1 },
      size: axisWidth,
      gap: 8,
      values: (_, values) => values.map(format),
    },
  ];
}

const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000];

/** Room for the longest label of the vertical axis. */
function axisWidth(plot, values, axisIndex, cycle) {
  const axis = plot.axes[axisIndex];
  if (cycle > 1) return axis._size; // uPlot asks again; the answer must stay
  const longest = (values ?? []).reduce((widest, text) => (text.length > widest.length ? text : widest), "");
  plot.ctx.font = axis.font[0];
  return Math.ceil(axis.gap + plot.ctx.measureText(longest).width / devicePixelRatio) + 4;
}

/** A piece of the run's line: its colour and its dash. */
export function swatch(run) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  for (const [name, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true" }))
    svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({
    x1: 0,
    x2: 26,
    y1: 5,
    y2: 5,
    "stroke-width": 2.5,
    "stroke-dasharray": DASHES[run.style].join(" "),
  })) {
    line.setAttribute(name, value);
  }
  line.style.stroke = `var(--run-${run.style})`;
  svg.append(line);
  svg.classList.add("swatch");
  return svg;
}
