"""What a run is asked to do, in the words of the page's form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from harness import SetupError

if TYPE_CHECKING:
    from stepwell.models.synthetic import Synthetic


class Kv(StrEnum):
    """How the KV cache is kept: a larger buffer at every step, one that moves when full, one for good, or pages."""

    GROW = "grow"
    DONATE = "donate"
    STATIC = "static"
    PAGED = "paged"


class KvType(StrEnum):
    """What K and V are stored in."""

    F32 = "f32"
    F16 = "f16"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run.  ``model`` is a bundled model's id, a path, or ``synthetic:SHAPE[:FORMAT]``; None leaves a number to
    the page's default.

    The prompt is ``prompt``, or ``prompt_ids`` as they are, or ``prompt_length`` pseudo-random ids.
    ``workload`` takes the place of the model and its prompt: it fills ``start`` positions, then grows by one per token.
    ``policy_options`` and ``launch`` are texts, as typed into the page's form; ``budget_mib`` is the pool's.
    ``tune_ms``: tune the model's kernels before the run, for so long at most.
    """

    prompt: str = ""
    model: str = "smollm2"
    raw: bool = False
    tokens: int = 64
    policy: str = "adaptive"
    kv: Kv = Kv.STATIC
    kv_type: KvType = KvType.F32
    eos: str = "stop"
    context: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    top_logits: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_length: int | None = None
    workload: str | None = None
    start: int | None = None
    policy_options: Mapping[str, str] = field(default_factory=dict)
    budget_mib: int | None = None
    hard_budget: bool = False
    launch: Mapping[str, str] = field(default_factory=dict)
    tune_ms: int | None = None
    digest: bool = False
    gpu_time: bool = False
    trace: bool = False
    kernel_times: bool = False
    pool_trace: bool = False

    def __post_init__(self) -> None:
        _check_options(self.policy, self.policy_options, self.launch)
        if self.workload is not None:
            known = workloads()
            if self.workload not in known:
                raise SetupError(f"there is no workload {self.workload!r}. Choose one of: {', '.join(known)}.")
            if self.prompt or self.prompt_ids or self.prompt_length:
                raise SetupError(f"{self.workload} has no model and takes no prompt.")
            if self.tune_ms is not None:
                raise SetupError(f"--tune is for a model's kernels; {self.workload} has no model.")
            if self.kv_type is not KvType.F32:
                raise SetupError(f"--kv-type is of a model's K and V; the tensors of {self.workload} are as they are.")
            if self.digest:
                raise SetupError(f"--digest is of a model's logits; {self.workload} has none: its ids are checksums.")
            if self.kernel_times:
                raise SetupError(f"--kernel-times is of a model's decode step; {self.workload} has none.")
            return
        if self.start is not None:
            raise SetupError("--from is for a workload: a model starts at its prompt.")
        if self.file is not None and not self.file.is_file():
            raise SetupError(
                f"{self.model}: no such file. Give the id of a bundled model (smollm2) or a path to a .gguf."
            )
        if self.is_synthetic:
            _synthetic(self.model)
        if any(text == "" for text in self.stop):
            raise SetupError("a stop string is empty: every answer would end before it began.")

    @property
    def file(self) -> Path | None:
        """The model's path, when ``model`` is one rather than an id."""
        if self.workload is not None:
            return None
        is_path = self.model.endswith(".gguf") or "/" in self.model or "\\" in self.model
        return Path(self.model).expanduser().resolve() if is_path else None

    @property
    def is_synthetic(self) -> bool:
        """Whether ``model`` names random weights, which the page makes."""
        return self.workload is None and self.model.startswith("synthetic:")

    @property
    def is_bundled(self) -> bool:
        """Whether the model is to be found in the site."""
        return self.workload is None and self.file is None and not self.is_synthetic

    @property
    def radios(self) -> dict[str, str]:
        model = self.workload or ("file" if self.file else self.model)
        if self.is_synthetic:
            model = _synthetic(model).choice
        return {"model": model, "kv": self.kv, "policy": self.policy}

    @property
    def fields(self) -> dict[str, str]:
        """The text and number controls, as a person would type them; empty is the page's default."""
        optional: dict[str, object] = {"budget": self.budget_mib}
        values: dict[str, object] = {
            "tokens": self.tokens,
            **{f"option-{k}": v for k, v in self.policy_options.items()},
            **{f"launch-{k}": v for k, v in self.launch.items()},
        }
        if self.workload is not None:
            optional["start"] = self.start
        else:
            optional["context"] = self.context
            values |= {
                "kv_type": self.kv_type,
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
                "seed": self.seed,
                "top_logits": self.top_logits,
                "stop": "|".join(map(escape_stop, self.stop)),
                "prompt": self.prompt,
                "prompt_ids": ",".join(map(str, self.prompt_ids)),
            }
            optional["prompt_length"] = self.prompt_length
            if self.tune_ms is not None:
                values["tune_ms"] = self.tune_ms
            if self.is_synthetic:
                values["format"] = _synthetic(self.model).kind
        values |= {name: "" if value is None else value for name, value in optional.items()}
        return {name: str(value) for name, value in values.items()}

    @property
    def times_gpu(self) -> bool:
        """Whether the GPU's clock is read: then it should be a fine one."""
        return self.gpu_time or self.kernel_times

    @property
    def switches(self) -> tuple[str, ...]:
        """The checkboxes that are on; all others are off."""
        on = {"hard": self.hard_budget, "digest": self.digest, "gpu_time": self.gpu_time, "trace": self.trace}
        on |= {"kernel_times": self.kernel_times, "raw": self.raw and self.workload is None}
        on |= {"pool_trace": self.pool_trace, "tune": self.tune_ms is not None}
        return tuple(name for name, value in on.items() if value)


