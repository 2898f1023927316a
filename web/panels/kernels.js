import { element, onNextFrame, scroller, table } from "../dom.js";
import { bytes, number, percent, plural } from "../format.js";
import { ON_PAGE } from "../messages.js";

const CAPTION = "GPU time per kernel of one decode step";
const COLUMNS = ["Node", "Kernel", "Matrix", "Launches", "µs", "net µs", "net/token", "Reads", "GB/s", "Share"];
const NOTE =
  "Launches are per token; µs, net and reads are of one launch. Net is without what an empty pass takes: an estimate. A launch " +
  "reads at least its weights, in attention K and V of the live positions; GB/s and shares go by net time.";

/** Where a decode step's GPU time goes: the newest run that was asked for it (`kernels` of its record). */
export const kernels = {
  id: "kernels",
  title: "GPU time per kernel",
  mount(root, bus) {
    root.hidden = true;
    let newest = null;
    const draw = onNextFrame(() => {
      root.hidden = newest === null;
      if (root.hidden) return;
      const found = newest.record.kernels;
      root.querySelector(".aside").textContent =
        `run ${newest.label}, ${plural(found.steps, "step")} at position ${number(found.position)}`;
      root
        .querySelector(".body")
        .replaceChildren(
          ...(found.coarse_clock ? [coarse(found)] : []),
          element("p", { className: "finding" }, weights(found)),
          scroller(CAPTION, table(CAPTION, COLUMNS, found.rows.map(cells))),
          element("p", { className: "note" }, whole(found)),
          element("p", { className: "note" }, NOTE),
        );
    });
    bus.on(ON_PAGE.RUNS, ({ runs }) => {
      const found = runs.findLast(({ record }) => record?.kernels) ?? null;
      if (found === newest) return; // a table does not change, and one that is read or focused stays
      newest = found;
      draw();
    });
  },
};

function cells(row) {
  return [
    row.node || "–",
    row.kernel,
    `${row.shape} ${row.format}`.trim() || "–",
    number(row.launches),
    number(row.us_per_launch),
    number(row.net_us_per_launch),
    number(row.net_us_per_token),
    row.bytes_per_launch ? bytes(row.bytes_per_launch) : "–",
    figure(row.gb_s),
    row.share === null ? "–" : percent(row.share),
  ];
}

/** What all products with weight matrices come to, beside what the adapter's memory can deliver. */
function weights({ weights: all, plain_read_gb_s: most, plain_read_bytes: size }) {
  const rate = `${bytes(all.bytes_per_token)} of weights per token in ${number(all.net_us_per_token)} µs: ${figure(all.gb_s)} GB/s`;
  if (most === null) return `${rate}. There was no plain read to compare with.`;
  const share = all.share_of_plain_read === null ? "beside" : `${percent(all.share_of_plain_read)} of`;
  return `${rate}, ${share} the ${number(most)} GB/s of a kernel that only reads (${bytes(size)}).`;
}

function whole(found) {
  return (
    `All ${number(found.launches_per_token)} launches: ${number(found.net_us_per_token)} µs net, ${number(found.us_per_token)} µs with ` +
    `their passes, of which an empty one takes ${number(found.pass_us)} µs. Measured behind the run by repeating one step: the ` +
    "run's own times are without it."
  );
}

function coarse({ clock_us: tick }) {
  const how = tick === null ? "did not move at all" : `moves in steps of ${number(tick)} µs`;
  return element(
    "p",
    { className: "alarm", role: "status" },
    `The GPU's clock ${how}, so these times say little. Start Chrome with --enable-webgpu-developer-features for a fine one.`,
  );
}

function figure(value) {
  return value === null ? "–" : number(value);
}
