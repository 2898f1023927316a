// Run in the page by test_page_access.py: the cheap half of an accessibility check. Each list names the offenders.

() => {
  const isChoice = (e) => e.matches("[type=radio], [type=checkbox], [type=file]");
  const all = (selector) => [...document.querySelectorAll(selector)];
  const shown = (e) => e.checkVisibility({ visibilityProperty: true });
  const brief = (e) => e.outerHTML.slice(0, 120);

  function hasName(e) {
    const referred = (e.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id));
    const sources = [...(e.labels ?? []), ...referred, e.matches("button, summary") ? e : null];
    return Boolean(e.getAttribute("aria-label")) || sources.some((node) => node?.innerText.trim());
  }

  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  function rgba(css) {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = css;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, alpha / 255];
  }
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  function ground(e) {
    return e ? over(rgba(getComputedStyle(e).backgroundColor), ground(e.parentElement)) : [255, 255, 255];
  }
  function luminance(colour) {
    const [r, g, b] = colour.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; // WCAG 2.2, relative luminance
  }
  function contrast(e) {
    const below = ground(e);
    const [a, b] = [over(rgba(getComputedStyle(e).color), below), below].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
  const readable = all("body *").filter(
    (e) => (hasText(e) || (e.matches("input, select, textarea") && !isChoice(e))) && shown(e) &&
      !e.closest(".visually-hidden, button:disabled, .skip"),
  );

  function target(e) {
    return isChoice(e) ? (e.closest("label") ?? document.querySelector(`label[for="${e.id}"]`)) : e;
  }
  const isSmall = (e) => Math.min(e.getBoundingClientRect().width, e.getBoundingClientRect().height) < 24;
  const ids = all("[id]").map((e) => e.id);

  return {
    nameless: all("button, input, select, textarea, summary, [role=region], [role=img], section.panel")
      .filter((e) => !hasName(e) && !(e.matches(".panel") && e.hidden)).map(brief),
    readable: readable.length,
    faint: readable.filter((e) => contrast(e) < 4.5).map((e) => `${contrast(e).toFixed(2)} ${brief(e)}`),
    small: all("button, select, textarea, summary, input").map(target).filter((e) => shown(e) && isSmall(e)).map(brief),
    positive_tabindex: all("[tabindex]").filter((e) => e.tabIndex > 0).map(brief),
    uncaptioned: all("table").filter((t) => !t.caption?.textContent.trim() || t.querySelector("th:not([scope])")).map(brief),
    twice: ids.filter((id, i) => ids.indexOf(id) !== i),
  };
}
