/** The panels of the page by place, in order. A new panel is one file here and one line below. */
import { ab } from "./ab.js";
import { answer } from "./answer.js";
import { cache } from "./cache.js";
import { comparison } from "./comparison.js";
import { counters } from "./counters.js";
import { chips, environment } from "./environment.js";
import { kernels } from "./kernels.js";
import { latency } from "./latency.js";
import { launch } from "./launch.js";
import { memory } from "./memory.js";
import { model } from "./model.js";
import { pattern } from "./pattern.js";
import { pool } from "./pool.js";
import { runs } from "./runs.js";
import { sampling } from "./sampling.js";
import { tuning } from "./tuning.js";
import { whatIf } from "./what_if.js";

export const PLACES = {
  chips: [chips],
  side: [model, cache, launch, tuning, sampling, environment],
  work: [pattern, answer, comparison, ab, latency, kernels, pool, memory, counters, runs, whatIf],
};
