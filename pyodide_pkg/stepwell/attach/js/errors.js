/** A request with a value that is not allowed; the message says what is. */
export class BadRequest extends Error {
  name = "BadRequest";
}

/** A call that breaks the rules of the keeper: a buffer released twice, or one that it does not know. */
export class StaleBuffer extends Error {
  name = "StaleBuffer";
}
