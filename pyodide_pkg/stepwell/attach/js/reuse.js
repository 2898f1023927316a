import { OP, ROLE_NAMES, roleOf, unpackExtra } from "./event_log.js";

const MOST_SIZES = 12;

/**
 * The creates that a pool could serve that keeps everything: those with exactly the size and usage of a buffer that was
 * destroyed before on the same device, and not taken since.
 *
 * Per token, without the first `skipped`, and the sizes that matter, the most created bytes first.
 */
export function reuseOf(recording, skipped) {
  const classes = new Map();
  const owners = new Map(); // buffer → its class
  let token = 0;
  recording.log.each((op, subject, value, extra) => {
    if (op === OP.BOUNDARY) {
      token = subject;
    } else if (op === OP.CREATE) {
      const found = classOf(classes, value, extra);
      owners.set(subject, found);
      noteCreate(found, token > skipped && token <= recording.loggedTokens);
    } else if (op === OP.DESTROY) {
      const found = owners.get(subject);
      found.live -= 1;
      found.free += 1;
    } else if (op === OP.GONE) {
      for (const found of classes.values()) {
        if (found.device === subject) found.live = found.free = 0;
      }
    }
  });
  const rows = sizeRows(classes.values(), Math.max(1, recording.loggedTokens - skipped));
  return {
    creates: rows.reduce((sum, row) => sum + row.reusable_per_token, 0),
    bytes: rows.reduce((sum, row) => sum + row.reusable_per_token * row.bytes, 0),
    sizes: rows.slice(0, MOST_SIZES),
  };
}

function classOf(classes, bytes, extra) {
  const { usage, mapped, device } = unpackExtra(extra);
  const role = roleOf(usage, mapped, bytes);
  const key = `${bytes} ${usage} ${role} ${device}`;
  let found = classes.get(key);
  if (!found) {
    found = { bytes, usage, role, device, creates: 0, steady: 0, reusable: 0, live: 0, most: 0, free: 0 };
    classes.set(key, found);
  }
  return found;
}

function noteCreate(found, steady) {
  found.creates += 1;
  found.live += 1;
  found.most = Math.max(found.most, found.live);
  if (steady) found.steady += 1;
  if (found.role !== 0 || !found.free) return;
  found.free -= 1;
  if (steady) found.reusable += 1;
}

/** A row per size and usage, of all devices together. */
function sizeRows(classes, tokens) {
  const rows = new Map();
  for (const { bytes, usage, role, creates, steady, reusable, live, most } of classes) {
    const key = `${bytes} ${usage} ${role}`;
    const none = { bytes, usage, role: ROLE_NAMES[role], creates: 0, creates_per_token: 0, reusable_per_token: 0 };
    const row = rows.get(key) ?? { ...none, live: 0, most_live: 0 };
    row.creates += creates;
    row.creates_per_token += steady / tokens;
    row.reusable_per_token += reusable / tokens;
    row.live += live;
    row.most_live = Math.max(row.most_live, most);
    rows.set(key, row);
  }
  const created = (row) => row.creates_per_token * row.bytes;
  const held = (row) => row.most_live * row.bytes;
  return [...rows.values()].sort((a, b) => created(b) - created(a) || held(b) - held(a));
}
