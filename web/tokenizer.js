// The tokenizer of the page: Hugging Face's JavaScript library, built from the tokenizer.json that Python writes.

import { Tokenizer } from "./vendor/tokenizers/tokenizers.min.mjs";

/**
 * @param {string} json a tokenizer.json
 * @returns {(text: string) => Int32Array} from a text to its token ids; special tokens in the text are parsed, none are added
 */
export function makeTokenizer(json) {
  const tokenizer = new Tokenizer(JSON.parse(json), {});
  return (text) => Int32Array.from(tokenizer.encode(text, { add_special_tokens: false }).ids);
}
