"""The run record, schema 1: everything one run measured, as plain data.  Its JSON Schema lives with the harness."""

from dataclasses import asdict, dataclass, field
from typing import Any

from stepwell.decode.timing import TokenEvent
from stepwell.memory.ledger import MemoryReport

SCHEMA = 1


@dataclass(slots=True)
class RunRecord:
    """Grows with the run; ``as_dict`` is what is exported.  ``tokens[0]`` is the prefill: its ``ms`` is the TTFT."""

    scenario: dict[str, Any]
    environment: dict[str, Any]
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "cancelled"
    tokens: list[dict[str, Any]] = field(default_factory=list)
    _memory: dict[str, Any] = field(default_factory=dict)

    def add(self, event: TokenEvent, text: str) -> dict[str, Any]:
        """Append a token; returns its entry."""
        entry: dict[str, Any] = {
            "index": event.index,
            "position": event.position,
            "id": event.id,
            **asdict(event.timing),
            **(asdict(event.counters) if event.counters else {}),
        }
        if event.top_logits:
            entry["top_logits"] = [list(pair) for pair in event.top_logits]
        self.tokens.append(entry)
        self.token_ids.append(event.id)
        self.text += text
        return entry

    def memory(self, report: MemoryReport, explanation: str) -> None:
        """Take the pool's peaks and levels, in bytes, and what it says of itself, before the session is closed."""
        self._memory = {
            "peak_reserved_bytes": report.peak_reserved_bytes,
            "by_role": {
                role: asdict(account) for role, account in report.by_role.items() if account.peak_reserved_bytes
            },
            "explanation": explanation,
        }

    def as_dict(self) -> dict[str, Any]:
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
        }
