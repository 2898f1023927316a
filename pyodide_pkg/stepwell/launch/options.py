"""The switches of the launch path, and the arms of the ablation that adds one at a time."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Self

from stepwell.options import Option, OptionKind, parse_options

VARIANTS_VARIABLE = "STEPWELL_KERNEL_VARIANTS_PER_NODE"
"""The environment variable that bounds the kernel variants per node."""
VARIANTS_PER_NODE = 4
"""The bound without it."""


class Params(StrEnum):
    """Where a kernel finds the step's scalars."""

    AUTO = "auto"  # immediates where the device has them, else call_site
    UNIFORM_POOL = "uniform_pool"  # a uniform slot per launch, taken by its place in the batch
    CALL_SITE = "call_site"  # a uniform slot of its own for every place in the model that launches
    IMMEDIATES = "immediates"  # WebGPU's setImmediates: no buffer at all


class Kernels(StrEnum):
    """The family of kernels: how much a thread does."""

    AUTO = "auto"  # the one made for this adapter
    QUAD = "quad"  # much, in workgroups of few: for CPU adapters
    SPLIT = "split"  # little, in workgroups of many: for GPUs


class Switch(StrEnum):
    """A switch that the adapter may decide."""

    AUTO = "auto"  # on where this adapter is faster with it
    ON = "on"  # or an error that says why not
    OFF = "off"


OPTIONS: tuple[Option, ...] = (
    Option("shared_pass", OptionKind.BOOL, True, "one compute pass until a copy, a clear or a read ends it"),
    Option("bind_group_cache", OptionKind.BOOL, True, "keep bind groups for the buffers that come again"),
    Option("skip_uploads", OptionKind.BOOL, True, "leave out parameter writes that would change nothing"),
    Option("submit_every", OptionKind.INT, 0, "submit after that many dispatches; 0 or less: with the step"),
    Option(
        "submit_every_ms", OptionKind.FLOAT, 0.0, "submit after that many ms of encoding; 0: with the step", 0, 60_000
    ),
    Option(
        "params", OptionKind.CHOICE, Params.AUTO.value, "where kernels find the step's scalars",
        choices=tuple(mode.value for mode in Params),
    ),
    Option("replay", OptionKind.BOOL, True, "replay a recorded plan of the decode step by one call"),
    Option(
        "readback_depth", OptionKind.INT, None, "steps that token ids may lag behind; empty: 1, or 0 where it must be",
        0, 64,
    ),
    Option("bind_groups", OptionKind.INT, 2048, "most bind groups that the cache keeps", 1, 1 << 20),
    Option(
        "variants_per_node", OptionKind.INT, None,
        f"kernel variants kept per node; empty: ${VARIANTS_VARIABLE} or {VARIANTS_PER_NODE}; 0: no bound",
        0, 1 << 16,
    ),
    Option("width_ladder", OptionKind.BOOL, True, "prefill in a few fixed widths, which few variants serve"),
    Option(
        "kernels", OptionKind.CHOICE, Kernels.AUTO.value,
        "quad: few threads that do much each, as CPU adapters like it; split: many, for GPUs",
        choices=tuple(family.value for family in Kernels),
    ),
    Option(
        "fused", OptionKind.CHOICE, Switch.AUTO.value, "decode in 5 launches per layer instead of 9; auto: on GPUs",
        choices=tuple(switch.value for switch in Switch),
    ),
    Option(
        "subgroups", OptionKind.CHOICE, Switch.AUTO.value, "kernels that use subgroups; auto: where they can",
        choices=tuple(switch.value for switch in Switch),
    ),
    Option(
        "dot4", OptionKind.CHOICE, Switch.AUTO.value,
        "products of fused decode steps in integers, four at a time; auto: on GPUs that have subgroups of one size",
        choices=tuple(switch.value for switch in Switch),
    ),
    Option(
        "f16", OptionKind.CHOICE, Switch.AUTO.value,
        "products of prompts in f16; auto: on GPUs that have shader-f16",
        choices=tuple(switch.value for switch in Switch),
    ),
    Option("tuned", OptionKind.BOOL, True, "kernels as they were tuned for this adapter, where they were"),
)  # fmt: skip
"""The switches, a row each."""
_BY_NAME = {option.name: option for option in OPTIONS}


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
        for option, field in zip(OPTIONS, fields(self), strict=True):
            given = getattr(self, field.name)
            value = option.default if given is None else option.parse(given, "launch")
            kind = type(field.default)
            object.__setattr__(self, field.name, kind(value) if issubclass(kind, StrEnum) else value)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Options from a request or a form (texts are read); None is the default.  BadRequest for what is unknown."""
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**parse_options(OPTIONS, given, "launch"))

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
        return int(_BY_NAME["variants_per_node"].parse(text, f"${VARIANTS_VARIABLE}"))


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
