"""What a pool is doing with memory, and why, in plain words."""

from stepwell.memory.buffer import mib
from stepwell.memory.class_stats import ClassStats, Eviction
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import holders

_REASONS = {
    Eviction.LIMIT: "the limit is the cause",
    Eviction.WINDOW: "the demand returned after the window had passed",
    Eviction.BUDGET: "the budget is the cause",
    Eviction.OOM: "the device ran out of memory",
    Eviction.TRIM: "the caller trimmed the pool",
    Eviction.POLICY: "the policy was replaced",
    Eviction.LOST: "the device was lost",
}
_CHURN = 0.5  # evictions per run that are worth a sentence
_CHURN_RUNS = 4  # that it must go on for, and the most that may have passed since
_DEAD_SHARE = 20  # a class that is all free is worth a sentence from one 20th of all bytes
_ADVICE = {
    Eviction.LIMIT: "Raise the limit of this class or choose adaptive.",
    Eviction.WINDOW: "A longer window would keep them.",
    Eviction.BUDGET: "A larger budget would keep them.",
}


def explain(pool: BufferPool) -> str:
    """One sentence per thing worth knowing: churn by class with its cause, dead weight, padding, budget, holders."""
    report = pool.report()
    lines = [
        f"{mib(report.reserved_bytes)} reserved: {mib(report.in_use_bytes)} in use "
        f"({mib(report.padding_bytes)} of it padding), {mib(report.free_bytes)} free; "
        f"peak {mib(report.peak_reserved_bytes)}."
    ]
    stats = sorted(pool.ledger.classes.values(), key=lambda found: -found.evictions.total() * found.size)
    lines += [line for found in stats if (line := _churn(found, pool))]
    lines += [line for found in stats if (line := _dead_weight(found, pool))]
    lines += _limits(pool)
    lines.append(holders(pool))
    return "\n".join(lines)


def _churn(stats: ClassStats, pool: BufferPool) -> str:
    """A class that is created and destroyed over and over; empty if it is not, or no more."""
    runs = stats.last_eviction_run - stats.first_eviction_run + 1
    if runs < _CHURN_RUNS or pool.inventory.run - stats.last_eviction_run >= _CHURN_RUNS:
        return ""
    made = stats.evictions.total() / runs
    if made < _CHURN:
        return ""
    target = pool.target(stats)
    wanted = stats.high_water if target is None else made + target
    cause = Eviction(stats.evictions.most_common(1)[0][0])
    kept = "all kept" if target is None else f"{target} kept"
    return (
        f"class {mib(stats.size)} ({stats.role}): {wanted:.0f} wanted, {kept}, {made:.0f} made and destroyed per run: "
        f"{_REASONS.get(cause, cause.value)}. {_ADVICE.get(cause, '')}"
    ).rstrip()


def _dead_weight(stats: ClassStats, pool: BufferPool) -> str:
    """A class that is all free; empty if it is in use or small."""
    if stats.live or stats.buffers * stats.size * _DEAD_SHARE <= pool.ledger.reserved_bytes:
        return ""
    return f"class {mib(stats.size)} ({stats.role}): {stats.buffers} free, none in use: {_why_kept(pool, stats)}."


def _why_kept(pool: BufferPool, stats: ClassStats) -> str:
    target = pool.target(stats)
    if target is None:
        return "this policy never gives them up"
    return f"the policy keeps {target} for the next demand"


def _limits(pool: BufferPool) -> list[str]:
    budget, lines = pool.budget, []
    if budget.limit is not None:
        kind = "hard" if budget.hard else "soft"
        used = 100 * pool.inventory.held_bytes / budget.limit
        lines.append(f"{kind} budget {mib(budget.limit)}: {used:.0f} % used.")
    if budget.failed_at is not None:
        lines.append(f"the device ran out of memory at {mib(budget.failed_at)} reserved; the budget was lowered.")
    if pool.inventory.in_flight.nbytes:
        lines.append(f"{mib(pool.inventory.in_flight.nbytes)} destroyed, but the GPU may still be using them.")
    return lines
