"""The request of a ``run`` message: what to run, with the defaults of docs/architecture.md, checked on arrival."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from stepwell.decode.sampling import Sampling
from stepwell.errors import BadRequest
from stepwell.kernels.kv import KV_TYPES
from stepwell.launch.options import LaunchOptions


@dataclass(frozen=True, slots=True)
class Request:
    """``workload`` (a row of WORKLOADS) needs no model and no prompt: it uses ``start``, ``tokens``, ``kv``, the
    policy, ``launch``, ``gpu_time``, ``trace`` and ``pool_trace``; everything else is for a model.

    The prompt is a text, or ``prompt_ids`` as they are, or ``prompt_length`` pseudo-random ids, by ``seed``.

    ``kernel_times``: after the run, the GPU time of each kernel in the step behind the last token.
    ``pool_trace``: what the run asks of the pool, as a trace for ``stepwell.replay`` (what-if).
    ``tune``: before the run the model's kernels are tuned for this adapter, for ``tune_ms`` at most.

    ``kv_type``: what K and V are stored in, "f32" or "f16" (half the bytes; see kernels/kv.py for what does not fit).

    ``policy_options`` are checked by the policy's own table.  ``launch`` holds fields of LaunchOptions.
    """

    prompt: str = ""
    raw: bool = False
    tokens: int = 64
    policy: str = "adaptive"
    kv: str = "static"
    kv_type: str = "f32"
    context: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ban_eos: bool = False
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    top_logits: int = 0
    prompt_ids: tuple[int, ...] | None = None
    prompt_length: int | None = None
    workload: str | None = None
    start: int | None = None
    policy_options: dict[str, Any] = field(default_factory=dict)
    budget_mib: int | None = None
    hard_budget: bool = False
    launch: dict[str, Any] = field(default_factory=dict)
    tune: bool = False
    tune_ms: int = 30_000
    digest: bool = False
    gpu_time: bool = False
    trace: bool = False
    kernel_times: bool = False
    pool_trace: bool = False

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Null means the default.  Raises BadRequest for unknown fields and values of the wrong type."""
        given = {name: value for name, value in json.loads(text).items() if value is not None}
        types = {name: found.type for name, found in cls.__dataclass_fields__.items()}
        for name, value in given.items():
            if name not in types:
                raise BadRequest(f"the request has a field {name!r}; there are {', '.join(types)}.")
            given[name] = _typed(name, value, types[name])
        request = cls(**given)
        request._check_prompt(given)
        if request.budget_mib is not None and request.budget_mib < 1:
            raise BadRequest(f"budget_mib is {request.budget_mib}; it must be 1 MiB or more, or left out.")
        if request.digest and request.workload is not None:
            raise BadRequest(f"digest is of a model's logits; {request.workload} has none: leave it out.")
        if request.kernel_times and request.workload is not None:
            raise BadRequest(f"kernel_times is of a model's decode step; {request.workload} has none: leave it out.")
        if request.tune and request.workload is not None:
            raise BadRequest(f"tune is of a model's products; {request.workload} has none: leave it out.")
        if request.kv_type not in KV_TYPES:
            raise BadRequest(f"kv_type is {request.kv_type!r}; there are {', '.join(KV_TYPES)}.")
        if request.kv_type != "f32" and request.workload is not None:
            raise BadRequest(f"kv_type is of a model's K and V; the tensors of {request.workload} are as they are.")
        if request.tune_ms < 1:
            raise BadRequest(f"tune_ms is {request.tune_ms}; it must be 1 or more.")
        _ = request.launch_options
        return request

    def _check_prompt(self, given: Iterable[str]) -> None:
        """A model gets one prompt; counted in ids it is not empty."""
        in_ids = [name for name in ("prompt_ids", "prompt_length") if name in given]
        if self.workload is None and "prompt" not in given and not in_ids:
            raise BadRequest("the request has no prompt: write something.")
        if len(prompts := ["prompt"] * bool(self.prompt) + in_ids) > 1:
            raise BadRequest(f"the request has {' and '.join(prompts)}: give one of them.")
        if self.prompt_ids == () or (self.prompt_length is not None and self.prompt_length < 1):
            raise BadRequest(f"{in_ids[0]} asks for no token: give at least 1.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    @property
    def budget_bytes(self) -> int | None:
        return None if self.budget_mib is None else self.budget_mib << 20

    @property
    def launch_options(self) -> LaunchOptions:
        """Which engine runs this.  BadRequest for what ``launch`` must not hold."""
        return LaunchOptions.from_dict(self.launch)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _typed(name: str, value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise BadRequest(f"{name} is {value!r}; it must be a list of texts.")
    if kind == tuple[int, ...] | None:
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise BadRequest(f"{name} is {value!r}; it must be a list of integers.")
    expected = {int | None: int, str | None: str, dict[str, Any]: dict}.get(kind, kind)
    if type(value) is not expected:
        raise BadRequest(f"{name} is {value!r}; it must be of type {expected.__name__}.")
    return value
