/** What the autotuner found, kept in this browser: text that only Python reads. */

const KEY = "stepwell-tuning";

/** The text, or null: there is none, or this browser keeps nothing for the page. */
export function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch (error) {
    console.debug("tuning:", error);
    return null;
  }
}

/** Keep `text` for the next visit; whether this browser does. */
export function remember(text) {
  try {
    localStorage.setItem(KEY, text);
    return true;
  } catch (error) {
    console.debug("tuning:", error);
    return false;
  }
}
