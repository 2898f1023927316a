"""The pool policies by name.  A policy is one file here and one row of ``POLICIES``; page and command line list it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stepwell.errors import BadRequest
from stepwell.memory.policies.adaptive import GROWTH, WINDOW, Adaptive
from stepwell.memory.policies.base import Policy
from stepwell.memory.policies.bucket import ERAS, ORT_LIMITS, Bucket
from stepwell.memory.policies.disabled import Disabled
from stepwell.memory.policies.exact import CAP, LARGEST_BYTES, Exact
from stepwell.memory.policies.high_water import WIDEST_WINDOW
from stepwell.memory.policies.lazy_release import LazyRelease
from stepwell.memory.policies.pow2 import Pow2
from stepwell.memory.policies.simple import Simple
from stepwell.options import Option, OptionKind, OptionValue, parse_options


class PolicyEntry(NamedTuple):
    """A row of the table.  ``factory`` takes the ``options`` as keyword arguments.

    ``tried``: options that ``what_if`` compares beside the defaults.  ``attached``: whether ``attach`` has the policy,
    as ``attach/js/policies/NAME.js``; ``tried_attached``: options that ``what_if`` compares for it there.
    """

    factory: Callable[..., Policy]
    summary: str
    options: tuple[Option, ...] = ()
    tried: tuple[Mapping[str, str], ...] = ()
    attached: bool = False
    tried_attached: tuple[Mapping[str, str], ...] = ()


POLICIES: Mapping[str, PolicyEntry] = {
    "adaptive": PolicyEntry(
        Adaptive,
        "keeps what the last runs needed; equal tensors outgrow their size class one by one",
        (
            Option("window", OptionKind.INT, WINDOW, "runs whose high-water mark is remembered", 1, WIDEST_WINDOW),
            Option("growth", OptionKind.FLOAT, GROWTH, "ratio of KV size classes, 1.01 to 2; 0 chooses them", 0, 2),
            Option("stagger", OptionKind.BOOL, True, "each site has size classes of its own"),
        ),
        tried=(
            {"growth": "1.1"},
            {"growth": "1.25"},
            {"growth": "2"},
            {"window": "2"},
            {"window": "32"},
            {"stagger": "false"},
        ),
        attached=True,
        tried_attached=({}, {"window": "2"}, {"window": "32"}),
    ),
    "bucket": PolicyEntry(
        Bucket,
        "ONNX Runtime's default: 26 sizes, each keeps a fixed number of free buffers",
        (
            Option("era", OptionKind.CHOICE, "B", "when a released buffer can serve again", choices=ERAS),
            Option("limits", OptionKind.LIMITS, ORT_LIMITS, "size classes and how many free buffers each keeps"),
        ),
        tried=(
            {"era": "A"},
            {"era": "C"},
            {"limits": ", ".join(f"{size}:{max(64, count)}" for size, count in ORT_LIMITS.items())},
        ),
        attached=True,
    ),
    "simple": PolicyEntry(
        Simple,
        "ONNX Runtime's simple: exact sizes, never given up; grows without bound with the context",
        attached=True,
        tried_attached=({},),
    ),
    "exact": PolicyEntry(
        Exact,
        "exact sizes, a fixed number of free buffers per size, as in jax-js",
        (
            Option("cap", OptionKind.INT, CAP, "free buffers kept per size", 0, 1 << 20),
            Option("largest_bytes", OptionKind.INT, LARGEST_BYTES, "larger buffers are never kept", 0, 1 << 40),
        ),
        tried=({"cap": "16"},),
        attached=True,
        tried_attached=({}, {"cap": "16"}),
    ),
    "pow2": PolicyEntry(Pow2, "powers of two, never given up, as ONNX Runtime's DirectML allocator"),
    "lazy_release": PolicyEntry(
        LazyRelease, "no reuse; released buffers are destroyed together after the submit", attached=True
    ),
    "disabled": PolicyEntry(Disabled, "no reuse; every request creates a buffer", attached=True, tried_attached=({},)),
}
"""The policies by name."""


def make_policy(name: str, **options: OptionValue) -> Policy:
    """A new policy object; BadRequest if there is none of that name, or for an option it lacks or out of range."""
    entry = POLICIES.get(name)
    if entry is None:
        raise BadRequest(f"policy {name!r}: there is none of that name. Choose one of {', '.join(POLICIES)}.")
    return entry.factory(**parse_options(entry.options, options, f"policy {name}"))
