"""Counters of the work issued."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Cumulative counts since the launcher was made.  Bytes where the name says so, else events."""

    launches: int = 0
    passes: int = 0
    encoders: int = 0
    submits: int = 0
    syncs: int = 0  # waits for the GPU: each read and each fence
    copies: int = 0
    bind_groups_created: int = 0
    bind_groups_reused: int = 0
    bind_groups_evicted: int = 0
    uploads: int = 0
    uploads_skipped: int = 0
    upload_bytes: int = 0
    immediates: int = 0
    immediates_bytes: int = 0
    readbacks: int = 0
    readback_bytes: int = 0
    replayed: int = 0

    def add(self, other: "Counters") -> None:
        """Add the counts of ``other``."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def since(self, before: "Counters") -> "Counters":
        """The counts since ``before``, an earlier copy."""
        return Counters(*(getattr(self, name) - getattr(before, name) for name in COUNTERS))

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def copy(self) -> "Counters":
        """The counts of now."""
        return Counters(*(getattr(self, name) for name in COUNTERS))


COUNTERS = tuple(field.name for field in fields(Counters))
"""The names of the counts."""
