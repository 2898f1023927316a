"""The tilings of a product that are worth timing, and a recorded launch with another tiling."""

from dataclasses import asdict, replace
from itertools import product

from stepwell.kernels.fused import QUANTISED_BYTES, team_bytes
from stepwell.kernels.kv import ceil_div
from stepwell.kernels.products import QUAD_THREADS, key_of
from stepwell.kernels.tuning import ProductKey, Tiling, Tuning
from stepwell.step.recorder import Launch, Variant

_AHEAD = (1, 2, 4, 8)  # blocks of weights that a thread of matvec reads ahead
_MOST_PER_QUAD = 16  # outputs per thread of matmul_quad: more take long to compile


def retiled(launch: Launch, tiling: Tiling) -> Launch:
    """``launch`` with the same product on the same buffers, tiled as ``tiling`` says."""
    changed = asdict(tiling)
    constants = tuple((name, changed.get(name, value)) for name, value in launch.variant.constants)
    workgroups = ceil_div(key_of(launch.variant).outputs, tiling.outputs)
    return launch._replace(variant=Variant(launch.variant.kernel, constants), grid=(workgroups, 1, 1))


def alternatives(key: ProductKey, default: Tiling, tuning: Tuning) -> list[Tiling]:
    """The tilings to time for the product ``key``: ``default``, the rule's, then others that can be compiled."""
    if key.kernel == "matvec":
        found = candidates(default, key.outputs, key.k, tuning)
    else:
        found = [replace(default, per=per) for per in _fewer_and_more(default.per)]
    return [default, *(tiling for tiling in found if tiling != default and fits(key, tiling, tuning))]


def candidates(default: Tiling, outputs: int, k: int, tuning: Tuning) -> list[Tiling]:
    """Neighbours of ``default`` for a product [outputs][k]: half, the same and double its width, outputs per thread and
    threads; and, with these unchanged, other numbers of blocks that are read ahead.
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
    """Whether the product ``key`` can run with ``tiling``: its threads, whole subgroups, a workgroup's memory.

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
    """Half, three quarters, and four thirds of ``per``."""
    return max(1, per // 2), max(1, per * 3 // 4), min(_MOST_PER_QUAD, per * 4 // 3)


def _around(value: int) -> tuple[int, ...]:
    return (value, value // 2, 2 * value) if value > 1 else (value, 2 * value)
