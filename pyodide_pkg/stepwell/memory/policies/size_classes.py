"""The size classes of ``adaptive``: geometric series, and for KV tensors one series per allocation site.

Equal tensors that grow together leave a common class together: all of them need a new buffer on the same token.  So the
classes of a site are shifted by its *phase*, a fraction of one step of the series, and the sites cross one by one.
Phases follow the bit-reversed site: any number of sites spreads evenly, without knowing how many there are.
"""

from functools import cache

from stepwell.memory.policies.base import round_up
from stepwell.memory.policies.bucket import ORT_LIMITS

MIB = 1 << 20  # bytes
LARGEST_CLASS = 1 << 36  # bytes
PHASES = 256  # series of KV classes; each site has one of them
GROWTH_BEYOND = 1.25  # from class to class above the largest of ONNX Runtime
SUBSTEPS = 4
"""Classes per doubling of everything but KV: at most 25 % of a buffer is unused, interchangeable between sites."""
_SMALLEST_CLASS = 256


def phase_of(site: int) -> int:
    """The phase of a site, 0 to PHASES - 1: its low eight bits in reverse."""
    return int(f"{site % PHASES:08b}"[::-1], 2)


@cache
def staggered_series(growth: float, phase: int) -> list[int]:
    """The KV classes of a phase, ascending: powers of two up to 512 KiB, above them steps of ``growth``.

    The geometric part replaces the power of two at 1 MiB, which all sites would outgrow together; it starts one step
    below, so that no class is more than twice the one before.  (Small tensors grow by several phases per token:
    staggering them would spread the same creates, too many for one each, over all tokens.)
    """
    sizes = [1 << exponent for exponent in range(8, 20)]
    step = -1
    while sizes[-1] < LARGEST_CLASS:
        sizes.append(round_up(int(MIB * growth ** (step + phase / PHASES)), 256))
        step += 1
    return sizes


@cache
def shared_series() -> list[int]:
    """The KV classes of a few tensors, shared by all of them: ONNX Runtime's, and GROWTH_BEYOND above its largest."""
    sizes = sorted(ORT_LIMITS)
    while sizes[-1] < LARGEST_CLASS:
        sizes.append(round_up(int(sizes[-1] * GROWTH_BEYOND), 256))
    return sizes


@cache
def even_series() -> list[int]:
    """The classes of all other roles: SUBSTEPS per doubling, multiples of 256 B."""
    sizes = [_SMALLEST_CLASS]
    while sizes[-1] < LARGEST_CLASS:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(_SMALLEST_CLASS, octave // SUBSTEPS))
    return sizes
