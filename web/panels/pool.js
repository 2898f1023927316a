import { element, onNextFrame } from "../dom.js";
import { bytes, number } from "../format.js";
import { FROM_WORKER, ON_PAGE, TO_WORKER } from "../messages.js";

/** Rows that are shown of one role; more classes than that share rows with their neighbours. */
const MOST_ROWS = 12;
/** Squares of a row; beyond it one square stands for several buffers. */
const MOST_SQUARES = 72;
/** Bands of sizes to try, as powers of two: the finest that gives few enough rows is taken. */
const BANDS = [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4];
/** Emptied bands that stay on view, the newest. */
const MOST_LEFT = 3;
const ORDER = ["kv", "activation", "workspace", "weights", "uniform", "staging"];

/** The pool's size classes as they fill, drain and are given up. */
export const pool = {
  id: "pool",
  title: "Pool: size classes, live ■ free □",
  mount(root, bus) {
    root.hidden = true;
    const rows = element("div", { className: "classes", role: "table", "aria-label": "Size classes of the pool" });
    const finding = element("p", { className: "finding", hidden: true });
    root.querySelector(".body").append(rows, finding);
    let latest = null;
    const draw = onNextFrame(() => {
      root.hidden = !latest?.classes.length;
      if (root.hidden) return;
      rows.replaceChildren(...ORDER.flatMap((role) => roleRows(role, latest.classes)));
      finding.textContent = latest.text;
      finding.hidden = !latest.text;
    });
    bus.on(TO_WORKER.RUN, () => {
      latest = null; // the next run starts with an empty pool
      draw();
    });
    bus.on(FROM_WORKER.POOL, (message) => {
      latest = message;
      draw();
    });
    bus.on(ON_PAGE.RUNS, ({ current }) => (root.querySelector(".aside").textContent = current ? `run ${current.name}` : ""));
  },
};

function roleRows(role, classes) {
  const own = classes.filter((entry) => entry.role === role).sort((a, b) => a.size - b.size);
  if (!own.length) return [];
  const held = bandsOf(own.filter(({ live, free }) => live + free > 0));
  const left = own.filter(({ live, free }) => live + free === 0);
  const shown = bandsOf(left).slice(-MOST_LEFT);
  return [...held, ...shown].sort((a, b) => a.from - b.from).map((band) => row(role, band));
}

/** Neighbouring classes together, so that there are few enough rows: sums of their figures. */
function bandsOf(classes) {
  let bands = [];
  for (const width of BANDS) {
    bands = [];
    let key = NaN;
    for (const entry of classes) {
      const place = Math.floor(Math.log2(entry.size) / width);
      if (place !== key) bands.push({ from: entry.size, count: 0, live: 0, free: 0, hits: 0, misses: 0, keeps: 0, evicted: 0 });
      key = place;
      const band = bands.at(-1);
      band.to = entry.size;
      band.count += 1;
      for (const name of ["live", "free", "hits", "misses", "evicted"]) band[name] += entry[name];
      band.keeps = entry.keeps === null || band.keeps === null ? null : band.keeps + entry.keeps;
    }
    if (bands.length <= MOST_ROWS) break;
  }
  return bands;
}

function row(role, band) {
  const per = Math.ceil(Math.max(1, (band.live + band.free) / MOST_SQUARES));
  const squares = [band.live, band.free].map((count, i) => (i ? "□" : "■").repeat(Math.ceil(count / per)));
  const gone = band.live + band.free === 0;
  const name = band.from === band.to ? bytes(band.to) : `${bytes(band.from)} – ${bytes(band.to)}`;
  return element(
    "div",
    { className: gone ? "class gone" : "class", role: "row", dataset: { role, bytes: band.to } },
    element("span", { role: "rowheader" }, role === "kv" ? "" : `${role} `, name),
    element(
      "span",
      { role: "cell", className: "squares", "aria-label": `${number(band.live)} live, ${number(band.free)} free` },
      element("i", {}, squares[0]),
      squares[1],
      per > 1 ? element("small", {}, ` 1 for ${number(per)}`) : null,
    ),
    element("span", { role: "cell" }, gone ? `left behind · ${number(band.evicted)} dropped` : figures(band)),
  );
}

function figures({ count, hits, misses, keeps, evicted }) {
  const asked = hits + misses;
  return [
    asked ? `hit ${number(Math.floor((100 * hits) / asked))} %` : null,
    keeps === null ? "keeps all" : `keeps ${number(keeps)}`,
    evicted ? `dropped ${number(evicted)}` : null,
    count > 1 ? `${number(count)} classes` : null,
  ]
    .filter(Boolean)
    .join(" · ");
}
