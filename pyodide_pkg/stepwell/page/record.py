"""The run record, schema 2: everything one run measured, as plain data.  Its JSON Schema lives with the harness."""

from dataclasses import asdict, dataclass, field
from typing import Any

from stepwell.decode.timing import TokenEvent
from stepwell.memory.ledger import MemoryReport

SCHEMA = 2
"""The version of the record."""


@dataclass(slots=True)
class RunRecord:
    """The record of a run while it grows.  ``tokens[0]`` is the prefill: its ``ms`` is the time to the first token.

    ``before`` is the launcher's report at the start, because its counts are those of all its runs.  ``kernels`` is the
    table of ``profiling/kernel_times.py``, None unless it was asked for.
    """

    scenario: dict[str, Any]
    environment: dict[str, Any]
    prompt_ids: list[int]
    before: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "cancelled"
    tokens: list[dict[str, Any]] = field(default_factory=list)
    _memory: dict[str, Any] = field(default_factory=dict)
    _launch: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Any] | None = None

    def add(self, event: TokenEvent, text: str) -> dict[str, Any]:
        """Append a token, which must have been measured; returns its entry."""
        if event.counters is None:
            raise ValueError(f"token {event.index} was not measured: a record needs its counters")
        entry: dict[str, Any] = {
            "index": event.index,
            "position": event.position,
            "id": event.id,
            **asdict(event.timing),
            **asdict(event.counters),
        }
        if event.digest:
            entry["digest"] = event.digest
        if event.top_logits:
            entry["top_logits"] = [list(pair) for pair in event.top_logits]
        self.tokens.append(entry)
        self.token_ids.append(event.id)
        self.text += text
        return entry

    def memory(self, report: MemoryReport, explanation: str) -> None:
        """Take the pool's ``report``, in bytes, and its ``explanation``, before the session is closed."""
        self._memory = {
            "peak_reserved_bytes": report.peak_reserved_bytes,
            "by_role": {
                role: asdict(account) for role, account in report.by_role.items() if account.peak_reserved_bytes
            },
            "explanation": explanation,
        }

    def launched(self, report: dict[str, Any]) -> None:
        """Take the launcher's ``report`` at the end of the run, less the counts before it."""
        created, reused = (sum(token[f"bind_groups_{how}"] for token in self.tokens) for how in ("created", "reused"))
        self._launch = {
            **_since(report, self.before),
            "identity_rate": reused / (created + reused) if created + reused else None,
        }

    def as_dict(self) -> dict[str, Any]:
        """The record, as plain data."""
        return {
            "schema": SCHEMA,
            "scenario": self.scenario,
            "environment": self.environment,
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "ttft_ms": self.tokens[0]["ms"] if self.tokens else None,
            "tokens": self.tokens,
            "memory": self._memory,
            "launch": self._launch,
            **({} if self.kernels is None else {"kernels": self.kernels}),
        }


_COUNTED = frozenset(("recorded", "replayed", "invalidated", "refused", "evicted"))


def _since(after: dict[str, Any], before: dict[str, Any], counted: bool = False) -> dict[str, Any]:
    """``after`` with its counts less those of ``before``; ``counted``: it has counts only, without zeroes."""
    made: dict[str, Any] = {}
    for name, value in after.items():
        counts = counted or name in _COUNTED
        if isinstance(value, dict):
            made[name] = _since(value, before.get(name, {}), counts)
        else:
            made[name] = value - before.get(name, 0) if counts else value
    return {name: value for name, value in made.items() if value != 0} if counted else made
