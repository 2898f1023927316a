"""Which kernels a generation will need, found before it begins."""

from stepwell.decode.kv_cache import KVCache
from stepwell.decode.stepper import Stepper
from stepwell.launch.kernel_cache import Use
from stepwell.step.recorder import Variant


def uses_ahead(stepper: Stepper, cache: KVCache, prompt_rows: int, max_tokens: int) -> list[Use | Variant]:
    """Kernels for a prompt of ``prompt_rows`` tokens and for the ``max_tokens`` decode steps after it.

    Kernels that are needed only at some lengths belong to no node: the bound of a node could evict them in between.
    """
    prompt_rows = max(1, prompt_rows)  # a prompt without tokens is refused where it is read
    prompt_end = cache.length + prompt_rows
    most = stepper.steps.prefill_rows(prompt_end)
    begun = cache.fits(prompt_rows)  # steps end where these do
    parts = (begun, prompt_rows - begun) if begun < prompt_rows else (prompt_rows,)
    widths = {n for part in parts for n in (min(part, most), part % most or most)}
    uses: list[Use | Variant] = []
    for rows in widths | {1}:
        end = prompt_end + max_tokens if rows == 1 else prompt_end
        steps = [step.uses for step in stepper.dry_runs(rows, prompt_end, end)]
        uses += steps[0]
        variants = [{variant for _, _, variant in step} for step in steps]
        uses += variants[0].union(*variants) - variants[0].intersection(*variants)
    return uses
