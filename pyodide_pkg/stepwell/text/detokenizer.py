"""Token ids → text as it grows: Detokenizer gives whole characters, StopMatcher ends the text at a stop string."""

import codecs
from collections.abc import Sequence

from stepwell.errors import BadRequest
from stepwell.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental UTF-8 over the tokens' bytes: a character appears with the token that completes it.

    Bytes that cannot become a character turn into U+FFFD as soon as that is known.  ``skip_special`` leaves control
    tokens out; else they appear as their text.  Where the vocabulary puts a space in front of a text, that space is
    left out of the first text, as ``decode`` of tokenizers does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_prefix = tokenizer.space_prefix

    def push(self, token_id: int) -> str:
        """The text that is complete with ``token_id``: often all of the token's, sometimes none."""
        if self._skip_special and self._tokenizer.is_control(token_id):
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._at_prefix and text:
            self._at_prefix = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """The end of the text: U+FFFD for a character that stays incomplete, else empty."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Ends a text at the first of the strings ``stops``, however the text is cut into pieces.

    The first is the one that is complete first, and the longest of those that end at the same place.  It is not part of
    the text, and text that may yet become one is withheld.  ``matched`` is the stop string that ended the text.  Raises
    BadRequest for ``stops`` that are not a list of strings, or for an empty one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise BadRequest(f"stop is {stops!r}; give a list of strings, none of them empty.")
        self._stops = tuple(stops)
        self._withheld = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain after ``text`` came; empty once ``matched`` is set."""
        if self.matched is not None:
            return ""
        pending = self._withheld + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if hits:
            _, start, self.matched = min(hits)
            self._withheld = ""
            return pending[:start]
        certain = len(pending) - self._undecided(pending)
        self._withheld = pending[certain:]
        return pending[:certain]

    def finish(self) -> str:
        """The text that was withheld, when no more comes."""
        text, self._withheld = self._withheld, ""
        return text

    def _undecided(self, pending: str) -> int:
        """The length of the longest end of ``pending`` with which a stop string begins."""
        beginnings = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
        return max((len(beginning) for beginning in beginnings if pending.endswith(beginning)), default=0)
