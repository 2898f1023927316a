"""The autotuner: times the ways of sharing out each product of a model's decode step, on its own weights.

Every product has a rule's choice (``kernels/tuning.py``).  Another one takes its place when it is faster by more than
``MARGIN`` and the spread of its rounds, and when its results are the same but for rounding: sums in another order.
"""

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
from stepwell.kernels.products import is_product, key_of, spread_of
from stepwell.kernels.tuning import ProductKey, Spread
from stepwell.launch.assembly import Assembly
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role
from stepwell.models.llama import Llama
from stepwell.step.recorder import Launch, Recorder, Step
from stepwell.tuning.candidates import alternatives, respread
from stepwell.tuning.remembered import Choice

MARGIN = 0.03
ROUNDS = 7
_TRIALS = 2  # rounds of all; what is slower than the best by more than _BEHIND then goes no further
_BEHIND = 1.15
CHAIN_US = 10_000  # of launches in one submit: browsers round the GPU's clock to 100 us
_LONGEST = 2048  # launches
_POSITION = 300  # of the step: merges and appends as in the middle of an answer
_VALUES = 4099  # random ones, repeated over each buffer; a prime, so that no two rows of anything begin alike
_BLOCK = 1024  # values that are compared at once
_TIMESTAMPS = "timestamp-query"


def tolerance(k: int) -> float:
    """How far two results may differ, as a part of the largest one.

    An f32 sum of k terms, one after the other, is off by about sqrt(k) roundings of 2^-24, relative to the sum of the
    terms' magnitudes (rounding errors are independent), and that is up to sqrt(k) times the largest of many sums of
    random terms: k * 2^-24.  Kernels sum in parts and stay far below; a block of weights too many is far above.
    """
    return k * 2.0**-24


