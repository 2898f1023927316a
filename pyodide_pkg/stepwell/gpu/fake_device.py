"""``FakeDevice``: the ``Device`` protocol on CPython, strict about WebGPU's rules, with real bytes and no GPU.

It is stricter than a browser: a broken rule is a UsageError at the call that breaks it, and a write that would overtake
recorded work is an error too.  Out of memory and loss are reported where the protocol says, at the next awaited method.
Kernels only validate, unless the caller gives them a meaning (``kernels``: pipeline label → function).
"""

import asyncio
from array import array
from collections.abc import Awaitable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from stepwell.errors import BadFile, DeviceError, DeviceLost, MissingCapability, UsageError
from stepwell.gpu.device import Binding, BufferUsage, ByteSource, Chunk, DeviceInfo, DeviceProfile, Layout, Progress
from stepwell.gpu.fake_objects import (
    DEFAULT_LIMITS,
    FakeBindGroup,
    FakeBuffer,
    FakePipeline,
    FakePlan,
    KernelFunction,
    bind,
    check_buffer,
    check_shader,
)
from stepwell.gpu.fake_profile import FakeProfiler
from stepwell.gpu.fake_queue import FakeQueue

TIMESTAMPS = "timestamp-query"
"""The feature that times passes."""
FAKE_INFO = DeviceInfo(
    vendor="stepwell",
    architecture="fake",
    description="FakeDevice, validates and computes on the CPU",
    is_fallback=True,
    limits=DEFAULT_LIMITS,
    features=frozenset({TIMESTAMPS}),
    immediate_bytes=64,
)
"""A device with the default limits."""
UPLOAD_BYTES = 1 << 20
"""Bytes of a byte source that ``upload`` reads at a time."""

# One counter for all devices of the process: a handle of another device is recognised as foreign.
_handles = count(1)
_Object = TypeVar("_Object", FakeBuffer, FakePipeline, FakeBindGroup, FakePlan)
_KIND = {FakeBuffer: "buffer", FakePipeline: "pipeline", FakeBindGroup: "bind group", FakePlan: "plan"}
_TABLES = {FakeBuffer: "buffers", FakePipeline: "pipelines", FakeBindGroup: "bind_groups", FakePlan: "plans"}


