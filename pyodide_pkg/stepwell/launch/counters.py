"""What issuing work cost, counted."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Cumulative counts since the launcher was made.  Bytes where the name says so, else events."""

    launches: int = 0
    passes: int = 0
    submits: int = 0
    copies: int = 0
    copy_bytes: int = 0
    bind_groups_created: int = 0
    bind_groups_reused: int = 0
    bind_groups_evicted: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    readbacks: int = 0
    readback_bytes: int = 0
