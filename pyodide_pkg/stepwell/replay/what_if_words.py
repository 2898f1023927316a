"""The answer of ``what_if`` in a sentence or two."""

from collections.abc import Sequence

from stepwell.memory.buffer import mib
from stepwell.replay.what_if_outcome import Outcome, Survey
from stepwell.replay.what_if_settings import NO_POOL


def sentence(
    best: Outcome | None,
    outcomes: Sequence[Outcome],
    baseline: Outcome,
    found: Survey,
    budget_bytes: int | None,
) -> str:
    """The recommendation: the setting to take instead of the baseline, and its saving, or that nothing is gained."""
    unit = found.unit
    who = "without a pool the runtime" if baseline["label"] == NO_POOL else baseline["label"]
    now = f"{who} creates {baseline['steady_creates_per_token']:.3g} buffers per {unit}"
    cost = f"about {baseline['ms_per_token']:.2f} ms"
    if not outcomes and budget_bytes is not None:
        return f"No setting stays within {mib(budget_bytes)}: choose a larger budget or a shorter context."
    if best is None:
        most = max(outcome["saved_ms_per_token"] for outcome in outcomes)
        nothing = f"Nothing to gain: {now} ({cost}), and no setting saves more than {max(0.0, most):.2f} ms per {unit}."
        return nothing + _why_nothing(outcomes, baseline, found)
    return (
        f"{'Attach' if found.attached else 'Take'} {best['label']}: {now} ({cost}), it "
        f"{best['steady_creates_per_token']:.3g}, which saves about "
        f"{best['saved_ms_per_token']:.1f} ms per {unit}, nearly as much as any setting can, and with hardly more "
        f"memory than the least of those that do ({mib(best['peak_bytes'])} at the peak, "
        f"{baseline['label']} {mib(baseline['peak_bytes'])})."
    )


def _why_nothing(outcomes: Sequence[Outcome], baseline: Outcome, found: Survey) -> str:
    """The reason why no pool under a runtime helps, if it is sizes that do not come back; else ''."""
    least = min(outcome["steady_creates_per_token"] for outcome in outcomes)
    if not found.attached or least < 1 or least < 0.9 * baseline["steady_creates_per_token"]:
        return ""
    return (
        " Nearly every buffer has a size that was not there before, and a pool under a runtime cannot change sizes: "
        "size classes or a static cache in the runtime would help."
    )