class FakeDevice:
    """The device described in the module.

    ``limits`` replaces single limits of ``info``.  ``kernels`` gives pipelines their meaning, by label; more may be
    added before a pipeline is made.  ``log`` holds one tuple of strings per call and per instruction; it keeps at least
    the last ``log_limit`` of them (0: no log).  ``fail_next_create`` makes the next create_buffer fail the way WebGPU
    does: the call returns a handle, and the error comes with the next awaited method.
    """

    def __init__(
        self,
        info: DeviceInfo = FAKE_INFO,
        *,
        limits: Mapping[str, int] | None = None,
        kernels: Mapping[str, KernelFunction] | None = None,
        log_limit: int = 10_000,
    ) -> None:
        self._info = replace(info, limits={**info.limits, **(limits or {})})
        self.kernels = dict(kernels or {})
        self._objects: dict[int, FakeBuffer | FakePipeline | FakeBindGroup | FakePlan] = {}
        self.profiler = FakeProfiler()
        self._late_error: DeviceError | None = None
        self._dead: DeviceError | None = None
        self._log_limit = log_limit
        self.log: list[tuple[str, ...]] = []
        self.fail_next_create: type[DeviceError] | None = None

    # ---- the protocol -----------------------------------------------------------------------------------------------

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        self._alive()
        check_buffer(size, usage, self._info.limits)
        handle = next(_handles)
        self._objects[handle] = FakeBuffer(handle, size, usage, label)
        self.note("create_buffer", handle, size, usage.value, label)
        if self.fail_next_create is not None:
            error, self.fail_next_create = self.fail_next_create, None
            self._late(error(f"createBuffer of {size:,} B ({label or 'no label'}) failed."))
        return handle

    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        await self._next_await()
        check_shader(code, layout, self._info.limits, self._info.features, self._info.immediate_bytes)
        handle = next(_handles)
        self._objects[handle] = FakePipeline(handle, layout, label, self.kernels.get(label))
        self.note("create_pipeline", handle, label)
        return handle

    def create_bind_group(self, pipeline: int, entries: Sequence[Binding]) -> int:
        self._alive()
        layout = self.get(pipeline, FakePipeline, "create_bind_group").layout
        buffers = [self.get(entry.buffer, FakeBuffer, "create_bind_group") for entry in entries]
        bound = bind(layout, entries, buffers, self._info.limits)
        handle = next(_handles)
        self._objects[handle] = FakeBindGroup(handle, layout, bound)
        self.note("create_bind_group", handle, pipeline, *(entry.buffer for entry in entries))
        return handle

    def create_plan(self, program: "array[int]") -> int:
        self._alive()
        rehearsal = FakeQueue(self, rehearse=True)
        rehearsal.run(program)
        if not rehearsal.has_scalars:
            raise UsageError("a plan begins with SCALARS: every replay brings its own.")
        handle = next(_handles)
        self._objects[handle] = FakePlan(handle, array("I", program), frozenset(rehearsal.handles))
        self.note("create_plan", handle)
        return handle

    def destroy(self, handle: int) -> None:
        self._alive()
        found = self._objects.pop(handle, None)
        if found is None:
            raise UsageError(f"destroy: no object {handle} on this device: destroyed already, or of another device.")
        if isinstance(found, FakeBuffer):
            found.destroyed, found.mapped, found.data = True, False, None
        self.note("destroy", handle)

    def write_buffer(self, buffer: int, offset: int, data: "bytes | bytearray | memoryview | array[int]") -> None:
        self._alive()
        view = memoryview(data).cast("B")
        target = self._target(buffer, offset, view.nbytes, "write_buffer")
        self.note("write_buffer", buffer, offset, view.nbytes)
        target.put(offset, view)

    def submit(self, program: "array[int]") -> None:
        self._alive()
        FakeQueue(self).run(program)

    def replay(self, plan: int, position: int, rows: int, length: int, draw: int, staging: int) -> None:
        self._alive()
        found = self.get(plan, FakePlan, "replay")
        dead = found.handles - self._objects.keys()
        if dead:
            raise UsageError(f"replay of plan {plan}: {min(dead)}, which it refers to, was destroyed. Record it anew.")
        self.note("replay", plan, position, rows, length, draw, staging)
        words = found.words[:]
        words[1:6] = array("I", (position, rows, length, draw, staging))
        FakeQueue(self).run(words)

    def read_buffer(self, buffer: int, offset: int, nbytes: int) -> Awaitable[bytes]:
        try:
            self._alive()
            source = self.get(buffer, FakeBuffer, "read_buffer")
            source.need(BufferUsage.MAP_READ, "read_buffer")
            source.need_range(offset, nbytes, "read_buffer", alignment=8)
            source.need_usable("read_buffer")
        except DeviceError as error:
            return _Read(self, error)
        source.mapped = True
        return _Read(self, asyncio.ensure_future(self._read(source, offset, nbytes)))

    async def upload(self, source: ByteSource, chunks: Sequence[Chunk], progress: Progress | None = None) -> None:
        await self._next_await()
        for chunk in chunks:
            self._check_chunk(source, chunk)
        done, total = 0, sum(chunk.nbytes for chunk in chunks)
        for chunk in sorted(chunks):
            for start in range(0, chunk.nbytes, UPLOAD_BYTES):
                nbytes = min(UPLOAD_BYTES, chunk.nbytes - start)
                data = await source.read(chunk.source_offset + start, nbytes)
                if len(data) != nbytes:
                    raise BadFile(f"{source.name}: {len(data):,} of {nbytes:,} B at {chunk.source_offset + start:,}.")
                self.write_buffer(chunk.buffer, chunk.buffer_offset + start, data + bytes(-nbytes % 4))
                done += nbytes
                if progress is not None:
                    progress(done, total)
        await self._next_await()

    async def wait(self) -> None:
        await self._next_await()

    def table_sizes(self) -> Mapping[str, int]:
        kinds = [type(found) for found in self._objects.values()]
        return {name: kinds.count(kind) for kind, name in _TABLES.items()}

    def set_profile(self, spans: bool = False, passes: bool = False) -> None:
        if passes and TIMESTAMPS not in self._info.features:
            raise MissingCapability(
                f"feature {TIMESTAMPS}", TIMESTAMPS, ", ".join(sorted(self._info.features)) or "none"
            )
        self.profiler.spans, self.profiler.passes = spans, passes

    async def take_profile(self) -> DeviceProfile:
        await self._next_await()
        return self.profiler.take()

    def close(self) -> None:
        if self._dead is None:
            self._end(DeviceLost("the device was closed. Open a new one."))

    # ---- for tests --------------------------------------------------------------------------------------------------

    def lose(self, reason: str = "injected") -> None:
        """Lose the device, as a driver reset would: every later call but ``close`` raises DeviceLost."""
        self._end(DeviceLost(f"the device is lost ({reason}). Open a new one and load the model again."))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all live buffers."""
        return sum(found.size for found in self._objects.values() if isinstance(found, FakeBuffer))

    def get(self, handle: int, kind: type[_Object], purpose: str) -> _Object:
        """The live object of ``handle``.

        Raises UsageError, which begins with ``purpose``, for a handle that is stale, foreign or not of that ``kind``.
        """
        found = self._objects.get(handle)
        if isinstance(found, kind):
            return found
        if found is None:
            raise UsageError(f"{purpose}: no {_KIND[kind]} {handle} on this device: destroyed, or of another device.")
        raise UsageError(f"{purpose}: handle {handle} is a {_KIND[type(found)]}, not a {_KIND[kind]}.")

    def note(self, *entry: object) -> None:
        """Add ``entry`` to the log, as strings."""
        if self._log_limit:
            self.log.append(tuple(map(str, entry)))
            if len(self.log) > 2 * self._log_limit:
                del self.log[: -self._log_limit]

    def report(self) -> None:
        """Raise an error that came late, once; a loss every time."""
        self._alive()
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._dead is not None:
            raise type(self._dead)(*self._dead.args)

    async def _next_await(self) -> None:
        """Give the event loop a turn, then report what went wrong meanwhile; every awaited method does."""
        self._alive()
        await asyncio.sleep(0)
        self.report()

    async def _read(self, source: FakeBuffer, offset: int, nbytes: int) -> bytes | DeviceError:
        """Read, once the mapping is done.  A failure is the result, because it may never be awaited."""
        try:
            if source.destroyed:
                return UsageError(f"read_buffer: {source} was destroyed while the read was pending.")
            self.note("read_buffer", source.handle, offset, nbytes)
            return source.get(offset, nbytes)
        finally:
            source.mapped = False

    def _late(self, error: DeviceError) -> None:
        if isinstance(error, DeviceLost):
            self._end(error)
        elif self._late_error is None:
            self._late_error = error

    def _end(self, error: DeviceError) -> None:
        for found in self._objects.values():
            if isinstance(found, FakeBuffer):
                found.destroyed, found.data = True, None
        self._objects.clear()
        self._dead, self._late_error = error, None
        self.note("end", type(error).__name__)

    def _target(self, handle: int, offset: int, nbytes: int, purpose: str) -> FakeBuffer:
        target = self.get(handle, FakeBuffer, purpose)
        target.need(BufferUsage.COPY_DST, purpose)
        target.need_range(offset, nbytes, purpose)
        target.need_usable(purpose)
        return target

    def _check_chunk(self, source: ByteSource, chunk: Chunk) -> None:
        where = f"upload from {source.name}"
        if chunk.source_offset % 4 or chunk.source_offset < 0 or chunk.nbytes < 0:
            raise UsageError(
                f"{where}: source offset {chunk.source_offset:,} is not a multiple of 4, or a size below 0."
            )
        if chunk.source_offset + chunk.nbytes > source.size:
            raise BadFile(
                f"{source.name} has {source.size:,} B; {chunk.nbytes:,} B at {chunk.source_offset:,} end outside it."
            )
        self._target(chunk.buffer, chunk.buffer_offset, chunk.nbytes + -chunk.nbytes % 4, where)


class _Read:
    """A read that was started: awaiting it gives the bytes, or raises what a read of a browser's device raises."""

    def __init__(self, device: FakeDevice, outcome: "asyncio.Future[bytes | DeviceError] | DeviceError") -> None:
        self._device, self._outcome = device, outcome

    def __await__(self) -> Generator[Any, None, bytes]:
        pending = self._outcome
        # a mapping continues when the task that waits for it is cancelled
        outcome = (yield from asyncio.shield(pending)) if isinstance(pending, asyncio.Future) else pending
        self._device.report()
        if isinstance(outcome, DeviceError):
            raise outcome
        return outcome
