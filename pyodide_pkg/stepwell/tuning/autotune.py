"""The autotuner: times the tilings of each product of a model's decode step, on the model's own weights.

Every product has a rule's tiling (``kernels/fused.py``, ``kernels/ops.py``).  Another takes its place when it is faster
by more than ``MARGIN`` and the spread of either's rounds, and when its results differ by rounding only: sums in another
order.
"""

import math
import random
from array import array
from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high

from stepwell.errors import DeviceLost, ShaderError
from stepwell.gpu.clock import now_ms
from stepwell.gpu.device import BindingType
from stepwell.kernels.kv import KVTensors
from stepwell.kernels.products import is_product, key_of, tiling_of
from stepwell.kernels.tuning import ProductKey, Tiling
from stepwell.launch.assembly import Assembly
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role
from stepwell.models.llama import DecoderModel
from stepwell.step.recorder import Launch, Recorder, Step
from stepwell.tuning.candidates import alternatives, retiled
from stepwell.tuning.remembered import Choice

MARGIN = 0.03
"""The part of the rule's time that another tiling must save."""
ROUNDS = 7
"""Times that each tiling is timed, in rotating order."""
CHAIN_US = 10_000
"""Microseconds of launches in one submit: browsers round the GPU's clock to 100 us."""
_TRIALS = 2  # rounds for all tilings; those slower than the best by more than _SLOWEST then drop out
_SLOWEST = 1.15
_LONGEST = 2048  # launches in a chain, at most
_POSITION = 300  # position of the step: merges and appends as in the middle of an answer
_VALUES = 4099  # random values, repeated over each buffer; a prime, so that no two rows begin alike
_BLOCK = 1024  # values that are compared at once
_TIMESTAMPS = "timestamp-query"


def tolerance(k: int) -> float:
    """The most that two results of a product of ``k`` terms may differ by, as a part of the largest one.

    An f32 sum of k terms, one after the other, is off by about sqrt(k) roundings of 2^-24, relative to the sum of the
    terms' magnitudes (rounding errors are independent), and that is up to sqrt(k) times the largest of many sums of
    random terms: k * 2^-24.  Kernels sum in parts and stay far below; a block of weights too many is far above.
    """
    return k * 2.0**-24


@dataclass(slots=True)
class TuningOutcome:
    """What a tuner found.

    ``measured``: the choice for every product that was measured, None where the rule's is kept.  ``refused``: a
    sentence for each tiling that was faster but wrong, or did not compile.  ``products``: how many the model has.
    ``complete``: all of them were measured.
    """

    measured: dict[ProductKey, Choice | None] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    products: int = 0
    complete: bool = False

    def describe(self) -> dict[str, object]:
        """Plain data, without the choices."""
        return {
            "products": self.products,
            "measured": len(self.measured),
            "faster": sum(choice is not None for choice in self.measured.values()),
            "complete": self.complete,
        }


class _Stopped(Exception):
    """Cancelled, or the time is up."""


