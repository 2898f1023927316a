"""How steps are launched: every switch of the launch path, and the arms of the ablation that adds one at a time."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import inf, isfinite
from typing import Any, NamedTuple, Self

from stepwell.errors import BadRequest
from stepwell.options import OptionKind

VARIANTS_VARIABLE = "STEPWELL_KERNEL_VARIANTS_PER_NODE"
VARIANTS_PER_NODE = 4


class Params(StrEnum):
    """Where a kernel finds the step's scalars."""

    AUTO = "auto"  # immediates where the device has them, else call_site
    UNIFORM_POOL = "uniform_pool"  # a uniform slot per launch, taken by its place in the batch
    CALL_SITE = "call_site"  # a uniform slot of its own for every place in the model that launches
    IMMEDIATES = "immediates"  # WebGPU's setImmediates: no buffer at all


class Kernels(StrEnum):
    """The family of kernels: what a thread has to do."""

    AUTO = "auto"  # the one that is made for this adapter
    QUAD = "quad"  # much, in workgroups of few: for CPU adapters
    SPLIT = "split"  # little, in workgroups of many: for GPUs


class Switch(StrEnum):
    AUTO = "auto"  # on where this adapter is faster with it
    ON = "on"  # or an error that says why not
    OFF = "off"


class LaunchOption(NamedTuple):
    """One field of LaunchOptions for pages and command lines; ``default`` None: chosen by the launcher."""

    name: str
    kind: OptionKind
    default: int | float | str | None
    summary: str
    choices: tuple[str, ...] = ()
    minimum: float = -inf
    maximum: float = inf

    def parse(self, value: object) -> int | float | str | None:
        """``value`` in this option's type; text is read as typed into a form.  BadRequest with what is allowed."""
        if value is None:
            return self.default
        try:
            return self._checked(self._read(value) if isinstance(value, str) else value)
        except (TypeError, ValueError):
            raise BadRequest(f"launch option {self.name} is {value!r}; it must be {self._expected()}.") from None

    def _read(self, text: str) -> int | float | str:
        match self.kind:
            case OptionKind.BOOL if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case OptionKind.INT:
                return int(text)
            case OptionKind.FLOAT:
                return float(text)
            case OptionKind.CHOICE:
                return text
            case _:
                raise ValueError(text)

    def _checked(self, value: object) -> int | float | str:
        if self.kind is OptionKind.CHOICE:
            if value not in self.choices:
                raise ValueError(value)
            return str(value)
        if self.kind is OptionKind.BOOL:
            if not isinstance(value, bool):
                raise TypeError(value)
            return value
        allowed = (int,) if self.kind is OptionKind.INT else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise TypeError(value)
        if not (isfinite(value) and self.minimum <= value <= self.maximum):
            raise ValueError(value)
        return value if self.kind is OptionKind.INT else float(value)

    def _expected(self) -> str:
        match self.kind:
            case OptionKind.BOOL:
                return "true or false"
            case OptionKind.CHOICE:
                return f"one of {', '.join(self.choices)}"
            case _:
                whole = "a whole number" if self.kind is OptionKind.INT else "a number"
                return f"{whole} from {self.minimum:,} to {self.maximum:,}" if isfinite(self.maximum) else whole


