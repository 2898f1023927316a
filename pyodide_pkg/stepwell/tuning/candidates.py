"""Which ways of sharing out a product are worth timing, and a recorded launch with its work shared out like that."""

from dataclasses import asdict, replace
from itertools import product

from stepwell.kernels.fused import QUANTISED_BYTES, team_bytes
from stepwell.kernels.kv import ceil_div
from stepwell.kernels.products import QUAD_THREADS, key_of
from stepwell.kernels.tuning import ProductKey, Tiling, Tuning
from stepwell.step.recorder import Launch, Variant

_AHEAD = (1, 2, 4, 8)  # blocks of weights
_MOST_PER_QUAD = 16  # outputs of its threads: more take long to compile


def retiled(launch: Launch, tiling: Tiling) -> Launch:
    """The same product on the same buffers, its work shared out as ``tiling`` says."""
    changed = asdict(tiling)
    constants = tuple((name, changed.get(name, value)) for name, value in launch.variant.constants)
    workgroups = ceil_div(key_of(launch.variant).outputs, tiling.outputs)
    return launch._replace(variant=Variant(launch.variant.kernel, constants), grid=(workgroups, 1, 1))


def alternatives(key: ProductKey, default: Tiling, tuning: Tuning) -> list[Tiling]:
    """What to time for this product: the rule's choice, then others that can be compiled."""
    if key.kernel == "matvec":
        found = candidates(default, key.outputs, key.k, tuning)
    else:
        found = [replace(default, per=per) for per in _fewer_and_more(default.per)]
    return [default, *(tiling for tiling in found if tiling != default and fits(key, tiling, tuning))]


def candidates(default: Tiling, outputs: int, k: int, tuning: Tuning) -> list[Tiling]:
    """Neighbours of the rule's choice: half, the same and double of its width, outputs per thread and threads.

    And, with all these as they are, other numbers of blocks that are read ahead.
    """
    found: dict[Tiling, None] = {}  # in order
    for wide, per, threads in product(
        _around(default.wide), _around(default.per), _around(default.wide * default.splits)
    ):
        unit = max(1, tuning.subgroup // wide)  # whole subgroups
        blocks = ceil_div(k // 32, unit) * unit
        splits = max(unit, min(blocks, threads // wide // unit * unit))
        found[replace(default, wide=wide, per=per, splits=splits)] = None
    found |= {replace(default, ahead=ahead): None for ahead in _AHEAD}
    return [tiling for tiling in found if tiling.outputs <= max(outputs, default.outputs)]


def fits(key: ProductKey, tiling: Tiling, tuning: Tuning) -> bool:
    """Whether the product can be compiled and run so: threads, whole subgroups, a workgroup's memory.

    The last part of ``matvec`` gives each output of the workgroup a thread, and pairs of outputs meet in one.
    """
    wide, per, splits = tiling.wide, tiling.per, tiling.splits
    if key.kernel != "matvec":
        return wide == QUAD_THREADS and splits == 1 and 1 <= per <= _MOST_PER_QUAD
    threads = wide * splits
    if tiling.arithmetic != key.arithmetic or not 1 <= tiling.ahead <= max(_AHEAD):
        return False
    if min(wide, per, splits) < 1 or wide % 2 or per > splits or threads > tuning.decode_threads:
        return False
    lanes = tuning.subgroup
    if lanes and (threads % lanes or max(lanes, wide) % min(lanes, wide)):
        return False
    sets = threads // lanes if lanes and lanes >= wide else splits
    halves = 2 if key.after == "swiglu" else 1
    values = halves * sets * wide * per + wide * per * (key.after == "rope")
    if key.before == "norm":
        values += threads // max(1, lanes)
    nbytes = 4 * values + (team_bytes(tuning, key.k) if key.before == "merge" else 0)
    if key.arithmetic == "dot4":
        nbytes += key.k // 32 * QUANTISED_BYTES
    elif key.before != "plain":
        nbytes += 4 * key.k
    return nbytes <= tuning.workgroup_bytes


def _fewer_and_more(per: int) -> tuple[int, ...]:
    """Half, three quarters, and four thirds."""
    return max(1, per // 2), max(1, per * 3 // 4), min(_MOST_PER_QUAD, per * 4 // 3)


def _around(value: int) -> tuple[int, ...]:
    return (value, value // 2, 2 * value) if value > 1 else (value, 2 * value)
