"""What a run is asked to do, in the words of the page's form."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.errors import SetupError


class Kv(StrEnum):
    """How the KV cache is kept: a larger buffer at every step, or one allocated once."""

    GROW = "grow"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run.  ``model`` is a bundled model's id or a path; None leaves a number to the page's default."""

    prompt: str
    model: str = "smollm2"
    raw: bool = False
    tokens: int = 64
    policy: str = "adaptive"
    kv: Kv = Kv.STATIC
    eos: str = "stop"
    context: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    top_logits: int = 0

    def __post_init__(self) -> None:
        known = policies()
        if self.policy not in known:
            raise SetupError(f"there is no policy {self.policy!r}. Choose one of: {', '.join(known)}.")
        if self.file is not None and not self.file.is_file():
            raise SetupError(
                f"{self.model}: no such file. Give the id of a bundled model (smollm2) or a path to a .gguf."
            )
        if any(text == "" for text in self.stop):
            raise SetupError("a stop string is empty: every answer would end before it began.")

    @property
    def file(self) -> Path | None:
        """The model's path, when ``model`` is one rather than an id."""
        is_path = self.model.endswith(".gguf") or "/" in self.model or "\\" in self.model
        return Path(self.model).expanduser().resolve() if is_path else None

    @property
    def radios(self) -> dict[str, str]:
        return {"model": "file" if self.file else self.model, "kv": self.kv, "policy": self.policy}

    @property
    def fields(self) -> dict[str, str]:
        """The text and number controls, as a person would type them; empty is the page's default."""
        values = {
            "tokens": self.tokens,
            "context": "" if self.context is None else self.context,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "top_logits": self.top_logits,
            "stop": "|".join(map(escape_stop, self.stop)),
            "prompt": self.prompt,
        }
        return {name: str(value) for name, value in values.items()}


_ESCAPES = {"\\": "\\\\", "|": "\\|", "\n": "\\n", "\t": "\\t"}


def escape_stop(text: str) -> str:
    """A stop string as the page's one-line field takes it: parts are separated by bars, newlines written ``\\n``."""
    return "".join(_ESCAPES.get(char, char) for char in text)


def policies() -> tuple[str, ...]:
    """The names of the package's cache policies."""
    from stepwell.memory.policies import POLICIES

    return tuple(POLICIES)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The one prompt of ``--prompt`` and ``--prompt-file``."""
    if (prompt is None) == (file is None):
        raise SetupError("give the prompt either as --prompt TEXT or as --prompt-file FILE.")
    if file is None:
        return prompt or ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file}: {error}") from error
