import { element, onNextFrame, scroller, table } from "../dom.js";
import { bytes, milliseconds, number, percent, plural } from "../format.js";
import { replayShare } from "../launch.js";
import { ON_PAGE } from "../messages.js";
import { median } from "../statistics.js";

/** Two tables: field of a token record, what it is, how it is written. A field that no step has makes no row. */
const WORK = [
  ["ms", "Time, total", milliseconds],
  ["encode_ms", "… recording and encoding", milliseconds],
  ["wait_ms", "… waiting for the GPU", milliseconds],
  ["gpu_ms", "… in passes, by the GPU's clock", milliseconds],
  ["launches", "Kernel launches", number],
  ["passes", "Compute passes", number],
  ["encoders", "Command encoders", number],
  ["submits", "Submissions", number],
  ["bind_groups_created", "Bind groups created", number],
  ["bind_groups_reused", "Bind groups reused", number],
  ["bind_groups_evicted", "Bind groups evicted", number],
  ["copies", "Buffer copies", number],
  ["uploads", "Uploads", number],
  ["upload_bytes", "… bytes", bytes],
  ["uploads_skipped", "Uploads skipped", number],
  ["immediates", "Immediates set", number],
  ["immediates_bytes", "… bytes", bytes],
  ["syncs", "Waits for the GPU", number],
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
      const facts = launchFacts(run);
      root
        .querySelector(".body")
        .replaceChildren(
          rowsOf("Work per token", WORK, run.steps),
          element(
            "div",
            {},
            rowsOf("Memory per token", MEMORY, run.steps),
            facts.length ? factTable(facts) : null,
          ),
        );
    });
    bus.on(ON_PAGE.RUNS, ({ current }) => {
      run = current;
      draw();
    });
  },
};

function factTable(facts) {
  return element("div", { className: "facts" }, table("Launch path", ["Launch path", ""], facts));
}

function rowsOf(caption, counters, steps) {
  const rows = counters.flatMap(([field, title, write]) => {
    const values = steps.map((step) => step[field]).filter(Number.isFinite);
    return values.length ? [[title, write(values.at(-1)), write(median(values)), write(Math.max(...values))]] : [];
  });
  return scroller(caption, table(caption, ["", "last", "median", "largest"], rows));
}

/** What is known of a run's launch path as a whole: its steps now, the rest with its record. */
function launchFacts({ steps, record }) {
  if (steps.every(({ replayed }) => replayed === undefined)) return []; // an older worker
  const { replayed, refused } = replayShare(steps);
  const reasons = [...refused].map(([reason, count]) => `${reason} ${number(count)}`);
  const share = percent(replayed / steps.length);
  const facts = [["Steps replayed", `${number(replayed)} of ${number(steps.length)} (${share})`]];
  if (reasons.length) facts.push(["Not replayed", reasons.join(", ")]);
  return record?.launch ? [...facts, ...recordFacts(record.launch)] : facts;
}

/** Of a record's `launch`; what is not there is left out. */
function recordFacts({ params, identity_rate: identity, plans, bind_groups: groups, workspace_bytes: workspaces, ...rest }) {
  const nodes = Object.values(rest.variants ?? {});
  const sum = (name) => nodes.reduce((total, node) => total + (node[name]?.length ?? node[name]), 0);
  return [
    params && ["Step's scalars by", params],
    Number.isFinite(identity) && ["Bindings seen before", percent(identity)],
    plans && ["Plans", `${number(plans.recorded)} recorded, ${number(plans.invalidated)} invalidated`],
    groups && ["Bind groups kept", `${number(groups.size)}, ${number(groups.evicted)} evicted`],
    nodes.length && ["Kernel variants", `${number(sum("shapes"))} for ${plural(nodes.length, "node")}`],
    nodes.length && ["… evicted", number(sum("evicted"))],
    Number.isFinite(workspaces) && ["Workspaces", bytes(workspaces)],
  ].filter(Boolean);
}
