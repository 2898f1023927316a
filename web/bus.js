import { ALL_TYPES } from "./messages.js";

/** Carries messages between the parts of the page, synchronously and in the order in which listeners registered. */
export class Bus {
  #listeners = new Map();

  /** Call `listener(message)` for every message of `type`. */
  on(type, listener) {
    check(type);
    const listeners = this.#listeners.get(type) ?? [];
    this.#listeners.set(type, [...listeners, listener]);
  }

  /** Deliver `message`; a listener that throws is reported and does not keep the others from hearing it. */
  emit(message) {
    check(message.type);
    for (const listener of this.#listeners.get(message.type) ?? []) {
      try {
        listener(message);
      } catch (error) {
        reportError(error);
      }
    }
  }
}

function check(type) {
  if (!ALL_TYPES.has(type)) throw new TypeError(`unknown message type ${JSON.stringify(type)}; messages.js lists them`);
}
