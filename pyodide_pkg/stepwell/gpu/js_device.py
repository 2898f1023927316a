"""``JsDevice``: the Device over ``navigator.gpu``.  Pyodide only; its JS half is the files in ``_SCRIPT``."""

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from js import Float64Array  # type: ignore[import-not-found]
from pyodide.code import run_js  # type: ignore[import-not-found]
from pyodide.ffi import JsException, create_proxy, to_js  # type: ignore[import-not-found]

from stepwell import errors
from stepwell.gpu.device import (
    Binding,
    BufferUsage,
    ByteSource,
    Chunk,
    DeviceInfo,
    DeviceProfile,
    Layout,
    Progress,
    Span,
)

_TIMESTAMPS = "timestamp-query"
_WANTED_FEATURES = ("subgroups", "shader-f16", _TIMESTAMPS)
_WANTED_LIMITS = (  # asked for up to what the adapter has: the defaults are far below what models need
    "maxBufferSize",
    "maxStorageBufferBindingSize",
    "maxStorageBuffersPerShaderStage",
    "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupSizeX",
    "maxComputeWorkgroupStorageSize",
)
_UPLOAD_BLOCK = 1 << 22
_SCRIPT = ("program.js", "profile.js", "tables.js", "sources.js", "executor.js")
_SPAN_NAMES = ("encode", "submit")


@cache
def script() -> Any:
    """The JS half: the value of the script, which is evaluated once."""
    folder = files("stepwell.gpu")
    source = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPT)
    return run_js(source + "\n//# sourceURL=stepwell/gpu/script.js")


def _raised(exception: Any) -> errors.StepwellError:
    """The stepwell error for a JS ``exception``: one from the script is named after the class."""
    kind = getattr(errors, str(exception.name), None)
    if isinstance(kind, type) and issubclass(kind, errors.StepwellError):
        return kind(str(exception.message))
    return errors.UsageError(f"{exception.name}: {exception.message}")


async def _awaited(promise: Awaitable[Any]) -> Any:
    try:
        return await promise
    except JsException as exception:
        raise _raised(exception) from None


class JsSource:
    """A byte source on the JS side: its bytes can reach the GPU without passing through Python."""

    def __init__(self, js: Any) -> None:
        self.js = js
        self.name = str(js.name)
        self.size = int(js.size)

    async def read(self, offset: int, nbytes: int) -> bytes:
        data: bytes = (await _awaited(self.js.read(offset, min(offset + nbytes, self.size)))).to_bytes()
        return data


async def open_url(url: str, name: str) -> JsSource:
    """The file at ``url``, called ``name``, read by Range requests where the server has them."""
    return JsSource(await _awaited(script().urlSource(url, name)))


def open_file(file: Any) -> JsSource:
    """The JS ``File`` or ``Blob`` ``file``, which the user picked."""
    return JsSource(script().fileSource(file))


async def open_opfs(path: str) -> JsSource:
    """The file at ``path`` in the origin's private file system."""
    return JsSource(await _awaited(script().opfsSource(path)))


async def open_js_device(need: Mapping[str, int], need_features: Sequence[str]) -> "JsDevice":
    """The browser's device; as ``stepwell.gpu.open_device``."""
    try:
        adapter = await script().openAdapter()
        facts = json.loads(adapter.facts)
        _check(need, need_features, facts)
        request = {
            "requiredLimits": {name: facts["limits"][name] for name in {*_WANTED_LIMITS, *need}},
            "requiredFeatures": sorted({*need_features, *(f for f in _WANTED_FEATURES if f in facts["features"])}),
        }
        return JsDevice(await adapter.openDevice(json.dumps(request)), facts)
    except JsException as exception:
        raise _raised(exception) from None


def _check(need: Mapping[str, int], need_features: Sequence[str], facts: Mapping[str, Any]) -> None:
    for name, value in need.items():
        has = facts["limits"].get(name, 0)
        # limits named min… are alignments: smaller is better
        if (has > value) if name.startswith("min") else (has < value):
            raise errors.MissingCapability(name, value, has, "Use a smaller model or context, or another GPU.")
    _check_features(need_features, facts["features"])


def _check_features(need: Sequence[str], has: Collection[str]) -> None:
    for feature in need:
        if feature not in has:
            raise errors.MissingCapability(f"feature {feature}", feature, ", ".join(sorted(has)) or "none")


