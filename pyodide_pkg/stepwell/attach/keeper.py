"""``Keeper``: decides, by a policy of the caller's, which destroyed buffers are kept and which serve again.

The pool (``js/pool.js``) has the GPU buffers, the keeper their numbers.  Policies by name are decided by
``js/keeper.js``, the same in JavaScript: a test replays the same calls through both.  Arguments and results are ints
and short texts, because in Pyodide every call crosses the border between the languages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from stepwell.errors import BadRequest, StaleBuffer
from stepwell.memory.budget import Budget
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.base import Policy, Request
from stepwell.memory.policies.per_usage import PerUsage
from stepwell.options import OptionValue

_new = tuple.__new__  # half the cost of calling the NamedTuple


def policy_maker(policy: str | Callable[[], Policy], options: Mapping[str, OptionValue]) -> Callable[[], Policy]:
    """The callable ``policy``, or one that makes policies of that name with ``options``.

    BadRequest for a name that attach lacks, for an option that is wrong, and for options beside a callable.
    """
    if not isinstance(policy, str):
        if options:
            raise BadRequest("attach: options belong to a policy's name; give a callable that sets them itself.")
        return policy
    names = [name for name, entry in POLICIES.items() if entry.attached]
    if policy not in names:
        raise BadRequest(f"policy {policy!r}: attach has none of that name. Choose one of {', '.join(names)}.")
    make_policy(policy, **options)
    return partial(make_policy, policy, **options)


class Keeper:
    """The books of one device's pool: which buffers are live and free, and how many bytes they have.

    ``make`` makes a policy object per usage value.  ``budget``: bytes of all buffers, live and free; free ones are
    given up before a new one would exceed it, and only live ones exceed it.
    """

    def __init__(self, make: Callable[[], Policy], budget: int | None = None) -> None:
        self._policy = PerUsage(make)
        self._budget = Budget(budget, hard=False)
        self._requests: dict[int, Request] = {}  # of live and free buffers, by id
        self._recorded = False  # something was acquired since the last flush
        self._live_bytes = self._peak_bytes = 0
        self._created = self._reused = self._destroyed = self._runs = 0

    def acquire(self, usage: int, nbytes: int) -> int:
        """The id of a kept buffer for a request, or 0: make ``room``, create one, and say so (``created``)."""
        self._recorded = True
        found = self._policy.acquire(_new(Request, (nbytes, Role.ACTIVATION, usage, True)), nbytes)
        if found is None:
            return 0
        self._reused += 1
        self._live_bytes += nbytes
        return found

    def created(self, usage: int, nbytes: int) -> int:
        """Enter a new buffer, for which ``acquire`` returned 0: the application has it.  Returns its id."""
        self._created = buffer_id = self._created + 1
        self._requests[buffer_id] = Request(nbytes, Role.ACTIVATION, usage, True)
        self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._reserved)
        return buffer_id

    def room(self, nbytes: int) -> str:
        """The ids to destroy before ``nbytes`` more are created, so that the budget holds as far as it can."""
        excess = self._budget.excess(self._reserved + nbytes)
        return self._retire(self._policy.reclaim(excess)) if excess > 0 else ""

    def release(self, buffer_id: int) -> str:
        """Note that the application destroyed a buffer.  Returns ids to destroy; StaleBuffer unless it was live."""
        request = self._requests.get(buffer_id)
        if request is None or buffer_id in self._policy.kept:
            state = "not there" if request is None else "free already"
            raise StaleBuffer(f"buffer {buffer_id} was released, and is {state}.")
        self._live_bytes -= request.nbytes
        return self._retire(self._policy.release(buffer_id, request, request.nbytes, self._recorded))

    def forget(self, buffer_id: int) -> None:
        """Take a buffer that is gone, live or free, off the books; one that is not there is no error."""
        request = self._requests.pop(buffer_id, None)
        if request is None:
            return
        self._destroyed += 1
        if not self._policy.forget(buffer_id):
            self._live_bytes -= request.nbytes

    def flush(self) -> str:
        """Note that something was submitted.  Returns the ids to destroy."""
        self._recorded = False
        return self._retire(self._policy.flush())

    def begin_run(self) -> str:
        """Note that a run (a token) begins: flush, then windows turn over.  Returns the ids to destroy."""
        flushed = self.flush()
        self._runs += 1
        self._budget.note_run()
        begun = self._retire(self._policy.begin_run())
        return f"{flushed} {begun}".strip()

    def drain(self) -> str:
        """Give up every free buffer.  Returns their ids."""
        return self._retire(self._policy.drain())

    def shrink(self) -> str:
        """Lower the budget and give up every free buffer: the device is out of memory.  Returns their ids."""
        reserved = self._reserved
        given_up = self.drain()
        self._budget.shrink(reserved)
        return given_up

    def stats(self) -> str:
        """Buffers and bytes now, the most bytes there were, and counters, as JSON; ``budget_bytes`` null: no limit."""
        return json.dumps(
            {
                "live_buffers": len(self._requests) - len(self._policy.kept),
                "live_bytes": self._live_bytes,
                "free_buffers": len(self._policy.kept),
                "free_bytes": self._policy.kept_bytes,
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
        return self._live_bytes + self._policy.kept_bytes

    def _retire(self, ids: Sequence[int]) -> str:
        """Take what the policies gave up off the books.  Returns the ids as text."""
        if not ids:
            return ""
        for buffer_id in ids:
            del self._requests[buffer_id]
        self._destroyed += len(ids)
        return " ".join(map(str, ids))
