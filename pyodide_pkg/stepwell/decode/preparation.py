"""Which kernels a generation will need, found before it begins."""

from stepwell.decode.kv_cache import KVCache
from stepwell.decode.stepper import Stepper
from stepwell.launch.kernel_cache import Use
from stepwell.step.recorder import Variant


def uses_ahead(stepper: Stepper, cache: KVCache, prompt_rows: int, max_tokens: int) -> list[Use | Variant]:
    """Those of the steps that read a prompt of so many tokens, and of the decode steps behind it.

    Those that come and go as the sequence grows are of no node: its bound would give them up in between.
    """
    prompt_rows = max(1, prompt_rows)  # one without tokens is refused where it is read
    reach = cache.length + prompt_rows
    most = stepper.steps.prefill_rows(reach)
    begun = cache.fits(prompt_rows)  # steps end where these do
    parts = (begun, prompt_rows - begun) if begun < prompt_rows else (prompt_rows,)
    widths = {n for part in parts for n in (min(part, most), part % most or most)}
    uses: list[Use | Variant] = []
    for rows in widths | {1}:
        end = reach + max_tokens if rows == 1 else reach
        steps = [step.uses for step in stepper.dry_runs(rows, reach, end)]
        uses += steps[0]
        variants = [{variant for _, _, variant in step} for step in steps]
        uses += variants[0].union(*variants) - variants[0].intersection(*variants)
    return uses
