"""Text to token ids and back: tokenizer, streaming detokenizer, stop strings, chat templates.

``Tokenizer(metadata, make_encoder)`` (``tokenizer.py``) is that of a GGUF file.  ``vocabulary.py`` reads and checks the
file's keys, ``document.py`` writes them as a ``tokenizer.json``, and a library of ``backends.py`` encodes with it; ids
are decoded here.  There are two kinds of vocabulary: byte-level BPE (``pre_tokenizers.py``: one row per
``tokenizer.ggml.pre``) and SentencePiece's BPE (``sentencepiece.py`` derives the merges from the scores; a character
without a token is its bytes).

``detokenizer.py`` has ``Detokenizer`` and ``StopMatcher``, ``chat.py`` has ``render_chat(template, messages)``, run in
``sandbox.py``, and ``plain.py`` has the text of models without a vocabulary.
"""
