/** A trace on its way from one page of this site to another: kept in the browser's cache until it is taken, once. */

const CACHE = "stepwell-handover";
const PARAMETER = "what-if";
const KEY = "./handed-over.trace";

/** Keep `file` and go to the page that replays it, in a tab of its own. */
export async function handOver(file) {
  const tab = open("", "_blank"); // at once, while the click still permits it
  const cache = await caches.open(CACHE);
  await cache.put(KEY, new Response(file, { headers: { "x-name": encodeURIComponent(file.name) } }));
  const url = new URL(`./index.html?${PARAMETER}=1`, document.baseURI).href;
  if (tab) tab.location = url;
  else location.href = url; // no second tab is allowed
}

/** The file that was handed over to this page, or null. */
export async function takeOver() {
  if (!new URLSearchParams(location.search).has(PARAMETER)) return null;
  try {
    const cache = await caches.open(CACHE);
    const answer = await cache.match(KEY);
    if (!answer) return null;
    const file = new File([await answer.blob()], decodeURIComponent(answer.headers.get("x-name")));
    await caches.delete(CACHE);
    return file;
  } catch (error) {
    console.warn("handover:", error); // no cache in this browser or mode
    return null;
  }
}