@dataclass(slots=True)
class Outcome:
    """``measured``: the choice for every product that was measured, None where the rule's is kept.

    ``refused``: a sentence for each candidate that was faster but wrong, or could not be compiled.
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

    def __init__(self, model: Llama, launcher: Launcher, budget_ms: float) -> None:
        """For launchers with the kernel options of ``launcher``."""
        options = replace(
            launcher.options, tuned=False, shared_pass=True, bind_group_cache=True, bind_groups=1 << 16, submit_every=0,
            submit_every_ms=0,
        )  # fmt: skip
        self._model, self._budget_ms = model, budget_ms
        self._launcher = Launcher(launcher.device, launcher.pool, options)
        self._scratch = _Scratch(self._launcher)
        self._stamps = _TIMESTAMPS in launcher.device.info.features
        self._outcome = Outcome()
        self._deadline_ms = 0.0
        self._position = min(_POSITION, model.config.context_length - 1)
        self.cancelled = False

    def cancel(self) -> None:
        """Stop after the measurement under way; what was found until then stays."""
        self.cancelled = True

    def close(self) -> None:
        """Give everything back."""
        self._scratch.release()
        self._launcher.close()
        self._launcher.pool.flush()

    async def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Outcome:
        """Measure product after product, those with most weights first, as long as the time lasts.

        ``progress`` gets (products done, products in total).  Raises what the device raises.
        """
        self._deadline_ms = now_ms() + self._budget_ms
        device, products = self._launcher.device, self._products()
        self._outcome.products = len(products)
        device.set_profile(passes=self._stamps)
        try:
            for done, (key, launches) in enumerate(products.items()):
                progress(done, len(products))
                self._outcome.measured[key] = await self._tune(key, launches)
                self._launcher.release_run()
            progress(len(products), len(products))
            self._outcome.complete = True
        except _Stopped:
            pass
        except DeviceLost:
            self._launcher.pool.note_lost()
            raise
        finally:
            device.set_profile()
        return self._outcome

    # ---- one product -------------------------------------------------------------------------------------------------

    def _products(self) -> dict[ProductKey, list[Launch]]:
        """The launches of the step, of all layers, by product."""
        model, scratch, end = self._model, self._scratch, self._position + 1
        rec = Recorder(self._position, 1, self._launcher.shapes)
        width_bytes = model.kv_shape(self._launcher).width_bytes
        kv = KVTensors(scratch.acquire(width_bytes * end, "k"), scratch.acquire(width_bytes * end, "v"))
        ids, layers = scratch.acquire(4, "ids"), [kv] * model.config.n_layers
        model.steps(self._launcher).record(rec, scratch, ids, layers, reach=end, want_logits=True)
        found: dict[ProductKey, list[Launch]] = {}
        for command in rec.finish().commands:
            if isinstance(command, Launch) and is_product(command.variant):
                found.setdefault(key_of(command.variant), []).append(command)
        return dict(sorted(found.items(), key=lambda item: -item[0].k * item[0].n * len(item[1])))

    async def _tune(self, key: ProductKey, launches: Sequence[Launch]) -> Choice | None:
        default = spread_of(launches[0].variant)
        spreads = await self._compiled(key, launches[0], alternatives(key, default, self._launcher.tuning))
        times = await self._measure(launches, spreads)
        for spread in sorted(times, key=lambda spread: median_high(times[spread])):
            if is_faster(times[spread], times[default]) and await self._is_right(key, launches[0], spread):
                return Choice(spread, median_high(times[spread]), median_high(times[default]))
        return None

    async def _compiled(self, key: ProductKey, launch: Launch, spreads: Sequence[Spread]) -> list[Spread]:
        """Those that this device compiles, all at once."""
        self._check()
        steps = [self._step([respread(launch, spread)]) for spread in spreads]
        results = await gather(*map(self._launcher.prepare, steps), return_exceptions=True)
        found = []
        for spread, error in zip(spreads, results, strict=True):
            if error is None:
                found.append(spread)
            elif isinstance(error, ShaderError) and spread is not spreads[0]:
                self._refuse(key, spread, f"it does not compile: {error}")
            else:
                raise error
        return found

    async def _measure(self, launches: Sequence[Launch], spreads: Sequence[Spread]) -> dict[Spread, list[float]]:
        """Microseconds per launch, round by round, in turns; of those that are worth all the rounds."""
        count = await self._chain_length(launches)
        chains = {spread: self._chain(launches, spread, count) for spread in spreads}
        times: dict[Spread, list[float]] = {spread: [] for spread in spreads}
        racing = list(spreads)
        for number in range(ROUNDS):
            for spread in racing[number % len(racing) :] + racing[: number % len(racing)]:
                times[spread].append(await self._time(chains[spread], count))
            if number + 1 == _TRIALS:
                limit = _BEHIND * min(map(min, times.values()))
                racing = [spread for spread in racing if spread is spreads[0] or min(times[spread]) <= limit]
        return {spread: times[spread] for spread in racing}

    async def _chain_length(self, launches: Sequence[Launch]) -> int:
        """How many launches of the rule's choice take long enough to time: over all layers' weights, if they may."""
        count, default = len(launches), spread_of(launches[0].variant)
        await self._time(self._chain(launches, default, count), count)  # the first is of a cold clock
        each = max(await self._time(self._chain(launches, default, count), count), CHAIN_US / _LONGEST)
        layers = min(len(launches), int(4 * CHAIN_US / each))
        return max(2, layers, int(CHAIN_US / each))

    def _chain(self, launches: Sequence[Launch], spread: Spread, count: int) -> list["array[int]"]:
        """``count`` launches, layer after layer, as programs that can be submitted again and again."""
        several = [respread(launch, spread) for launch in launches]
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

    async def _is_right(self, key: ProductKey, launch: Launch, spread: Spread) -> bool:
        expected, found = await self._results(launch), await self._results(respread(launch, spread))
        for wanted, got in zip(expected, found, strict=True):
            bound = tolerance(key.k) * max(map(abs, wanted))
            errors = differences(wanted, got)
            if not all(error <= bound for error in errors):  # a NaN is within no bound
                self._refuse(key, spread, f"results differ by up to {max(errors):.2g}, {bound:.2g} is rounding.")
                return False
        return True

    async def _results(self, launch: Launch) -> list["array[float]"]:
        """All that the launch writes, of the same random input every time."""
        self._scratch.fill()
        self._launcher.submit(self._step([launch]))
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

    def _refuse(self, key: ProductKey, spread: Spread, reason: str) -> None:
        self._outcome.refused.append(f"{key}, {spread}: {reason}")

    def _step(self, launches: Sequence[Launch]) -> Step:
        return Step(self._position, 1, 0, tuple(launches))

    def _check(self) -> None:
        if self.cancelled or now_ms() >= self._deadline_ms:
            raise _Stopped


def differences(wanted: "array[float]", got: "array[float]") -> list[float]:
    """How far values are apart, of blocks that are not the same bit by bit: of a KV cache one position is written."""
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
    """A step's buffers, each of them its own, filled with random numbers."""

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
            values = self._positive if "normals" in buffer.label else self._signed  # those are divided by
            data = (values * -(-buffer.requested // len(values)))[: buffer.requested]
            self._launcher.write(buffer, data)

    def release(self) -> None:
        for buffer in reversed(self._held.values()):
            self._launcher.pool.release(buffer)
        self._held.clear()
