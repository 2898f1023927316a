import { EagerKeeper } from "../../../support/eager_keeper.js";
import { Bench } from "./bench.js";
import { CASES } from "./cases.js";
import "./detaching.js";
import { useCases } from "./uses.js";

/**
 * Each case on a new device: {name: {answer, reuses, reused}}. `options`: of attach(), or null; with `alone` only the
 * case's device is served. `pattern`: of the names. Whatever is destroyed is handed out again at once.
 */
const keeper = () => new EagerKeeper();

globalThis.runCases = async ({ options = null, alone = false, pattern = "" }) => {
  const answers = {};
  for (const [name, { reuses, run }] of Object.entries({ ...CASES, ...useCases() })) {
    if (!new RegExp(pattern).test(name)) continue;
    const device = await (await navigator.gpu.requestAdapter()).requestDevice();
    const target = alone ? device : undefined;
    const attachment = options && stepwell.attach({ keeper, target, ...options });
    let answer = null;
    try {
      answer = await run(new Bench(device));
    } catch (error) {
      answer = `threw ${error?.stack ?? error}`;
    }
    const pools = attachment?.stats().devices ?? [];
    answers[name] = { answer, reuses, reused: pools.reduce((sum, { native }) => sum + native.reused, 0) };
    attachment?.detach();
    device.destroy();
  }
  return answers;
};
