import "../../../stepwell-attach.js";
import "./run.js";

self.onmessage = async ({ data }) => self.postMessage(await self.runCases(data));
self.postMessage("ready");
