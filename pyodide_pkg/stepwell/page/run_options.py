"""The run options, a row each: all that there is to say of an option is in its row.

These rows make the request and its errors (``request.py``), the command line's options, the scenario that the
harness fills into the page's form, the form's controls, its links and its requests (``run_options.js`` of the built
site), the ``scenario`` of the run record's schema, and the table in docs/protocol.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.kv_pattern import FIRST_POSITIONS
from stepwell.kernels.kv import KV_TYPES
from stepwell.options import Option, OptionKind


class Where(StrEnum):
    """The runs that an option is for."""

    ANY = "any"
    MODEL = "model"
    WORKLOAD = "workload"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOption(Option):
    """One run option.

    ``lacks``: what the runs that it is not for lack; they refuse it.  Without it they ignore the option.
    ``always``: it is in every request of the page and required in a record; any other only where it has another value
    than the default.  ``needs``: the option with which alone it is sent.  ``once``: it is for a run that someone asks
    for, not for runs that are compared with each other.
    ``decides``: whether the tokens of a run may depend on it.
    ``form``: the panel of the page, or the part of one, that makes its control from the row; OWN: made by hand; RADIO:
    made once Python has told what there is; "": no control of its own.  ``control``: its name in the form and in links,
    if that is another; ``on``: the choice of that control for which a switch is on.  ``label``: what people call it.
    ``empty``: what an empty control stands for, where the default is None.
    ``flag``: its name on the command line, if that is another than the control's.  ``file``: a switch whose result is a
    text of its own, which the command line writes to a path.
    """

    where: Where = Where.ANY
    lacks: str = ""
    always: bool = False
    needs: str = ""
    once: bool = False
    decides: bool = True
    form: str = ""
    control: str = ""
    on: str = ""
    label: str = ""
    empty: str = "auto"
    flag: str = ""
    file: bool = False

    @property
    def field(self) -> str:
        """The name of its control; for VALUES the beginning of their controls' names."""
        return self.control or self.name

    @property
    def option(self) -> str:
        """The name of the option on the command line."""
        return "--" + (self.flag or self.field).replace("_", "-")

    def describe(self) -> dict[str, Any]:
        """The row as the page's scripts have it."""
        own = ("always", "needs", "once", "decides", "form", "on", "label", "empty")
        return {
            **Option.describe(self),
            "where": self.where.value,
            "control": self.field,
            **{name: getattr(self, name) for name in own},
        }


