/** The panels of the page by place, in order. A new panel is one file here and one line below. */
import { answer } from "./answer.js";
import { cache } from "./cache.js";
import { counters } from "./counters.js";
import { chips, environment } from "./environment.js";
import { latency } from "./latency.js";
import { memory } from "./memory.js";
import { model } from "./model.js";
import { runs } from "./runs.js";
import { sampling } from "./sampling.js";

export const PLACES = {
  chips: [chips],
  side: [model, cache, sampling, environment],
  work: [answer, latency, memory, counters, runs],
};