class JsDevice:
    """The Device protocol over ``executor``, an ``Executor`` of executor.js; ``facts`` are the adapter's."""

    def __init__(self, executor: Any, facts: Mapping[str, Any]) -> None:
        self.executor = executor
        # methods looked up once: a proxied attribute costs as much as the call
        self._create_buffer = executor.createBuffer
        self._create_bind_group = executor.createBindGroup
        self._destroy = executor.destroy
        self._submit = executor.submit
        self._replay = executor.replay
        self._read = executor.readBuffer
        self._reads: dict[int, _Read] = {}  # reads under way, by ticket
        self._ticket = 0
        self._deliver = create_proxy(self._on_read)
        executor.setDeliver(self._deliver)
        self._assign: Any = None
        self._assigned = 0
        granted = json.loads(executor.granted())
        subgroups = "subgroups" in granted["features"]
        self._info = DeviceInfo(
            vendor=facts["vendor"],
            architecture=facts["architecture"],
            description=facts["description"],
            is_fallback=facts["isFallback"],
            limits=granted["limits"],
            features=frozenset(granted["features"]),
            subgroup_size=(facts.get("subgroupMinSize") or 0) if subgroups else 0,
            subgroup_max_size=(facts.get("subgroupMaxSize") or 0) if subgroups else 0,
            immediate_bytes=granted["immediateBytes"],
            language=frozenset(granted["language"]),
        )

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        handle: int = self._now(self._create_buffer, size, int(usage), label)
        return handle

    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        types = (binding.value for binding in layout.bindings)
        made = self.executor.createPipeline(code, label, layout.first, layout.immediate_bytes, *types)
        handle: int = await _awaited(made)
        return handle

    def create_bind_group(self, pipeline: int, entries: Sequence[Binding]) -> int:
        handle: int = self._now(self._create_bind_group, pipeline, *(word for entry in entries for word in entry))
        return handle

    def destroy(self, handle: int) -> None:
        self._now(self._destroy, handle)

    def write_buffer(self, buffer: int, offset: int, data: "bytes | bytearray | memoryview | array[int]") -> None:
        self._now(self.executor.writeBuffer, buffer, offset, to_js(data))

    def submit(self, program: "array[int]") -> None:
        self._now(self._submit, self._hand_over(program))

    def create_plan(self, program: "array[int]") -> int:
        handle: int = self._now(self.executor.createPlan, self._hand_over(program))
        return handle

    def replay(self, plan: int, position: int, rows: int, length: int, draw: int, staging: int) -> None:
        try:  # not through _now: this is the call of every token
            self._replay(plan, position, rows, length, draw, staging)
        except JsException as exception:
            raise _raised(exception) from None

    def read_buffer(self, buffer: int, offset: int, nbytes: int) -> Awaitable[bytes]:
        ticket = self._ticket = self._ticket + 1
        read = self._reads[ticket] = _Read(self.executor)
        self._read(ticket, buffer, offset, nbytes)
        return read

    async def upload(self, source: ByteSource, chunks: Sequence[Chunk], progress: Progress | None = None) -> None:
        ordered = sorted(chunks)
        if isinstance(source, JsSource):
            table = Float64Array.new(4 * len(ordered))
            table.assign(array("d", [value for chunk in ordered for value in chunk]))
            await _awaited(self.executor.upload(source.js, table, progress))
            return
        # a source made in Python (tests, small tables): its bytes are in this heap anyway
        total, done = sum(chunk.nbytes for chunk in ordered), 0
        for chunk in ordered:
            for start in range(0, chunk.nbytes, _UPLOAD_BLOCK):
                size = min(_UPLOAD_BLOCK, chunk.nbytes - start)
                data = await source.read(chunk.source_offset + start, size)
                if len(data) < size:
                    raise errors.BadFile(
                        f"{source.name}: the file ends at byte {chunk.source_offset + start + len(data):,}"
                    )
                self.write_buffer(chunk.buffer, chunk.buffer_offset + start, data + bytes(-size % 4))
                done += size
                if progress is not None:
                    progress(done, total)
        await self.wait()

    async def wait(self) -> None:
        await _awaited(self.executor.wait())

    def table_sizes(self) -> Mapping[str, int]:
        return dict(zip(("buffers", "pipelines", "bind_groups", "plans"), self.executor.sizes(), strict=True))

    def set_profile(self, spans: bool = False, passes: bool = False) -> None:
        if passes:
            _check_features((_TIMESTAMPS,), self._info.features)
        self.executor.setProfile(spans, passes)

    async def take_profile(self) -> DeviceProfile:
        numbers = array("d", (await _awaited(self.executor.takeProfile())).to_bytes())
        now, count = numbers[0], int(numbers[1])
        spans = tuple(
            Span(_SPAN_NAMES[int(numbers[i])], numbers[i + 1], numbers[i + 2]) for i in range(2, 2 + 3 * count, 3)
        )
        return DeviceProfile(spans, tuple(numbers[2 + 3 * count :]), now)

    def close(self) -> None:
        self.executor.close()
        self._deliver.destroy()
        while self._reads:
            self._reads.popitem()[1].settle(None, errors.DeviceLost("the device was closed"))

    def _on_read(self, ticket: int, data: Any, error: Exception | None) -> None:
        """Settle a read that is done; called from JS."""
        self._reads.pop(ticket).settle(data, error)

    def _hand_over(self, program: "array[int]") -> int:
        """Copy ``program`` to the JS side; returns its length.  Programs of one length share a view there."""
        count = len(program)
        if count != self._assigned or self._assign is None:
            self._assign, self._assigned = self.executor.words(count).assign, count
        self._assign(program)
        return count

    @staticmethod
    def _now(method: Callable[..., Any], *args: object) -> Any:
        try:
            return method(*args)
        except JsException as exception:
            raise _raised(exception) from None


class _Read:
    """A read that was started.  A failure is raised where it is awaited, and nowhere if it never is.

    JS calls back with the data: a promise for every token would take one call more, and two proxies.
    """

    __slots__ = ("_data", "_done", "_error", "_executor", "_waiting")

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._data = b""
        self._error: Exception | None = None
        self._done = False
        self._waiting: list[asyncio.Future[None]] = []

    def settle(self, data: Any, error: Exception | None) -> None:
        """Take the result: ``data`` (4 bytes as a number, or a Uint8Array) or ``error``; wake the tasks that wait."""
        if error is None:
            self._data = data.to_bytes(4, "little") if isinstance(data, int) else data.to_bytes()
        self._error, self._done = error, True
        for future in self._waiting:
            if not future.done():  # the task that waited may have been cancelled
                future.set_result(None)

    def __await__(self) -> Generator[Any, None, bytes]:
        if not self._done:
            future: asyncio.Future[None] = asyncio.Future()  # the loop's own kind schedules a second call of JS
            self._waiting.append(future)
            yield from future.__await__()
        if isinstance(self._error, JsException):
            self._executor.acknowledge(self._error)
            raise _raised(self._error)
        if self._error is not None:
            raise self._error
        return self._data
