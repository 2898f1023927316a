/** The options of the launch path as the package lists them, and the arms of its ablation. */

/**
 * `{options: [{name, kind, initial, summary, choices, minimum, maximum}], arms: [{name, launch}]}` from an `environment`
 * message; both empty when the worker is older than the launch path. `initial` is typed, null: chosen by the launcher.
 * The `launch` of an arm holds only what differs from `initial`, as in a request.
 */
export function readListing({ launch_options: listed = [], ablation = [] }) {
  const options = listed.map(({ default: initial, ...option }) => ({ ...option, initial }));
  const arms = ablation.map(({ name, launch }) => ({ name, launch: changes(options, launch) }));
  return { options, arms };
}

/** What of `launch` differs from the defaults. */
function changes(options, launch) {
  const initials = new Map(options.map(({ name, initial }) => [name, initial]));
  return Object.fromEntries(Object.entries(launch).filter(([name, value]) => value !== initials.get(name)));
}

/** "shared_pass off, submit_every 64", or "the defaults". */
export function describeLaunch(launch = {}) {
  const write = { true: "on", false: "off", null: "automatic" };
  const parts = Object.entries(launch).map(([name, value]) => `${name} ${write[value] ?? value}`);
  return parts.join(", ") || "the defaults";
}

/** The same for a label: the name of an arm with just these options, else at most two of them; "" for the defaults. */
export function nameLaunch(launch = {}, arms = []) {
  const count = Object.keys(launch).length;
  if (count === 0) return "";
  const arm = arms.find((other) => sorted(other.launch) === sorted(launch));
  return arm?.name ?? (count <= 2 ? describeLaunch(launch) : `${count} launch options`);
}

function sorted(launch) {
  return JSON.stringify(Object.entries(launch).sort());
}

/**
 * Of some steps of one run: how many were nothing but a replay, and why the others were not, `{replayed, refused: Map}`.
 * The step that records a plan is issued live and replayed once, to compare: it has a reason.
 */
export function replayShare(steps) {
  const refused = new Map();
  for (const { refused: reason } of steps) if (reason) refused.set(reason, (refused.get(reason) ?? 0) + 1);
  return { replayed: steps.filter(({ replayed, refused: reason }) => replayed && !reason).length, refused };
}
