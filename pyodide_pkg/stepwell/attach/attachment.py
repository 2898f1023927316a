"""``Attachment``, which ``attach`` returns.  Runs in Pyodide only; the JS half is ``bundle.script()``.

Policies by name are decided in JavaScript (``js/keeper.js``); a policy of the caller's by a ``Keeper`` here.
"""

import gzip
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import js  # type: ignore[import-not-found]
from pyodide.code import run_js  # type: ignore[import-not-found]
from pyodide.ffi import JsException, create_proxy, jsnull, to_js  # type: ignore[import-not-found]

from stepwell.attach.bundle import VERSION, script
from stepwell.attach.keeper import Keeper, policy_maker
from stepwell.errors import BadRequest, NoWebGPU, StepwellError, UsageError
from stepwell.memory.policies import POLICIES
from stepwell.memory.policies.base import Policy
from stepwell.options import OptionValue, parse_options

_METHODS = ("acquire", "created", "room", "release", "forget", "flush", "begin_run", "drain", "shrink", "stats")
_LIKE_KEEPER = """
(names, methods) => {
  // A call of a method's own proxy crosses the border once; a method of an object's proxy would be looked up there.
  const keeper = Object.fromEntries(names.map((name, index) => [name, methods[index]]));
  return Object.assign(keeper, {
    close() { // Python's side may go: nothing is decided any more, and the books are what they were last
      const last = keeper.stats();
      Object.assign(keeper, { forget() {}, stats: () => last, close() {} });
      for (const method of methods) method.destroy();
    },
  });
}
"""


class Attachment:
    """A pool or a recorder, or both, under WebGPU, until ``detach``; also a context manager that detaches."""

    def __init__(
        self,
        target: Any,
        *,
        record: bool,
        policy: str | Callable[[], Policy] | None,
        budget: int | None,
        zero: str,
        runtime: str,
        limit: int | None,
        options: Mapping[str, OptionValue],
    ) -> None:
        pooled = policy is not None or not record
        if not pooled and (budget is not None or options):
            raise BadRequest("attach: a budget and options are those of a pool; name a policy beside record=True.")
        if zero not in ("always", "never"):
            raise BadRequest(f"attach: zero={zero!r}; it must be 'always' or 'never'.")
        if target is None and not hasattr(js, "GPUDevice"):
            raise NoWebGPU("There is no WebGPU here (no GPUDevice): attach where the runtime asks for its device.")
        policy = policy or "adaptive"
        self._make = partial(Keeper, policy_maker(policy, options), budget)
        self._make()  # what is wrong with these is an error now
        self._keepers: list[Any] = []  # in JS, of a caller's policy
        self._factory: Any = None  # of these
        self._last: dict[str, Any] | None = None  # the stats at the end
        stepwell = _stepwell()
        pool: dict[str, Any] = {}
        if pooled:
            pool["budget"] = None if budget is None else float(budget)  # a large int would be a BigInt
            if isinstance(policy, str):
                pool |= {"policy": policy, "options": _options(policy, options)}
            else:
                pool["keeper"] = self._factory = create_proxy(self._make_keeper)
        try:
            self._js = stepwell.attach(
                _object(target=target, record=record, zero=zero, runtime=runtime or None, limit=limit, **pool)
            )
        except JsException as exception:
            self._let_go()
            raise _raised(exception) from None

    def detach(self) -> None:
        """Give WebGPU back to the browser: free buffers are destroyed now, live ones when the application does that."""
        if self._last is not None:
            return
        self._js.detach()
        for keeper in self._keepers:
            keeper.close()
        self._last = self._stats()
        self._let_go()

    def mark(self, name: str = "") -> None:
        """Say that a token ends here.  From the first mark on only marks count, else reads of results from the GPU."""
        self._js.mark(name)

    def stats(self) -> dict[str, Any]:
        """``devices``: the books of each device's keeper (``Keeper.stats``), and its GPU buffers (``native``)."""
        return self._stats() if self._last is None else self._last

    def trace(self, **metadata: Any) -> str | None:
        """The recording in the format of ``replay/traces.py``, with ``metadata``; None if nothing was recorded."""
        text: str | None = self._ask("trace", _object(**metadata))
        return text

    def save(self, path: Path, **metadata: Any) -> None:
        """Write the trace to ``path``, compressed if its name ends in ``.gz``; UsageError if nothing was recorded."""
        text = self.trace(**metadata)
        if text is None:
            raise UsageError("save: nothing was recorded. Attach with record=True.")
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

    def summary(self) -> dict[str, Any] | None:
        """Figures per token, live and peak bytes, whether a pool would help; None if nothing was recorded."""
        found: dict[str, Any] | None = _as_json(self._ask("summary"))
        return found

    def events(self, form: str = "lines") -> str | None:
        """Every event as text; ``form``: ``lines`` of JSON, or ``chrome`` for its trace viewer; None: none recorded."""
        text: str | None = self._ask("events", form)
        return text

    async def measure_costs(self) -> dict[str, Any] | None:
        """The cost of creating a buffer here, timed for trace and summary: some seconds, while the GPU is idle."""
        try:
            found: dict[str, Any] | None = _as_json(await self._js.measureCosts())
        except JsException as exception:
            raise _raised(exception) from None
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.detach()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _make_keeper(self) -> Any:
        """A keeper for one device that asks the caller's policy, as the JS pool wants it."""
        keeper = self._make()
        proxies = to_js([create_proxy(getattr(keeper, name)) for name in _METHODS])
        made = run_js(_LIKE_KEEPER)(to_js(list(_METHODS)), proxies)
        self._keepers.append(made)
        return made

    def _let_go(self) -> None:
        """Destroy the proxies of Python objects that JS has."""
        self._keepers.clear()
        if self._factory is not None:
            self._factory.destroy()

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            found = getattr(self._js, method)(*args)
        except JsException as exception:
            raise _raised(exception) from None
        return None if found is jsnull else found

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = _as_json(self._ask("stats"))
        return stats


def _stepwell() -> Any:
    """``globalThis.stepwell``, of this version; the page may have loaded it already."""
    run_js(script() + "\n//# sourceURL=stepwell/attach/script.js")
    found = str(js.stepwell.version)
    if found != VERSION:
        raise BadRequest(
            f"attach: the page has loaded stepwell-attach.js {found}, and this is stepwell {VERSION}. Load that "
            "version, or leave it to Python."
        )
    return js.stepwell


def _options(policy: str, options: Mapping[str, OptionValue]) -> dict[str, Any]:
    """The ``options`` of ``policy`` as JS takes them."""
    values = parse_options(POLICIES[policy].options, options, f"policy {policy}")
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _object(**members: Any) -> Any:
    """A JS object of the ``members`` that are not None."""
    given = {name: value for name, value in members.items() if value is not None}
    return to_js(given, dict_converter=js.Object.fromEntries)


def _as_json(value: Any) -> Any:
    """The JS ``value`` as Python has it from JSON."""
    return None if value is None else json.loads(js.JSON.stringify(value))


def _raised(exception: Any) -> StepwellError:
    """The error for an ``exception`` of the JS half, which has two kinds of its own, both about wrong requests."""
    if exception.name in ("BadRequest", "AttachError"):
        return BadRequest(str(exception.message))
    return UsageError(f"{exception.name}: {exception.message}")
