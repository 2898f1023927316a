"""The text of models without a vocabulary: a prompt's bytes are its ids, and an id is shown as a number in brackets."""


class PlainTokenizer:
    """UTF-8 bytes as ids 0 to 255.  No id ends a text."""

    eog_ids: frozenset[int] = frozenset()
    bos_token = eos_token = ""

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text`` in UTF-8."""
        return list(text.encode("utf-8", "replace"))


class PlainDetokenizer:
    """Ids as text: ``<17><4095>``."""

    def push(self, token_id: int) -> str:
        """The text of ``token_id``."""
        return f"<{token_id}>"

    def finish(self) -> str:
        """The empty string: nothing is withheld."""
        return ""