_ESCAPES = {"\\": "\\\\", "|": "\\|", "\n": "\\n", "\t": "\\t"}


def escape_stop(text: str) -> str:
    """A stop string as the page's one-line field takes it: parts are separated by bars, newlines written ``\\n``."""
    return "".join(_ESCAPES.get(char, char) for char in text)


def workloads() -> tuple[str, ...]:
    """The names of the package's workloads."""
    from stepwell.decode.kv_pattern import WORKLOADS

    return tuple(WORKLOADS)


def kv_workload(model: str) -> str | None:
    """The workload that is all there is of a model, by the model's name; None: a model."""
    from stepwell.models.synthetic import KV_ONLY

    return KV_ONLY.get(model)


def _synthetic(name: str) -> "Synthetic":
    from stepwell.errors import BadRequest
    from stepwell.models.synthetic import Synthetic

    try:
        return Synthetic.named(name)
    except BadRequest as error:
        raise SetupError(str(error)) from error


def _check_options(policy: str, options: Mapping[str, str], launch: Mapping[str, str]) -> None:
    from stepwell.errors import BadRequest
    from stepwell.launch.options import LaunchOptions
    from stepwell.memory.policies import make_policy

    try:
        make_policy(policy, **options)
        LaunchOptions.from_dict(launch)
    except BadRequest as error:
        raise SetupError(str(error)) from error


def read_options(texts: Sequence[str], option: str = "--policy-option") -> dict[str, str]:
    """The ``name=value`` texts of an ``option`` of the command line."""
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SetupError(f"{option} {text!r}: write it as name=value.")
        options[name.strip()] = value.strip()
    return options


def read_prompt(prompt: str | None, file: Path | None, *in_ids: object) -> str:
    """The one prompt of ``--prompt`` and ``--prompt-file``; empty if it is one of ``in_ids`` instead.

    ``in_ids`` are the values of ``--prompt-ids`` and ``--prompt-length``, None where not given.
    """
    if sum(given is not None for given in (prompt, file, *in_ids)) != 1:
        raise SetupError(
            "give the prompt either as --prompt TEXT or as --prompt-file FILE, --prompt-ids 1,2,3 or --prompt-length N."
        )
    if file is None:
        return prompt or ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file}: {error}") from error


def read_ids(text: str | None) -> tuple[int, ...]:
    """The ids of ``--prompt-ids``; none if it is not given."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SetupError(f"--prompt-ids {text!r}: write ids separated by commas, such as 1,2,3.")
    return tuple(map(int, parts))
