import { ON_PAGE } from "./messages.js";

const IS_MODEL = /\.gguf$/i;
const IS_TRACE = /\.(trace|gz)$/i;

/** Files dropped anywhere on the page: a model goes into `input`, a trace is replayed. */
export function acceptDrops(input, bus) {
  const root = document.documentElement;
  const carriesFile = (event) => event.dataTransfer?.types.includes("Files");
  const settle = () => root.classList.remove("dropping");
  addEventListener("dragover", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    root.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => event.relatedTarget === null && settle());
  addEventListener("drop", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    settle();
    const [dropped] = event.dataTransfer.files;
    const name = dropped?.name ?? "That";
    if (IS_MODEL.test(name)) {
      input.files = event.dataTransfer.files;
      input.dispatchEvent(new Event("change", { bubbles: true }));
    } else if (IS_TRACE.test(name)) {
      bus.emit({ type: ON_PAGE.DROPPED, file: dropped });
    } else {
      bus.emit({
        type: ON_PAGE.WARNING,
        text: `${name} is neither a .gguf model nor a trace (.trace, .trace.gz); nothing was changed.`,
      });
    }
  });
}
