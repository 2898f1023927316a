"""The growing-KV pattern without a model: a decode loop's use of the pool, on the real device, checked.

Each step takes a new, larger tensor of 2,048 bytes per position for every K and V (``grow``), copies the past into it,
appends its row and sums one word of every position; small intermediates come and go layer by layer, and the past is
disposed of after the step's result is back, as transformers.js does.  The sums are read back and compared with what
the host foretells, so a lost copy, a tensor handed out twice or work that was left out is an error, not a fast token.
``static`` is the control: the same commands on two sets of tensors that are allocated once.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import pairwise
from struct import unpack

from stepwell.decode.flight import Issued
from stepwell.decode.kv_cache import DonateKV, GrowKV, Tensors
from stepwell.decode.timing import Meter, StepTiming, TokenEvent
from stepwell.errors import BadRequest, DeviceError
from stepwell.gpu.clock import now_ms
from stepwell.kernels.kv import KVShape, KVTensors, ceil_div
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import retrying
from stepwell.memory.scope import Scope
from stepwell.replay.kv_shapes import KV_WORKLOADS, POSITION_BYTES
from stepwell.step.recorder import ByLength, Recorder, Step, Variant

FIRST_POSITIONS = 2000
"""The positions at which a run starts by default: just below the first cliff."""
INTERMEDIATES = 6
"""Intermediates per layer, of 6, 12, 18, 24, 30 and 36 KiB."""
_WORDS = POSITION_BYTES // 4
_ROW_WORDS = 1536  # of the first intermediate: 6 KiB
_MASK = 0xFFFF_FFFF
_ROW_FACTOR, _SALT_FACTOR, _STRIDE = 2_654_435_761, 40_503, 193
_MUL, _ADD = 1_664_525, 1_013_904_223
_SLOT_BYTES = 8  # salt, sum
_CHAIN_WORDS = 2  # of the last intermediate that are read back


class TwinKV(Tensors):
    """The control: two sets of tensors allocated once for the whole context; a step copies one into the other."""

    def __init__(self, pool: BufferPool, shape: KVShape, capacity: int) -> None:
        super().__init__(pool, shape, capacity)
        self._past = self._acquire(capacity)
        try:
            self._present = self._acquire(capacity, first_site=2 * shape.layers)
        except BaseException:
            self._release(self._past)
            raise

    @property
    def class_bytes(self) -> int:
        return self._past[0].k.size

    @property
    def key(self) -> tuple[int, ...]:
        return (self._present[0].k.id,)

    def extend(self, rows: int, prompt_end: int = 0) -> list[KVTensors]:
        self._check_room(rows)
        self._rows.append(rows)
        return self._present

    def record_copies(self, rec: Recorder) -> None:
        self._record_copies(rec, self._past, self._present)

    def commit(self) -> None:
        self._past, self._present = self._present, self._past
        self.length += self._rows.popleft()

    def abandon(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._release(self._present)
        self._release(self._past)
        self._past = self._present = []


CACHES: Mapping[str, type[GrowKV] | type[DonateKV] | type[TwinKV]] = {
    "grow": GrowKV,
    "donate": DonateKV,
    "static": TwinKV,
}
"""The KV modes of workloads: ``static`` is the control."""


class KVPattern:
    """One run of a workload: ``start`` positions at once, then one per token; ``close`` gives every buffer back."""

    def __init__(self, name: str, launcher: Launcher, *, kv: str, start: int, tokens: int) -> None:
        """Raises BadRequest when there is no such workload or mode, or the device cannot hold the last tensor."""
        if name not in KV_WORKLOADS:
            raise BadRequest(f"no workload named {name!r}; there are {', '.join(KV_WORKLOADS)}.")
        if kv not in CACHES:
            raise BadRequest(f"no KV mode named {kv!r} in {name}; there are {', '.join(CACHES)}.")
        if start < 1 or tokens < 1:
            raise BadRequest(f"{name} from {start:,} positions for {tokens:,} tokens; both must be 1 or more.")
        self.capacity = start + tokens - 1
        _check_fits(name, start, self.capacity, launcher.device.info.limits)
        self._name, self._start, self._tokens = name, start, tokens
        self._tensors = KV_WORKLOADS[name].tensors
        self._results = self._tensors + _CHAIN_WORDS  # 32-bit words that a step reads back
        self._launcher, self._pool = launcher, launcher.pool
        self._meter = Meter(launcher, self._pool.ledger)
        self._kernels = _Kernels(launcher)
        self._expected = _Expected(self._tensors)
        self._held: list[Buffer] = []
        self.cancelled = False
        try:
            # with the weights, whose sizes are exact: a policy's coarse class would make 64 slots a weight of their own
            self._slots = [self._hold(_SLOT_BYTES, Role.WEIGHTS, f"sum.{site}") for site in range(self._tensors)]
            self._chain = self._hold(4 * _ROW_WORDS, Role.ACTIVATION, "chain")
            self._staging = self._hold(4 * self._results, Role.STAGING, "readback")
            self._cache = CACHES[kv](self._pool, KVShape(self._tensors // 2, POSITION_BYTES), self.capacity)
        except BaseException:
            self._give_back()
            raise

    def cancel(self) -> None:
        """End the run after its current step."""
        self.cancelled = True

    async def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the kernels, so that no token's time includes it."""
        await self._launcher.kernels.ensure(self._kernels.variants, progress)

    async def run(self) -> AsyncIterator[TokenEvent]:
        """One event per token; the first fills ``start`` positions.  ``id`` is a checksum of the step's results."""
        for index in range(self._tokens):
            if self.cancelled:
                return
            yield await self._token(index, self._start if index == 0 else 1)

    async def _token(self, index: int, rows: int) -> TokenEvent:
        self._meter.take()
        start = now_ms()
        submitted, done, results = await retrying(self._pool, lambda: self._attempt(rows))
        timing = StepTiming(now_ms() - start, submitted - start, done - submitted)
        counters = self._meter.counters(self._meter.take(), self._cache.class_bytes, Issued.WORKLOAD.refused, None)
        return TokenEvent(index, self._cache.length, sum(results) & _MASK, timing, counters, ends=False)

    async def _attempt(self, rows: int) -> tuple[float, float, Sequence[int]]:
        """A step as a transaction: (when it was submitted, when its result was back, the result); commits or raises."""
        try:
            async with self._pool.step(0):
                self._launcher.submit(self._record(rows))
            submitted = now_ms()
            data = await self._launcher.read(self._staging, 4 * self._results)
            results = unpack(f"<{self._results}I", data)
            self._check(results, rows)
        except BaseException:
            self._cache.abandon()
            raise
        done = now_ms()
        self._cache.commit()
        self._launcher.touch_ahead()
        return submitted, done, results

    def _record(self, rows: int) -> Step:
        kernels, position = self._kernels, self._cache.length
        rec = Recorder(position, rows, self._launcher.shapes)
        if position == 0:
            for site, slot in enumerate(self._slots):
                rec.write(slot, 0, (_salt(site), 0))
        pairs = self._cache.extend(rows)
        self._cache.record_copies(rec)
        kernels.seed(rec, self._chain)
        for layer, pair in enumerate(pairs):
            scope = Scope(self._pool)
            try:
                held = [scope.acquire(4 * words, f"intermediate.{i}") for i, words in enumerate(_INTERMEDIATE_WORDS)]
                kernels.mix_through(rec, [self._chain, *held, self._chain])
                for tensor, slot in zip(pair.buffers, self._slots[2 * layer : 2 * layer + 2], strict=True):
                    kernels.append_and_sum(rec, tensor, slot)
            finally:
                scope.release()  # at the end of its layer: the next one may have the same buffers
        for site, slot in enumerate(self._slots):
            rec.copy(slot, 4, self._staging, 4 * site, 4)
        rec.copy(self._chain, 0, self._staging, 4 * self._tensors, 4 * _CHAIN_WORDS)
        return rec.finish()

    def _check(self, results: Sequence[int], rows: int) -> None:
        """DeviceError when the step's sums are not those of the rows that should be in the tensors."""
        position = self._cache.length
        for name, found, expected in zip(
            (*(f"tensor {site}" for site in range(self._tensors)), *("intermediates",) * _CHAIN_WORDS),
            results, self._expected.step(position, rows), strict=True,
        ):  # fmt: skip
            if found != expected:
                raise DeviceError(
                    f"{self._name} at {position + rows:,} positions: the sum of {name} is {found:,}, it must be "
                    f"{expected:,}. The device computed wrongly, or the pool handed out a buffer that is in use."
                )

    def _hold(self, nbytes: int, role: Role, label: str) -> Buffer:
        self._held.append(self._pool.acquire(nbytes, role, label, len(self._held), host=True))
        return self._held[-1]

    def _give_back(self) -> None:
        while self._held:
            self._pool.release(self._held.pop())

    def close(self) -> None:
        """Give every buffer back.  Safe to call twice."""
        if self._held:
            self._cache.close()
            self._give_back()


