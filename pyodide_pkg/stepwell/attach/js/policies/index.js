import { BadRequest } from "../errors.js";
import { Adaptive, GROWTH, WINDOW } from "./adaptive.js";
import { Bucket, ERAS, ORT_LIMITS } from "./bucket.js";
import { Disabled } from "./disabled.js";
import { CAP, Exact, LARGEST_BYTES } from "./exact.js";
import { LazyRelease } from "./lazy_release.js";
import { parseOptions } from "./options.js";
import { Simple } from "./simple.js";
import { WIDEST_WINDOW } from "./size_class.js";

/**
 * The policies that make sense where every buffer has exactly the size that was asked for, with their options.
 *
 * A policy has acquire(size) -> id or 0, release(id, size, recorded), flush(), beginRun(), reclaim(nbytes) and drain();
 * all but the first return the ids to destroy. memory/policies/base.py says what each means.
 */
export const POLICIES = {
  adaptive: {
    Policy: Adaptive,
    options: [
      { name: "window", kind: "int", default: WINDOW, minimum: 1, maximum: WIDEST_WINDOW },
      { name: "growth", kind: "float", default: GROWTH, minimum: 0, maximum: 2 },
      { name: "stagger", kind: "bool", default: true },
    ],
  },
  bucket: {
    Policy: Bucket,
    options: [
      { name: "era", kind: "choice", default: "B", choices: ERAS },
      { name: "limits", kind: "limits", default: Object.fromEntries(ORT_LIMITS) },
    ],
  },
  simple: { Policy: Simple, options: [] },
  exact: {
    Policy: Exact,
    options: [
      { name: "cap", kind: "int", default: CAP, minimum: 0, maximum: 2 ** 20 },
      { name: "largest_bytes", kind: "int", default: LARGEST_BYTES, minimum: 0, maximum: 2 ** 40 },
    ],
  },
  lazy_release: { Policy: LazyRelease, options: [] },
  disabled: { Policy: Disabled, options: [] },
};

/** A function that makes policies of that name; BadRequest for an unknown name, or an option that is wrong. */
export function policyFactory(name, options) {
  if (!Object.hasOwn(POLICIES, name)) {
    const names = Object.keys(POLICIES).join(", ");
    throw new BadRequest(`policy '${name}': attach has none of that name. Choose one of ${names}.`);
  }
  const { Policy, options: table } = POLICIES[name];
  const parsed = parseOptions(name, table, options);
  const make = () => new Policy(parsed);
  make(); // what only the policy itself refuses
  return make;
}