OPTIONS: tuple[LaunchOption, ...] = (
    LaunchOption("shared_pass", OptionKind.BOOL, True, "one compute pass until a copy, a clear or a read ends it"),
    LaunchOption("bind_group_cache", OptionKind.BOOL, True, "keep bind groups for the buffers that come again"),
    LaunchOption("skip_uploads", OptionKind.BOOL, True, "leave out parameter writes that would change nothing"),
    LaunchOption("submit_every", OptionKind.INT, 0, "submit after that many dispatches; 0 or less: with the step"),
    LaunchOption(
        "submit_every_ms", OptionKind.FLOAT, 0.0, "submit after that many ms of encoding; 0: with the step", (), 0, 60e3
    ),
    LaunchOption(
        "params", OptionKind.CHOICE, Params.AUTO.value, "where kernels find the step's scalars",
        tuple(mode.value for mode in Params),
    ),
    LaunchOption("replay", OptionKind.BOOL, True, "replay a recorded plan of the decode step by one call"),
    LaunchOption(
        "readback_depth", OptionKind.INT, None, "steps that token ids may lag behind; empty: 1, or 0 where it must be",
        (), 0, 64,
    ),
    LaunchOption("bind_groups", OptionKind.INT, 2048, "most bind groups that the cache keeps", (), 1, 1 << 20),
    LaunchOption(
        "variants_per_node", OptionKind.INT, None,
        f"kernel variants kept per node; empty: ${VARIANTS_VARIABLE} or {VARIANTS_PER_NODE}; 0: no bound",
        (), 0, 1 << 16,
    ),
    LaunchOption("width_ladder", OptionKind.BOOL, True, "prefill in a few fixed widths, which few variants serve"),
    LaunchOption(
        "kernels", OptionKind.CHOICE, Kernels.AUTO.value,
        "quad: few threads that do much each, as CPU adapters like it; split: many, for GPUs",
        tuple(family.value for family in Kernels),
    ),
    LaunchOption(
        "fused", OptionKind.CHOICE, Switch.AUTO.value, "decode in 5 launches per layer instead of 9; auto: on GPUs",
        tuple(switch.value for switch in Switch),
    ),
    LaunchOption(
        "subgroups", OptionKind.CHOICE, Switch.AUTO.value, "kernels that use subgroups; auto: where they can",
        tuple(switch.value for switch in Switch),
    ),
    LaunchOption(
        "dot4", OptionKind.CHOICE, Switch.AUTO.value,
        "products of fused decode steps in integers, four at a time; auto: on GPUs that have subgroups of one size",
        tuple(switch.value for switch in Switch),
    ),
    LaunchOption(
        "f16", OptionKind.CHOICE, Switch.AUTO.value,
        "products of prompts in f16; auto: on GPUs that have shader-f16",
        tuple(switch.value for switch in Switch),
    ),
    LaunchOption("tuned", OptionKind.BOOL, True, "kernels as they were tuned for this adapter, where they were"),
)  # fmt: skip
_BY_NAME = {option.name: option for option in OPTIONS}
_ENUMS: dict[str, type[StrEnum]] = {
    "params": Params,
    "kernels": Kernels,
    "fused": Switch,
    "subgroups": Switch,
    "dot4": Switch,
    "f16": Switch,
}


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The switches of one engine.  The defaults are the fast ones; OPTIONS says what each does and may be."""

    shared_pass: bool = True
    bind_group_cache: bool = True
    skip_uploads: bool = True
    submit_every: int = 0
    submit_every_ms: float = 0.0
    params: Params = Params.AUTO
    replay: bool = True
    readback_depth: int | None = None
    bind_groups: int = 2048
    variants_per_node: int | None = None
    width_ladder: bool = True
    kernels: Kernels = Kernels.AUTO
    fused: Switch = Switch.AUTO
    subgroups: Switch = Switch.AUTO
    dot4: Switch = Switch.AUTO
    f16: Switch = Switch.AUTO
    tuned: bool = True

    def __post_init__(self) -> None:
        """Raises BadRequest for a value that is not allowed; numbers and choices get their exact types."""
        for name, option in _BY_NAME.items():
            value = option.parse(getattr(self, name))
            object.__setattr__(self, name, _ENUMS[name](str(value)) if name in _ENUMS else value)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Options from a request or a form (texts are read); None is the default.  BadRequest for what is unknown."""
        for name in values:
            if name not in _BY_NAME:
                raise BadRequest(f"no launch option is named {name!r}; there are {', '.join(_BY_NAME)}.")
        given: dict[str, Any] = {name: _BY_NAME[name].parse(value) for name, value in values.items()}
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Every field as JSON has it."""
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in asdict(self).items()}

    def changes(self) -> dict[str, Any]:
        """The fields that differ from the default: what a request carries."""
        default = LaunchOptions().as_dict()
        return {name: value for name, value in self.as_dict().items() if value != default[name]}

    @property
    def variants_bound(self) -> int:
        """Kernel variants kept per node, 0 for no bound: this option's, the environment's, or 4."""
        if self.variants_per_node is not None:
            return self.variants_per_node
        text = os.environ.get(VARIANTS_VARIABLE, "")
        if not text:
            return VARIANTS_PER_NODE
        try:
            bound = _BY_NAME["variants_per_node"].parse(text)
        except BadRequest as error:
            raise BadRequest(f"${VARIANTS_VARIABLE} is {text!r}: {error}") from error
        return int(bound or 0)


_MAIN = LaunchOptions(
    shared_pass=False, bind_group_cache=False, skip_uploads=False, params=Params.UNIFORM_POOL, replay=False,
    readback_depth=0,
)  # fmt: skip
_STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("+shared pass", {"shared_pass": True}),
    ("+bind-group cache", {"bind_group_cache": True}),
    ("+skip uploads", {"skip_uploads": True}),
    ("+periodic submission", {"submit_every": 140}),  # in two parts: a step of the demo model has 155 or 274
    ("+immediates", {"params": Params.AUTO}),
    ("+plan replay", {"replay": True}),
    ("+readback K=4", {"readback_depth": 4}),
)


def _arms() -> tuple[tuple[str, LaunchOptions], ...]:
    arms = [("main", _MAIN)]
    for name, change in _STEPS:
        arms.append((name, replace(arms[-1][1], **change)))
    return tuple(arms)


ABLATION = _arms()
"""Each arm is the one before it with one switch more; ``main`` has none."""
