import { OP, OP_NAMES, ROLE_LETTERS, roleOf, unpackExtra } from "./event_log.js";

/**
 * The recording as a trace that `python -m stepwell.replay` reads: one run per token, sizes exactly as asked. The
 * site of a request is the index of its usage in the metadata's `usages`, because a pool under a runtime keeps buffers
 * of each usage apart.
 */
export function traceText(recording, metadata = {}) {
  const lines = [];
  const sites = new Map(); // usage → site
  const live = new Map(); // number → device
  let marked = false; // the last token's end: then a token that was begun and submitted is whole
  let submit = -1; // the place of the last submit's line, until something is read back after it
  let end = -1; // the place of the last run's line, while that run counts as not recorded
  recording.log.each((op, subject, value, extra) => {
    if (op === OP.CREATE) {
      const { usage, mapped, device } = unpackExtra(extra);
      const role = roleOf(usage, mapped, value);
      if (role === 0 && !sites.has(usage)) sites.set(usage, sites.size);
      const site = role === 0 ? sites.get(usage) : 0;
      lines.push(`+ ${value} ${ROLE_LETTERS[role]}${site ? ` ${site}` : ""}`);
      live.set(subject, device);
    } else if (op === OP.DESTROY) {
      if (live.delete(subject)) lines.push(`- ${subject}`);
    } else if (op === OP.GONE) {
      for (const [number, device] of live) {
        if (device !== subject) continue;
        lines.push(`- ${number}`);
        live.delete(number);
      }
    } else if (op === OP.SUBMIT) {
      submit = lines.push("f s") - 1;
      if (marked && !recording.log.dropped) end = -1;
    } else if (op === OP.READBACK) {
      if (submit >= 0) lines[submit] = "f r"; // and waited for
      submit = -1;
    } else if (op === OP.BOUNDARY) {
      end = lines.push(`b ${subject}`) - 1;
      marked = value === 1;
    }
  });
  if (end >= 0) lines.length = end; // how that token ends was not seen
  const head = { ...traceMetadata(recording), usages: [...sites.keys()], ...metadata };
  return [`stepwell-trace 1 ${JSON.stringify(head)}`, ...lines, `. ${lines.length}`, ""].join("\n");
}

function traceMetadata(recording) {
  const metadata = { attach: true, runtime: recording.runtime, adapter: adapterOf(recording) };
  if (recording.costs) {
    metadata.create_us = recording.costs.create_us;
    metadata.create_us_per_mib = recording.costs.create_us_per_mib;
    metadata.create_costs = recording.costs.source;
  }
  if (recording.unknownDestroys) metadata.unknown_destroys = recording.unknownDestroys;
  if (recording.log.dropped) metadata.dropped_events = recording.log.dropped;
  return metadata;
}

/** The first device's adapter in words; empty where the browser does not tell. */
export function adapterOf(recording) {
  const info = recording.devices[0]?.adapter;
  if (!info) return {};
  const names = ["vendor", "architecture", "device", "description"];
  return Object.fromEntries(names.filter((name) => info[name]).map((name) => [name, info[name]]));
}

/**
 * Every event that was kept. `lines`: JSON, one event a line, with its milliseconds since recording began. `chrome`:
 * for chrome://tracing or Perfetto, where createBuffer and live bytes per token are easier seen.
 */
export function eventsText(recording, format = "lines") {
  if (format !== "lines" && format !== "chrome")
    throw new TypeError(`events: format ${format}; it must be lines or chrome`);
  const rows = [];
  const live = new Map(); // buffer → its bytes and device
  let liveBytes = 0;
  recording.log.each((op, subject, value, extra, time) => {
    const event = describeEvent(recording, op, subject, value, extra);
    if (format === "lines") {
      rows.push(JSON.stringify({ ms: round3(time), op: OP_NAMES[op], ...event }));
      return;
    }
    const ts = round3(time * 1000);
    rows.push(JSON.stringify({ name: OP_NAMES[op], ph: "i", s: "t", ts, pid: 1, tid: 1, args: event }));
    if (op === OP.CREATE) {
      live.set(subject, { bytes: value, device: event.device });
      liveBytes += value;
    } else if (op === OP.DESTROY || op === OP.GONE) {
      const gone =
        op === OP.DESTROY ? [subject] : [...live.keys()].filter((number) => live.get(number).device === subject);
      for (const number of gone) {
        liveBytes -= live.get(number)?.bytes ?? 0;
        live.delete(number);
      }
    } else return;
    rows.push(JSON.stringify({ name: "live bytes", ph: "C", ts, pid: 1, args: { bytes: liveBytes } }));
  });
  return format === "lines" ? rows.map((row) => `${row}\n`).join("") : `{"traceEvents":[${rows.join(",\n")}]}\n`;
}

function describeEvent(recording, op, subject, value, extra) {
  if (op === OP.CREATE) {
    const { usage, mapped, device, label } = unpackExtra(extra);
    const event = { buffer: subject, bytes: value, usage, device };
    if (mapped) event.mapped = true;
    if (label) event.label = recording.labels[label];
    return event;
  }
  if (op === OP.DESTROY) return { buffer: subject, bytes: value };
  if (op === OP.BOUNDARY) return value ? { token: subject, marked: true } : { token: subject };
  if (op === OP.GONE) return { device: subject };
  return value ? { amount: value } : {};
}

function round3(value) {
  return Math.round(value * 1000) / 1000;
}