class Autotuner:
    """Tunes one model on its device, with kernels and bind groups of its own, which ``close`` gives back."""

    def __init__(self, model: DecoderModel, launcher: Launcher, budget_ms: float) -> None:
        """Tune for launchers with the kernel options of ``launcher``, for ``budget_ms`` milliseconds at most."""
        options = replace(
            launcher.options, tuned=False, shared_pass=True, bind_group_cache=True, bind_groups=1 << 16, submit_every=0,
            submit_every_ms=0,
        )  # fmt: skip
        self._model, self._budget_ms = model, budget_ms
        self._launcher = Launcher(launcher.device, launcher.pool, options)
        self._scratch = _Scratch(self._launcher)
        self._stamps = _TIMESTAMPS in launcher.device.info.features
        self.outcome = TuningOutcome()
        self._deadline_ms = math.inf  # until ``run`` sets one
        self._position = min(_POSITION, model.config.context_length - 1)
        self.cancelled = False

    def cancel(self) -> None:
        """Stop after the measurement under way; what was found before it stays."""
        self.cancelled = True

    def close(self) -> None:
        """Give every buffer, bind group and kernel back."""
        self._scratch.release()
        self._launcher.close()
        self._launcher.pool.flush()

    async def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> TuningOutcome:
        """Measure one product after the other, those with most weights first, until the time is up.

        ``progress`` gets (products done, products in total).  Raises what the device raises.
        """
        self._deadline_ms = now_ms() + self._budget_ms
        device, products = self._launcher.device, self.products()
        self.outcome.products = len(products)
        device.set_profile(passes=self._stamps)
        try:
            for done, (key, launches) in enumerate(products.items()):
                progress(done, len(products))
                self.outcome.measured[key] = await self._tune(key, launches)
                self._launcher.release_run()
            progress(len(products), len(products))
            self.outcome.complete = True
        except _Stopped:
            pass
        except DeviceLost:
            self._launcher.pool.note_lost()
            raise
        finally:
            device.set_profile()
        return self.outcome

    # ---- one product -------------------------------------------------------------------------------------------------

    def products(self) -> dict[ProductKey, list[Launch]]:
        """The launches of the decode step, from all layers, by product: those with most weights first."""
        model, scratch, end = self._model, self._scratch, self._position + 1
        rec = Recorder(self._position, 1, self._launcher.shapes)
        width_bytes = model.kv_shape(self._launcher).width_bytes
        kv = KVTensors(scratch.acquire(width_bytes * end, "k"), scratch.acquire(width_bytes * end, "v"))
        ids, layers = scratch.acquire(4, "ids"), [kv] * model.config.n_layers
        model.steps(self._launcher).record(rec, scratch, ids, layers, end=end, want_logits=True)
        found: dict[ProductKey, list[Launch]] = {}
        for command in rec.finish().commands:
            if isinstance(command, Launch) and is_product(command.variant):
                found.setdefault(key_of(command.variant), []).append(command)
        return dict(sorted(found.items(), key=lambda item: -item[0].k * item[0].n * len(item[1])))

    async def _tune(self, key: ProductKey, launches: Sequence[Launch]) -> Choice | None:
        default = tiling_of(launches[0].variant)
        tilings = await self.compiled(key, launches[0], alternatives(key, default, self._launcher.tuning))
        times = await self._measure(launches, tilings)
        for tiling in sorted(times, key=lambda tiling: median_high(times[tiling])):
            if is_faster(times[tiling], times[default]) and await self._is_right(key, launches[0], tiling):
                return Choice(tiling, median_high(times[tiling]), median_high(times[default]))
        return None

    async def compiled(self, key: ProductKey, launch: Launch, tilings: Sequence[Tiling]) -> list[Tiling]:
        """The ``tilings`` of ``launch`` that this device compiles; they are compiled all at once."""
        self._check()
        steps = [self._step([retiled(launch, tiling)]) for tiling in tilings]
        results = await gather(*map(self._launcher.prepare, steps), return_exceptions=True)
        found = []
        for tiling, error in zip(tilings, results, strict=True):
            if error is None:
                found.append(tiling)
            elif isinstance(error, ShaderError) and tiling is not tilings[0]:
                self._refuse(key, tiling, f"it does not compile: {error}")
            else:
                raise error
        return found

    async def _measure(self, launches: Sequence[Launch], tilings: Sequence[Tiling]) -> dict[Tiling, list[float]]:
        """Microseconds per launch of each tiling that is worth all the rounds, round by round, in rotating order."""
        count = await self._chain_length(launches)
        chains = {tiling: self._chain(launches, tiling, count) for tiling in tilings}
        times: dict[Tiling, list[float]] = {tiling: [] for tiling in tilings}
        racing = list(tilings)
        for number in range(ROUNDS):
            for tiling in racing[number % len(racing) :] + racing[: number % len(racing)]:
                times[tiling].append(await self._time(chains[tiling], count))
            if number + 1 == _TRIALS:
                limit = _SLOWEST * min(map(min, times.values()))
                racing = [tiling for tiling in racing if tiling is tilings[0] or min(times[tiling]) <= limit]
        return {tiling: times[tiling] for tiling in racing}

    async def _chain_length(self, launches: Sequence[Launch]) -> int:
        """Launches with the rule's tiling that take CHAIN_US: over all layers' weights, if those are not far more."""
        count, default = len(launches), tiling_of(launches[0].variant)
        await self._time(self._chain(launches, default, count), count)  # the first has a cold clock
        each = max(await self._time(self._chain(launches, default, count), count), CHAIN_US / _LONGEST)
        layers = min(len(launches), int(4 * CHAIN_US / each))
        return max(2, layers, int(CHAIN_US / each))

    def _chain(self, launches: Sequence[Launch], tiling: Tiling, count: int) -> list["array[int]"]:
        """``count`` launches, one layer after the other, as programs that can be submitted again and again."""
        several = [retiled(launch, tiling) for launch in launches]
        step = self._step([several[i % len(several)] for i in range(count)])
        return [program.words for program in Assembly(self._launcher.context, step, whole=True).programs()]

    async def _time(self, chain: Sequence["array[int]"], count: int) -> float:
        """Microseconds per launch: by the GPU's clock, or around submission and fence where it has none."""
        self._check()
        device, start = self._launcher.device, now_ms()
        for words in chain:
            device.submit(words)
        if self._stamps:
            passes_us = sum((await device.take_profile()).passes_us)
            if passes_us > 0:
                return passes_us / count
            self._stamps = False  # a clock too coarse to be one
            device.set_profile()
        else:
            await device.wait()
        return 1000 * (now_ms() - start) / count

    # ---- right or wrong ----------------------------------------------------------------------------------------------

    async def _is_right(self, key: ProductKey, launch: Launch, tiling: Tiling) -> bool:
        expected, found = await self.results(launch), await self.results(retiled(launch, tiling))
        for wanted, got in zip(expected, found, strict=True):
            bound = tolerance(key.k) * max(map(abs, wanted))
            errors = differences(wanted, got)
            if not all(error <= bound for error in errors):  # a NaN is within no bound
                self._refuse(key, tiling, f"results differ by up to {max(errors):.2g}, {bound:.2g} is rounding.")
                return False
        return True

    async def results(self, launch: Launch) -> list["array[float]"]:
        """All that ``launch`` writes, given the same random input every time."""
        self._scratch.fill()
        await self._launcher.issue(self._step([launch]))
        bindings = self._launcher.kernels[launch.variant].layout.bindings
        # a uniform block comes first
        written = [
            b for b, kind in zip(launch.buffers[::-1], bindings[::-1], strict=False) if kind is BindingType.STORAGE
        ]
        results = []
        for handle in reversed(written):
            buffer = self._scratch[handle]
            results.append(array("f"))
            results[-1].frombytes(await self._launcher.peek(buffer, buffer.requested))
        return results

    def _refuse(self, key: ProductKey, tiling: Tiling, reason: str) -> None:
        self.outcome.refused.append(f"{key}, {tiling}: {reason}")

    def _step(self, launches: Sequence[Launch]) -> Step:
        return Step(self._position, 1, 0, tuple(launches))

    def _check(self) -> None:
        if self.cancelled or now_ms() >= self._deadline_ms:
            raise _Stopped


