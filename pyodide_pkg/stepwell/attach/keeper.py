"""``Keeper``: decides for the pool under a runtime which destroyed buffers are kept, and which serve again.

The pool (``js/pool.js``) has the GPU buffers, the keeper their numbers.  ``js/keeper.js`` is the same in JavaScript: a
test replays the same calls through both.  Ints and short texts only, because in Pyodide every call crosses the border
between the languages.
"""

import json
from collections.abc import Callable, Iterable, Mapping

from stepwell.errors import BadRequest, PolicyError, StaleBuffer
from stepwell.memory.budget import Budget
from stepwell.memory.buffer import Role
from stepwell.memory.policies import make_policy
from stepwell.memory.policies.base import Policy, Request
from stepwell.options import OptionValue

POLICY_NAMES = ("adaptive", "bucket", "simple", "exact", "lazy_release", "disabled")
"""The policies that make sense where every buffer has exactly the size that was asked for."""
_new = tuple.__new__  # half the cost of calling the NamedTuple


class Keeper:
    """``policy``: one of POLICY_NAMES, with its ``options``, or a callable that makes a Policy object.

    One policy object per usage value, since a buffer serves only requests of its own usage and size.  ``budget``: bytes
    of all buffers, live and free; before one is created free ones are given up, and only what is live exceeds it.
    """

    def __init__(
        self,
        policy: str | Callable[[], Policy] = "adaptive",
        options: Mapping[str, OptionValue] | None = None,
        budget: int | None = None,
    ) -> None:
        self._make = _factory(policy, options or {})
        self._budget = Budget(budget, hard=False)
        self._policies: dict[int, Policy] = {}  # by usage
        self._known: dict[int, tuple[Policy, Request]] = {}  # by id
        self._free: set[int] = set()
        self._gone: set[int] = set()  # forgotten while a policy kept them
        self._recorded = False  # something was acquired since the last flush
        self._live_bytes = self._free_bytes = self._peak_bytes = 0
        self._created = self._reused = self._destroyed = self._runs = 0

    def acquire(self, usage: int, nbytes: int) -> int:
        """The id of a kept buffer for a request, or 0: create one (after ``room``) and say so (``created``)."""
        policy = self._policies.get(usage)
        if policy is None:
            policy = self._policies[usage] = self._make()
        self._recorded = True
        found = policy.acquire(_new(Request, (nbytes, Role.ACTIVATION, 0, True)), nbytes)
        if found is None:
            return 0
        if found not in self._free:
            if found in self._gone:
                self._gone.remove(found)
                return 0
            raise PolicyError(f"{type(policy).__name__} handed out buffer {found}, which is not free.")
        size = self._known[found][1].nbytes
        if size != nbytes:
            raise PolicyError(f"{type(policy).__name__} handed out buffer {found} of {size:,} B for {nbytes:,} B.")
        self._free.remove(found)
        self._reused += 1
        self._free_bytes -= nbytes
        self._live_bytes += nbytes
        return found

    def created(self, usage: int, nbytes: int) -> int:
        """The id of a new buffer, which the application has; ``acquire`` was called for it before."""
        self._created = buffer_id = self._created + 1
        self._known[buffer_id] = self._policies[usage], Request(nbytes, Role.ACTIVATION, 0, True)
        self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._reserved)
        return buffer_id

    def room(self, nbytes: int) -> str:
        """The ids to destroy before ``nbytes`` more are created, so that the budget holds as far as it can."""
        given_up: list[int] = []
        for policy in self._policies.values():
            excess = self._budget.excess(self._reserved + nbytes)
            if excess <= 0:
                break
            given_up += self._retire(policy.reclaim(excess))
        return _text(given_up)

    def release(self, buffer_id: int) -> str:
        """The application has destroyed the buffer.  Returns the ids to destroy."""
        known = self._known.get(buffer_id)
        if known is None or buffer_id in self._free:
            state = "not there" if known is None else "free already"
            raise StaleBuffer(f"buffer {buffer_id} was released, and is {state}.")
        policy, request = known
        nbytes = request.nbytes
        self._free.add(buffer_id)
        self._live_bytes -= nbytes
        self._free_bytes += nbytes
        given_up = policy.release(buffer_id, request, nbytes, self._recorded)
        return _text(self._retire(given_up)) if given_up else ""

    def forget(self, buffer_id: int) -> None:
        """The buffer is gone for good, live or free; one that is not there is no error."""
        known = self._known.pop(buffer_id, None)
        if known is None:
            return
        self._destroyed += 1
        if buffer_id in self._free:
            self._free.remove(buffer_id)
            self._gone.add(buffer_id)
            self._free_bytes -= known[1].nbytes
        else:
            self._live_bytes -= known[1].nbytes

    def flush(self) -> str:
        """Something was submitted.  Returns the ids to destroy."""
        self._recorded = False
        return self._of_all(lambda policy: policy.flush())

    def begin_run(self) -> str:
        """A run (a token) begins: flush, then windows turn over.  Returns the ids to destroy."""
        flushed = self.flush()
        self._runs += 1
        self._budget.note_run()
        begun = self._of_all(lambda policy: policy.begin_run())
        return f"{flushed} {begun}".strip()

    def drain(self) -> str:
        """Every free buffer is given up.  Returns their ids."""
        return self._of_all(lambda policy: policy.drain())

    def shrink(self) -> str:
        """The device is out of memory: the budget falls, and every free buffer is given up.  Returns their ids."""
        reserved = self._reserved
        given_up = self.drain()
        self._budget.shrink(reserved)
        return given_up

    def stats(self) -> str:
        """Buffers and bytes now, the most bytes there were, and counters, as JSON; ``budget_bytes`` null: no limit."""
        return json.dumps(
            {
                "live_buffers": len(self._known) - len(self._free),
                "live_bytes": self._live_bytes,
                "free_buffers": len(self._free),
                "free_bytes": self._free_bytes,
                "peak_bytes": self._peak_bytes,
                "budget_bytes": self._budget.limit,
                "created": self._created,
                "reused": self._reused,
                "destroyed": self._destroyed,
                "runs": self._runs,
            }
        )

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _reserved(self) -> int:
        return self._live_bytes + self._free_bytes

    def _of_all(self, decide: Callable[[Policy], Iterable[int]]) -> str:
        given_up: list[int] = []
        for policy in self._policies.values():
            given_up += self._retire(decide(policy))
        return _text(given_up)

    def _retire(self, given_up: Iterable[int]) -> list[int]:
        """Take what a policy gave up off the books; what was forgotten before is no longer there to be destroyed."""
        ids = []
        for buffer_id in given_up:
            if buffer_id in self._gone:
                self._gone.remove(buffer_id)
                continue
            if buffer_id not in self._free:
                raise PolicyError(f"a policy gave up buffer {buffer_id}, which is not free.")
            self._free.remove(buffer_id)
            self._free_bytes -= self._known.pop(buffer_id)[1].nbytes
            self._destroyed += 1
            ids.append(buffer_id)
        return ids


def _factory(policy: str | Callable[[], Policy], options: Mapping[str, OptionValue]) -> Callable[[], Policy]:
    """What makes a policy object; BadRequest now for what it would refuse later."""
    if not isinstance(policy, str):
        if options:
            raise BadRequest("attach: options belong to a policy's name; give a callable that sets them itself.")
        return policy
    if policy not in POLICY_NAMES:
        raise BadRequest(f"policy {policy!r}: attach has none of that name. Choose one of {', '.join(POLICY_NAMES)}.")
    make_policy(policy, **options)
    return lambda: make_policy(policy, **options)


def _text(ids: list[int]) -> str:
    return " ".join(map(str, ids))
