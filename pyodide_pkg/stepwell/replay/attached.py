"""Traces of a runtime that ``stepwell.attach`` watched: a pool under it, as a line of code.

Such a pool is replayed by ``memory/policies/per_usage.py``; the site of a request is the index of its usage.  Without a
pool the runtime creates and destroys every buffer, as ``disabled`` does.
"""

import json
from collections.abc import Mapping

from stepwell.memory.policies import POLICIES
from stepwell.options import parse_options

BARE = "disabled"
"""The policy that stands for no pool at all."""


def is_attached(metadata: Mapping[str, object]) -> bool:
    """Whether a trace with this ``metadata`` is of a runtime that was watched."""
    return bool(metadata.get("attach"))


def attach_code(policy: str, options: Mapping[str, str], budget_bytes: int | None = None) -> str:
    """The line of JavaScript that puts a pool of ``policy`` with ``options`` and a budget under a runtime."""
    fields = {"policy": json.dumps(policy)}
    if options:
        values = parse_options(POLICIES[policy].options, options, f"policy {policy}")
        fields["options"] = "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items()) + "}"
    if budget_bytes is not None:
        fields["budget"] = str(budget_bytes)
    return "stepwell.attach({" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "})"