def differences(wanted: "array[float]", got: "array[float]") -> list[float]:
    """Absolute differences of ``wanted`` and ``got``, without blocks that are the same bit by bit.

    Most blocks are in a KV cache, of which one position is written.
    """
    found: list[float] = []
    for at in range(0, len(wanted), _BLOCK):
        pair = wanted[at : at + _BLOCK], got[at : at + _BLOCK]
        if pair[0].tobytes() != pair[1].tobytes():
            found += [abs(a - b) for a, b in zip(*pair, strict=True)]
    return found


def is_faster(times: Sequence[float], default: Sequence[float]) -> bool:
    """Whether the median of ``times`` is below that of ``default`` by more than MARGIN and the larger half range."""
    usual = median_high(default)
    return usual - median_high(times) > MARGIN * usual + max(half_range(times), half_range(default))


def half_range(times: Sequence[float]) -> float:
    """Half of the range of ``times``, without the least and the greatest of them."""
    ordered = sorted(times)
    return (ordered[-2] - ordered[1]) / 2


class _Scratch:
    """A step's buffers, no two of them the same, filled with random numbers."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._held: dict[int, Buffer] = {}
        draw = random.Random(0).uniform
        self._signed = array("f", [draw(-1, 1) for _ in range(_VALUES)]).tobytes()
        self._positive = array("f", [draw(0.5, 1.5) for _ in range(_VALUES)]).tobytes()

    def __getitem__(self, handle: int | object) -> Buffer:
        assert isinstance(handle, int)  # products bind whole buffers
        return self._held[handle]

    def acquire(self, nbytes: int, label: str) -> Buffer:
        buffer = self._launcher.pool.acquire(nbytes, Role.ACTIVATION, label, len(self._held), host=True)
        self._held[buffer.id] = buffer
        return buffer

    def workspace(self, node: str, shape: tuple[int, ...], label: str, nbytes: int) -> Buffer:
        return self.acquire(nbytes, label)

    def fill(self) -> None:
        self._launcher.touch_ahead()
        for buffer in self._held.values():
            values = self._positive if "normals" in buffer.label else self._signed  # they are divisors
            data = (values * -(-buffer.requested // len(values)))[: buffer.requested]
            self._launcher.write(buffer, data)

    def release(self) -> None:
        for buffer in reversed(self._held.values()):
            self._launcher.pool.release(buffer)
        self._held.clear()
