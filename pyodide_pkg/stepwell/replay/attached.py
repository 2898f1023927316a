"""Traces of a runtime that ``stepwell.attach`` watched: what a pool under it can do, replayed and as a line of code.

Such a pool gives buffers of exactly the size and usage asked for, so no size class is rounded up to, and each usage has
a policy of its own: the site of a request is the index of its usage.  Without a pool the runtime creates and destroys
what it asks for, as ``disabled`` does.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES
from stepwell.memory.policies.base import Policy, Request
from stepwell.options import parse_options

BARE = "disabled"
"""The policy that stands for no pool at all."""
TRIED_ATTACHED: Mapping[str, Sequence[Mapping[str, str]]] = {
    "adaptive": ({}, {"window": "2"}, {"window": "32"}),
    "exact": ({}, {"cap": "16"}),
    "simple": ({},),
    BARE: ({},),
}
"""What is worth a try where sizes stay as they are: what concerns size classes, or KV alone, makes no difference."""


def is_attached(metadata: Mapping[str, object]) -> bool:
    """Whether a trace with this metadata is of a runtime that was watched."""
    return bool(metadata.get("attach"))


class ExactRequests:
    """A policy whose requests keep their size: one of ``make``'s per usage, asked in the order in which they came."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._policies: dict[int, Policy] = {}  # by usage
        self._kept: dict[int, int] = {}  # bytes of the buffers that the policies keep
        self._last = make()

    def size_class(self, request: Request) -> int:
        return request.nbytes

    def acquire(self, request: Request, size: int) -> int | None:
        found = self._policies.get(request.site)
        if found is None:
            found = self._policies[request.site] = self._make()
        self._last = found
        buffer_id = found.acquire(_exact(request), size)
        if buffer_id is not None:
            del self._kept[buffer_id]
        return buffer_id

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        self._kept[buffer_id] = size
        return self._without(self._policies[request.site].release(buffer_id, _exact(request), size, recorded))

    def flush(self) -> Sequence[int]:
        return self._of_all(lambda policy: policy.flush())

    def begin_run(self) -> Sequence[int]:
        return self._of_all(lambda policy: policy.begin_run())

    def drain(self) -> Sequence[int]:
        return self._of_all(lambda policy: policy.drain())

    def reclaim(self, nbytes: int) -> Sequence[int]:
        given_up: list[int] = []
        for policy in self._policies.values():
            if nbytes <= 0:
                break
            some = policy.reclaim(nbytes)
            nbytes -= sum(self._kept[buffer_id] for buffer_id in some)
            given_up += self._without(some)
        return given_up

    def target(self, size: int, role: Role) -> int | None:
        """Of the usage that was asked for last."""
        return self._last.target(size, Role.ACTIVATION)

    def _of_all(self, decide: Callable[[Policy], Sequence[int]]) -> list[int]:
        given_up: list[int] = []
        for policy in self._policies.values():
            given_up += self._without(decide(policy))
        return given_up

    def _without(self, given_up: Sequence[int]) -> Sequence[int]:
        for buffer_id in given_up:
            del self._kept[buffer_id]
        return given_up


def attach_code(policy: str, options: Mapping[str, str], budget_bytes: int | None = None) -> str:
    """The line that puts such a pool under a runtime, in JavaScript."""
    fields = {"policy": json.dumps(policy)}
    if options:
        values = parse_options(policy, POLICIES[policy].options, options)
        fields["options"] = "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items()) + "}"
    if budget_bytes is not None:
        fields["budget"] = str(budget_bytes)
    return "stepwell.attach({" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "})"


def _exact(request: Request) -> Request:
    """As the keeper asks: every storage buffer alike."""
    return Request(request.nbytes, Role.ACTIVATION, 0, True)