_INTERMEDIATE_WORDS = [_ROW_WORDS * (1 + i) for i in range(INTERMEDIATES)]


class _Kernels:
    """The variants of ``kv_pattern.wgsl`` for this adapter, and how to launch them."""

    def __init__(self, launcher: Launcher) -> None:
        info = launcher.device.info
        self._threads = launcher.tuning.elementwise_threads
        self._per = 256 if info.is_software else 4  # words or positions per thread: a CPU wants few workgroups
        rows = (("row_factor", _ROW_FACTOR), ("words", _WORDS))
        widths = [_ROW_WORDS, *_INTERMEDIATE_WORDS, _ROW_WORDS]
        self._append = self._variant("append", *rows)
        self._sum = self._variant("sum", *rows, ("stride", _STRIDE))
        self._seed = self._variant("seed", ("words", _ROW_WORDS))
        self._mixes = [
            (self._variant("mix", ("words", y), ("x_words", x), ("mul", _MUL), ("add", _ADD)), self._grid(y))
            for x, y in pairwise(widths)
        ]

    @property
    def variants(self) -> list[Variant]:
        return [self._append, self._sum, self._seed, *(variant for variant, _ in self._mixes)]

    def seed(self, rec: Recorder, chain: Buffer) -> None:
        rec.launch(self._seed, (chain,), self._grid(_ROW_WORDS))

    def mix_through(self, rec: Recorder, buffers: Sequence[Buffer]) -> None:
        for (variant, grid), (x, y) in zip(self._mixes, pairwise(buffers), strict=True):
            rec.launch(variant, (x, y), grid)

    def append_and_sum(self, rec: Recorder, tensor: Buffer, slot: Buffer) -> None:
        rec.launch(self._append, (tensor, slot), (rec.rows, 1, 1))
        rec.launch(self._sum, (tensor, slot), ByLength(self._threads * self._per, 1, 1))

    def _grid(self, items: int) -> tuple[int, int, int]:
        return ceil_div(items, self._threads * self._per), 1, 1

    def _variant(self, mode: str, *constants: tuple[str, int]) -> Variant:
        return Variant("kv_pattern", (("mode", mode), *constants, ("threads", self._threads), ("per", self._per)))


