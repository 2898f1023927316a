"""Text to token ids and back: the tokenizer of a GGUF file, the streaming detokenizer, stop strings, chat templates."""
