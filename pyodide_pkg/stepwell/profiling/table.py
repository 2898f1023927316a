"""The table of GPU time per kernel, as plain data.  Pure arithmetic over what was measured.

A pass has a cost of its own, which launches that share one do not pay.  The time of an empty pass (``pass_us``) is
subtracted for the net figures.  They are estimates: a part of that cost may overlap with the kernel's work.
"""

from collections.abc import Iterable, Sequence
from math import gcd
from statistics import median
from typing import Any, NamedTuple

from stepwell.profiling.attribution import Attributed, KernelRow
from stepwell.profiling.plain_read import PlainRead

COARSE_US = 10
"""Kernels take a few to some hundred microseconds: a clock of larger steps cannot tell them apart."""


class Clock(NamedTuple):
    """The GPU's clock.  ``tick_us``: the largest step that all measured times are multiples of; None: all are 0."""

    tick_us: float | None

    @classmethod
    def of(cls, times_us: Iterable[float]) -> "Clock":
        """The clock by which ``times_us`` were measured.

        Browsers round it for privacy (Chromium to about 0.1 ms) unless they are told otherwise.
        """
        tick = gcd(*(round(1000 * us) for us in times_us))
        return cls(tick / 1000 if tick else None)

    @property
    def is_coarse(self) -> bool:
        """Whether it cannot tell kernels apart."""
        return self.tick_us is None or self.tick_us >= COARSE_US


def tabulate(
    launches: Sequence[Attributed], steps: Sequence[Sequence[float]], pass_us: float, plain: PlainRead | None
) -> dict[str, Any]:
    """The rows per kernel, the largest share of the net time first, and their sums.

    ``steps`` has a sequence per measured step: microseconds of each of ``launches``.  A row's time is the median over
    the steps of the sum over its launches; bytes are those of ``Attributed``; GB/s go by net time.  Figures that cannot
    be told (a share of no time, bytes in no time) are None.  ``plain`` is the bandwidth to compare with.
    """
    members: dict[KernelRow, list[int]] = {}
    for index, launch in enumerate(launches):
        members.setdefault(launch.row, []).append(index)
    rows = [
        _figures(row, [launches[i] for i in indices], median(sum(step[i] for i in indices) for step in steps), pass_us)
        for row, indices in members.items()
    ]
    net = sum(row["net_us_per_token"] for row in rows)
    for row in rows:
        row["share"] = row["net_us_per_token"] / net if net > 0 else None
    rows.sort(key=lambda row: -row["net_us_per_token"])
    return {
        "pass_us": pass_us,
        "us_per_token": sum(row["us_per_token"] for row in rows),
        "net_us_per_token": net,
        "plain_read_gb_s": plain.gb_s if plain is not None else None,
        "plain_read_bytes": plain.nbytes if plain is not None else None,
        "weights": _products(launches, steps, pass_us, plain),
        "rows": rows,
    }


def _figures(row: KernelRow, launches: Sequence[Attributed], us: float, pass_us: float) -> dict[str, Any]:
    count = len(launches)
    net = max(0.0, us - count * pass_us)
    nbytes = sum(launch.nbytes for launch in launches)
    return {
        **row._asdict(),
        "launches": count,
        "us_per_launch": us / count,
        "net_us_per_launch": net / count,
        "us_per_token": us,
        "net_us_per_token": net,
        "bytes_per_launch": nbytes / count,
        "gb_s": _gb_s(nbytes, net),
    }


def _products(
    launches: Sequence[Attributed], steps: Sequence[Sequence[float]], pass_us: float, plain: PlainRead | None
) -> dict[str, Any]:
    """The sums over all products with weight matrices: they read most of a decode step's bytes."""
    products = [index for index, launch in enumerate(launches) if launch.is_product]
    us = median(sum(step[i] for i in products) for step in steps)
    net = max(0.0, us - len(products) * pass_us)
    nbytes = sum(launches[i].weight_bytes for i in products)
    rate = _gb_s(nbytes, net)
    most = plain.gb_s if plain is not None else None
    return {
        "launches": len(products),
        "bytes_per_token": nbytes,
        "us_per_token": us,
        "net_us_per_token": net,
        "gb_s": rate,
        "share_of_plain_read": rate / most if rate is not None and most else None,
    }


def _gb_s(nbytes: int, us: float) -> float | None:
    """Bandwidth in units of 10^9 bytes per second; None for no bytes, or in no time."""
    return nbytes / us / 1e3 if nbytes and us > 0 else None
