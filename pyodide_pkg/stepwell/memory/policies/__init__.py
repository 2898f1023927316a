"""The pool policies by name.  A policy is one file here and one line in ``POLICIES``; the page lists this table."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepwell.errors import BadRequest
from stepwell.memory.policies.adaptive import Adaptive
from stepwell.memory.policies.base import Policy
from stepwell.memory.policies.bucket import Bucket
from stepwell.memory.policies.disabled import Disabled
from stepwell.memory.policies.lazy_release import LazyRelease
from stepwell.memory.policies.simple import Simple


class PolicyEntry(NamedTuple):
    factory: Callable[[], Policy]
    summary: str


POLICIES: Mapping[str, PolicyEntry] = {
    "adaptive": PolicyEntry(
        Adaptive, "keeps what the last runs needed; equal tensors outgrow their size class one by one"
    ),
    "bucket": PolicyEntry(Bucket, "ONNX Runtime's default: 26 sizes, each keeps a fixed number of free buffers"),
    "simple": PolicyEntry(
        Simple, "ONNX Runtime's simple: exact sizes, never given up; grows without bound with the context"
    ),
    "lazy_release": PolicyEntry(LazyRelease, "no reuse; released buffers are destroyed together after the submit"),
    "disabled": PolicyEntry(Disabled, "no reuse; every request creates a buffer"),
}


def make_policy(name: str) -> Policy:
    """A new policy object; BadRequest if there is none of that name."""
    entry = POLICIES.get(name)
    if entry is None:
        raise BadRequest(f"policy {name!r}: there is none of that name. Choose one of {', '.join(POLICIES)}.")
    return entry.factory()
