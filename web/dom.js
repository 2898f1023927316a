/** Build DOM nodes: `element("p", { className: "note" }, "text", node)`. Names with a dash become attributes. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name === "dataset") Object.assign(node.dataset, value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A form field: its label, the control, and a hint that is its tooltip and its description for screen readers. */
export function field(label, hint, control, extra = "") {
  const id = `${control.name}-hint`;
  control.setAttribute("aria-describedby", id);
  control.title = hint;
  return element(
    "label",
    { className: `field ${extra}` },
    element("span", {}, label),
    control,
    element("span", { id, className: "visually-hidden" }, hint),
  );
}

/**
 * A function that calls `draw` in the next animation frame, however often it is called before that. Viewers who ask for
 * reduced motion get one update per second instead of one per frame.
 */
export function onNextFrame(draw) {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let pending = false;
  let last = -Infinity;
  const run = () => {
    pending = false;
    last = performance.now();
    draw();
  };
  return () => {
    if (pending) return;
    pending = true;
    const wait = still.matches ? last + 1000 - performance.now() : 0;
    if (wait > 0) setTimeout(run, wait);
    else requestAnimationFrame(run);
  };
}

/** Says things to screen readers through a live region, at most once a second; what was said last wins. */
export function announcer(region) {
  let text = "";
  let timer = 0;
  let last = -Infinity;
  const flush = () => {
    timer = 0;
    last = performance.now();
    region.textContent = text;
  };
  return (next) => {
    text = next;
    timer ||= setTimeout(flush, Math.max(0, last + 1000 - performance.now()));
  };
}

/** A table with a caption: `columns` are header texts, `rows` arrays of texts or nodes; the first cell heads its row. */
export function table(caption, columns, rows) {
  const head = element("tr", {}, ...columns.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))),
  );
  return element(
    "table",
    {},
    element("caption", { className: "visually-hidden" }, caption),
    element("thead", {}, head),
    element("tbody", {}, ...body),
  );
}

/** A box that scrolls sideways when its table is wider than the page; reachable by keyboard, hence the label. */
export function scroller(label, ...children) {
  return element("div", { className: "scroller", tabIndex: 0, role: "region", "aria-label": label }, ...children);
}

/** A `<details>` whose content is built when it is opened, and again by `refresh()` while it is open. */
export function lazyDetails(summary, build) {
  const body = element("div");
  const node = element("details", {}, element("summary", {}, summary), body);
  const refresh = () => {
    if (node.open) body.replaceChildren(build());
  };
  node.addEventListener("toggle", refresh);
  return { node, refresh };
}
