"""The table of KV cache modes: a name, what makes it, and what it is, for the page and the harness."""

from collections.abc import Callable

from stepwell.decode.kv_cache import DonateKV, GrowKV, KVCache, StaticKV
from stepwell.decode.paged_kv import PagedKV
from stepwell.kernels.kv import KVShape
from stepwell.memory.pool import BufferPool

KV_MODES: dict[str, tuple[Callable[[BufferPool, KVShape, int], KVCache], str]] = {
    "grow": (GrowKV, "a new, larger tensor per K and V at every token, the past copied in: what the pool exists for"),
    "donate": (DonateKV, "appended in place; what is full moves to a tensor half as large again, a few per token"),
    "static": (StaticKV, "allocated once for the whole context, appended in place"),
    "paged": (PagedKV, "appended in place, pages added as the sequence grows: nothing is copied, little is spare"),
}
"""The modes by name: what makes a cache (pool, shape, capacity), and a sentence."""
