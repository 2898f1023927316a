import { element } from "./dom.js";

/** A button that copies `text()` and says for two seconds whether it could. */
export function copyButton(label, text) {
  const button = element("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch (error) {
      console.warn("clipboard:", error);
      button.textContent = "The browser refused";
    }
    setTimeout(() => (button.textContent = label), 2000);
  });
  return button;
}

/** Hand `value` to the user as a file. */
export function saveJson(name, value) {
  saveText(name, `${JSON.stringify(value, null, 1)}\n`);
}

/** The same of JSON text. */
export function saveText(name, text) {
  saveBlob(name, new Blob([text], { type: "application/json" }));
}

/** The same of any bytes. */
export function saveBlob(name, blob) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