OWN, RADIO = "own", "radio"
"""Forms that no panel makes from the row."""
_ROWS = (
    RunOption(
        name="prompt", kind=OptionKind.TEXT, default="", summary="the prompt", form=OWN,
        where=Where.MODEL, lacks="prompt", always=True,
    ),
    RunOption(
        name="tokens", kind=OptionKind.INT, default=64, minimum=1, summary="how many to generate at most",
        always=True, decides=False, form="sampling", label="Tokens",
    ),
    RunOption(
        name="context", kind=OptionKind.INT, default=None, minimum=1,
        summary="positions that the KV cache has room for; else as many as prompt and tokens need",
        where=Where.MODEL, always=True, decides=False, form="sampling", label="Context",
    ),
    RunOption(
        name="temperature", kind=OptionKind.FLOAT, default=0.0, minimum=0, summary="0: greedy, chosen on the GPU",
        where=Where.MODEL, always=True, form="sampling", label="Temperature",
    ),
    RunOption(
        name="seed", kind=OptionKind.INT, default=0, minimum=0, maximum=2**32 - 1,
        summary="the same seed gives the same answer",
        where=Where.MODEL, always=True, form="sampling", label="Seed",
    ),
    RunOption(
        name="top_k", kind=OptionKind.INT, default=0, minimum=0, summary="sample from the k likeliest tokens; 0: off",
        where=Where.MODEL, always=True, form="sampling", label="Top-k",
    ),
    RunOption(
        name="top_p", kind=OptionKind.FLOAT, default=1.0, minimum=0, maximum=1, above=True,
        summary="sample from the likeliest tokens that come to this probability; 1: off",
        where=Where.MODEL, always=True, form="sampling", label="Top-p",
    ),
    RunOption(
        name="top_logits", kind=OptionKind.INT, default=0, minimum=0,
        summary="largest logits stored per token in the record; reading them costs time",
        where=Where.MODEL, always=True, form="sampling", label="Logits kept",
    ),
    RunOption(
        name="ban_eos", kind=OptionKind.BOOL, default=False, summary="never choose an end-of-sequence token",
        where=Where.MODEL, always=True, form="sampling", control="eos", on="ban", flag="ban-eos", label="is banned",
    ),
    RunOption(
        name="ignore_eos", kind=OptionKind.BOOL, default=False,
        summary="feed an end-of-sequence token back like any other",
        where=Where.MODEL, always=True, form="sampling", control="eos", on="ignore", flag="ignore-eos",
        label="is ignored",
    ),
    RunOption(
        name="stop", kind=OptionKind.TEXTS, default=(),
        summary="texts that end the answer; in the form | between several, \\n is a line break",
        where=Where.MODEL, always=True, form="sampling", label="Stop at",
    ),
    RunOption(
        name="prompt_ids", kind=OptionKind.IDS, default=None,
        summary="the prompt as token ids, such as 1,2,3; taken as they are",
        where=Where.MODEL, lacks="prompt", form="sampling", label="Prompt as ids", empty="none",
    ),
    RunOption(
        name="prompt_length", kind=OptionKind.INT, default=None, minimum=1,
        summary="a prompt of this number of pseudo-random ids, by the seed: to time long prompts",
        where=Where.MODEL, lacks="prompt", form="sampling", label="Random ids", empty="none",
    ),
    RunOption(
        name="raw", kind=OptionKind.BOOL, default=False, summary="take the prompt without the chat template",
        where=Where.MODEL, always=True, form="sampling", label="Raw prompt, without the chat template",
    ),
    RunOption(
        name="policy", kind=OptionKind.TEXT, default="adaptive", summary="the cache policy; an unknown name lists them",
        always=True, decides=False, form=RADIO,
    ),
    RunOption(
        name="policy_options", kind=OptionKind.VALUES, default={}, summary="options of the policy's own table",
        decides=False, control="option-", flag="policy-option",
    ),
    RunOption(
        name="budget_mib", kind=OptionKind.INT, default=None, minimum=1,
        summary="MiB that the pool may reserve in all; else no limit",
        decides=False, form="budget", control="budget", label="Budget, MiB", empty="none",
    ),
    RunOption(
        name="hard_budget", kind=OptionKind.BOOL, default=False, summary="fail rather than exceed the budget",
        needs="budget_mib", decides=False, form="budget", control="hard", label="Fail rather than exceed it",
    ),
    RunOption(
        name="kv", kind=OptionKind.CHOICE, default="static", choices=tuple(KV_MODES),
        summary="how the KV cache is kept: a new buffer per step, moved when it is full, allocated once, or in pages",
        always=True, decides=False, form=RADIO,
    ),
    RunOption(
        name="kv_type", kind=OptionKind.CHOICE, default="f32", choices=tuple(KV_TYPES),
        summary="what K and V are stored in; f16: half the memory and half the bytes that attention reads, "
        "11 bits of precision up to 65,504; kernels compute in f32",
        where=Where.MODEL, lacks="choice of type", form="cache", label="K and V stored as",
    ),
    RunOption(
        name="workload", kind=OptionKind.TEXT, default=None,
        summary="in place of a model: kv64 or kv16, growing tensors and nothing else", empty="none",
    ),
    RunOption(
        name="start", kind=OptionKind.INT, default=None, minimum=1, summary="positions that the first step fills",
        where=Where.WORKLOAD, lacks="tensors to fill", form=OWN, label="From position", flag="from",
        empty=str(FIRST_POSITIONS),
    ),
    RunOption(
        name="launch", kind=OptionKind.VALUES, default={},
        summary="launch options that differ from their defaults; an unknown name lists them",
        decides=False, control="launch-", flag="launch",
    ),
    RunOption(
        name="digest", kind=OptionKind.BOOL, default=False,
        summary="a digest of every step's logits, 16 hex digits; reading all logits costs time",
        where=Where.MODEL, lacks="logits", decides=False, form="launch", label="Digest of the logits",
    ),
    RunOption(
        name="gpu_time", kind=OptionKind.BOOL, default=False,
        summary="time stamps around every pass, where the device has timestamp-query",
        decides=False, form="launch", label="GPU time",
    ),
    RunOption(
        name="kernel_times", kind=OptionKind.BOOL, default=False,
        summary="a table of GPU time per kernel, measured after the run by repeating a step with a pass per launch",
        where=Where.MODEL, lacks="decode step", decides=False, form="launch", label="GPU time per kernel",
    ),
    RunOption(
        name="trace", kind=OptionKind.BOOL, default=False,
        summary="the spans of Python, encoding, submission and waiting, for ui.perfetto.dev or chrome://tracing",
        decides=False, form="launch", label="Chrome trace", file=True,
    ),
    RunOption(
        name="pool_trace", kind=OptionKind.BOOL, default=False,
        summary="what the run asks of the buffer pool, a .trace or .trace.gz for python -m stepwell.replay what-if",
        decides=False, form="what-if", label="Record a trace of the next runs", file=True,
    ),
    RunOption(
        name="tune", kind=OptionKind.BOOL, default=False,
        summary="before the run: ways of sharing out each matrix product, timed on the model's weights",
        where=Where.MODEL, lacks="products to tune", once=True, form="tuning", label="Tune kernels for this GPU",
    ),
    RunOption(
        name="tune_ms", kind=OptionKind.INT, default=30_000, minimum=1,
        summary="milliseconds after which tuning ends; what was found until then is kept",
        where=Where.MODEL, needs="tune", once=True, form="tuning", label="Time at most, ms",
    ),
)  # fmt: skip
RUN_OPTIONS: Mapping[str, RunOption] = {option.name: option for option in _ROWS}
"""The run options by name."""
