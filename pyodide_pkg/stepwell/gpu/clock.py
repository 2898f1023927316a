"""The clock of every timing."""

import time


def now_ms() -> float:
    """Milliseconds since an arbitrary start; in a browser as fine as performance.now()."""
    return 1000 * time.perf_counter()