class _Expected:
    """What a step's results must be: u32 sums over the positions so far, carried from step to step."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._length = self._base = 0
        self._mul, self._add = 1, 0  # all mixes of a step as one: x * mul + add
        for _ in range((INTERMEDIATES + 1) * tensors // 2):
            self._mul, self._add = self._mul * _MUL & _MASK, (self._add * _MUL + _ADD) & _MASK

    def step(self, position: int, rows: int) -> list[int]:
        """The results of a step of ``rows`` rows whose first has ``position``."""
        for p in range(self._length, position + rows):
            self._base += p * _ROW_FACTOR + p * _STRIDE % _WORDS
        self._length = length = position + rows
        sums = [(self._base + length * _salt(site)) & _MASK for site in range(self._tensors)]
        return [*sums, *(((position + i) * self._mul + self._add) & _MASK for i in range(_CHAIN_WORDS))]


def _salt(site: int) -> int:
    return site * _SALT_FACTOR + 1


def _check_fits(name: str, start: int, end: int, limits: Mapping[str, int]) -> None:
    limit = min(("maxBufferSize", "maxStorageBufferBindingSize"), key=lambda which: limits[which])
    if end * POSITION_BYTES > limits[limit]:
        raise BadRequest(
            f"{name} up to {end:,} positions needs tensors of {end * POSITION_BYTES:,} B; the device allows "
            f"{limits[limit]:,} B ({limit}): {limits[limit] // POSITION_BYTES:,} positions. End earlier."
        )
    rows = limits["maxComputeWorkgroupsPerDimension"]
    if start > rows:
        raise BadRequest(f"{name} from {start:,} positions; the device fills {rows:,} at once. Start earlier.")
