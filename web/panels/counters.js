import { onNextFrame, scroller, table } from "../dom.js";
import { bytes, milliseconds, number, plural } from "../format.js";
import { ON_PAGE } from "../messages.js";
import { median } from "../statistics.js";

/** Two tables: field of a token record, what it is, how it is written. */
const WORK = [
  ["ms", "Time, total", milliseconds],
  ["encode_ms", "… recording and encoding", milliseconds],
  ["wait_ms", "… waiting for the GPU", milliseconds],
  ["launches", "Kernel launches", number],
  ["passes", "Compute passes", number],
  ["submits", "Submissions", number],
  ["bind_groups_created", "Bind groups created", number],
  ["bind_groups_reused", "Bind groups reused", number],
  ["copies", "Buffer copies", number],
  ["uploads", "Uploads", number],
  ["upload_bytes", "… bytes", bytes],
  ["readbacks", "Readbacks", number],
  ["readback_bytes", "… bytes", bytes],
];
const MEMORY = [
  ["buffers_created", "Buffers created", number],
  ["bytes_created", "… bytes", bytes],
  ["buffers_destroyed", "Buffers destroyed", number],
  ["bytes_destroyed", "… bytes", bytes],
  ["pool_hits", "Pool hits", number],
  ["pool_misses", "Pool misses", number],
  ["kv_class_bytes", "Size class of a KV buffer", bytes],
  ["reserved_bytes", "Reserved", bytes],
  ["in_use_bytes", "In use", bytes],
];

/** Everything that is counted per token: the last token, and the median and maximum of the decode steps so far. */
export const counters = {
  id: "counters",
  title: "Counters per token",
  mount(root, bus) {
    root.hidden = true;
    let run = null;
    const draw = onNextFrame(() => {
      root.hidden = !(run?.steps.length > 0);
      if (root.hidden) return;
      root.querySelector(".aside").textContent = `run ${run.name}, ${plural(run.steps.length, "decode step")}`;
      root
        .querySelector(".body")
        .replaceChildren(rowsOf("Work per token", WORK, run.steps), rowsOf("Memory per token", MEMORY, run.steps));
    });
    bus.on(ON_PAGE.RUNS, ({ current }) => {
      run = current;
      draw();
    });
  },
};

function rowsOf(caption, counters, steps) {
  const rows = counters.map(([field, title, write]) => {
    const values = steps.map((step) => step[field]);
    return [title, write(values.at(-1)), write(median(values)), write(Math.max(...values))];
  });
  return scroller(caption, table(caption, ["", "last", "median", "largest"], rows));
}
