import { aliasPrototype } from "./alias.js";
import { AttachError, CREATES } from "./natives.js";

/** On every function that was put in place of a method, also by another copy of this script. */
const SHIM = Symbol.for("stepwell.shim");

/**
 * Puts functions in place of WebGPU's methods and takes them away again.
 *
 * `layers` are functions that make a method from the one below: {"GPUDevice.createBuffer": (below) => function}.
 * `observers` are {before, after}, each a table of functions by "Interface.method": before(receiver, args),
 * after(receiver, args, result), the latter unless the method throws. They see what the application passes and gets.
 * Only what is in one of these tables is replaced.
 *
 * Either the methods of all objects are replaced (`install`), on the prototypes, or those of single objects and of what
 * they create (`adopt`): these get a prototype in between.
 */
export class Shims {
  #natives;
  #layers;
  #observers;
  #installed = []; // [prototype, method, its descriptor before, the shim]
  #between = new Map(); // interface → the prototype of adopted objects

  /** @param {import("./natives.js").Natives} natives */
  constructor(natives, layers, observers) {
    this.#natives = natives;
    this.#layers = layers;
    this.#observers = observers;
  }

  /** Replace the methods of every object of the realm. */
  install() {
    try {
      for (const name of this.#names()) {
        const [type, method] = name.split(".");
        this.#replace(this.#natives.prototypes[type], method, this.#shim(name, this.#natives.methods[name]));
      }
      this.observeAliases();
    } catch (error) {
      this.uninstall();
      throw error;
    }
  }

  /** Replace the methods of one object, and of the objects that it creates from now on. */
  adopt(object) {
    const original = Object.getPrototypeOf(object);
    const type = Object.keys(this.#natives.prototypes).find((name) => this.#natives.prototypes[name] === original);
    if (type !== undefined) Object.setPrototypeOf(object, this.#prototypeBetween(type));
  }

  /** Let GPUBuffer's observers see the aliases' own methods, too (`install` does this). */
  observeAliases() {
    for (const name of this.#names()) {
      const [type, method] = name.split(".");
      if (type !== "GPUBuffer" || !Object.hasOwn(aliasPrototype, method)) continue;
      const own = aliasPrototype[method];
      const shim = this.#observed(name, own);
      if (shim !== own) this.#replace(aliasPrototype, method, this.#dressed(shim, own));
    }
  }

  /** Undo `adopt` of an object. */
  disown(object) {
    const between = Object.getPrototypeOf(object);
    for (const [type, prototype] of this.#between) {
      if (prototype === between) Object.setPrototypeOf(object, this.#natives.prototypes[type]);
    }
  }

  /** Give every prototype its descriptors back; adopted objects that are still about behave as before. */
  uninstall() {
    for (const [prototype, method, descriptor, shim] of this.#installed.reverse()) {
      // another wrapper that was put over the shim keeps it: it only calls the method below from now on
      if (prototype[method] === shim) Object.defineProperty(prototype, method, descriptor);
    }
    this.#installed = [];
    for (const between of this.#between.values()) {
      for (const name of Object.keys(between)) delete between[name];
    }
  }

  // ---- inside -----------------------------------------------------------------------------------------------------

  #names() {
    const tables = [this.#layers, ...this.#observers.flatMap(({ before = {}, after = {} }) => [before, after])];
    const wanted = new Set(tables.flatMap((table) => Object.keys(table)));
    return [...wanted].filter((name) => name in this.#natives.methods);
  }

  #replace(prototype, method, shim) {
    const descriptor = Object.getOwnPropertyDescriptor(prototype, method);
    if (descriptor.value[SHIM]) {
      throw new AttachError(`${method} is served by another copy of stepwell already. Detach that one first.`);
    }
    Object.defineProperty(prototype, method, { ...descriptor, value: shim });
    this.#installed.push([prototype, method, descriptor, shim]);
  }

  #shim(name, native) {
    const call = this.#layers[name]?.(native) ?? native;
    return this.#dressed(this.#observed(name, call), native);
  }

  #observed(name, call) {
    const before = this.#observers.map((observer) => observer.before?.[name]).filter(Boolean);
    const after = this.#observers.map((observer) => observer.after?.[name]).filter(Boolean);
    if (before.length + after.length === 0) return call;
    return function (...args) {
      for (let i = 0; i < before.length; i += 1) guarded(before[i], this, args);
      const result = call.apply(this, args);
      for (let i = 0; i < after.length; i += 1) guarded(after[i], this, args, result);
      return result;
    };
  }

  #dressed(shim, native) {
    Object.defineProperty(shim, "name", { value: native.name, configurable: true });
    Object.defineProperty(shim, "length", { value: native.length, configurable: true });
    Object.defineProperty(shim, SHIM, { value: true });
    return shim;
  }

  #prototypeBetween(type) {
    let between = this.#between.get(type);
    if (between !== undefined) return between;
    between = Object.create(this.#natives.prototypes[type]);
    const adopt = (object) => this.adopt(object);
    for (const [name, native] of Object.entries(this.#natives.methods)) {
      const [owner, method] = name.split(".");
      if (owner !== type) continue;
      const call = this.#layers[name]?.(native) ?? native;
      const shim = this.#observed(name, name in CREATES ? adopting(call, adopt) : call);
      if (shim === native) continue;
      Object.defineProperty(between, method, {
        value: this.#dressed(shim, native), configurable: true, enumerable: true, writable: true,
      });
    }
    this.#between.set(type, between);
    return between;
  }
}

/** The method `call`, which adopts its results. */
function adopting(call, adopt) {
  return function (...args) {
    const result = call.apply(this, args);
    adopt(result);
    return result;
  };
}

/** Call an observer's `hook`; an error of it is reported, and the application does not see it. */
function guarded(hook, receiver, args, result) {
  try {
    hook(receiver, args, result);
  } catch (error) {
    globalThis.reportError?.(error);
  }
}
