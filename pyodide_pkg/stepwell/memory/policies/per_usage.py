"""``PerUsage``: the rule of a pool under another runtime, whose buffers keep the size and the usage asked for.

``attach/keeper.py`` decides by it, ``replay/attached.py`` replays traces through it, and ``attach/js/keeper.js`` is the
same in JavaScript.
"""

from collections.abc import Callable, Iterable, Sequence

from stepwell.errors import PolicyError
from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request

_new = tuple.__new__  # half the cost of calling the NamedTuple


class PerUsage:
    """A policy of one policy per usage, each made by ``make``: a buffer serves only its own usage and size.

    The usage is the ``site`` of a request.  PolicyError where one of the policies breaks its contract.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._policies: dict[int, Policy] = {}  # by usage
        self._asked: Policy | None = None  # the one asked last
        self._gone: set[int] = set()  # forgotten while a policy kept them
        self.kept: dict[int, int] = {}
        """The bytes of each free buffer, by id."""
        self.kept_bytes = 0
        """The sum of ``kept``."""

    def size_class(self, request: Request) -> int:
        """The size asked for."""
        return request.nbytes

    def acquire(self, request: Request, size: int) -> int | None:
        """The id of a free buffer of exactly ``size`` bytes and the usage of ``request``, or None."""
        policy = self._policies.get(request.site)
        if policy is None:
            policy = self._policies[request.site] = self._make()
        self._asked = policy
        found = policy.acquire(_exact(size), size)
        if found is None:
            return None
        kept = self.kept.get(found)
        if kept is None:
            if found in self._gone:
                self._gone.remove(found)
                return None
            raise PolicyError(f"{type(policy).__name__} handed out buffer {found}, which is not free.")
        if kept != size:
            raise PolicyError(f"{type(policy).__name__} handed out buffer {found} of {kept:,} B for {size:,} B.")
        del self.kept[found]
        self.kept_bytes -= size
        return found

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        """Keep the buffer, of ``size`` bytes.  Returns ids to destroy."""
        self.kept[buffer_id] = size
        self.kept_bytes += size
        given_up = self._policies[request.site].release(buffer_id, _exact(size), size, recorded)
        return self._retired(given_up) if given_up else ()

    def forget(self, buffer_id: int) -> bool:
        """Forget a buffer that is gone: it serves no request any more.  Returns whether it was free."""
        size = self.kept.pop(buffer_id, None)
        if size is None:
            return False
        self.kept_bytes -= size
        self._gone.add(buffer_id)
        return True

    def flush(self) -> Sequence[int]:
        """Note that everything recorded was submitted.  Returns ids to destroy."""
        return self._from_all(lambda policy: policy.flush())

    def begin_run(self) -> Sequence[int]:
        """Note that a run begins.  Returns ids to destroy."""
        return self._from_all(lambda policy: policy.begin_run())

    def drain(self) -> Sequence[int]:
        """Give up all free buffers.  Returns their ids."""
        return self._from_all(lambda policy: policy.drain())

    def reclaim(self, nbytes: int) -> Sequence[int]:
        """Ids to destroy of ``nbytes`` in total, or as many as there are; usages are asked in the order they came."""
        goal = self.kept_bytes - nbytes
        ids: list[int] = []
        for policy in self._policies.values():
            if self.kept_bytes <= goal:
                break
            ids += self._retired(policy.reclaim(self.kept_bytes - goal))
        return ids

    def target(self, size: int, role: Role) -> int | None:
        """How many free buffers of ``size`` bytes the usage asked for last would keep now; None: no limit."""
        return 0 if self._asked is None else self._asked.target(size, Role.ACTIVATION)

    def _from_all(self, decide: Callable[[Policy], Iterable[int]]) -> list[int]:
        ids: list[int] = []
        for policy in self._policies.values():
            ids += self._retired(decide(policy))
        return ids

    def _retired(self, given_up: Iterable[int]) -> list[int]:
        """The buffers that a policy gave up, without those forgotten before; they are kept no longer."""
        ids = []
        for buffer_id in given_up:
            if buffer_id in self._gone:
                self._gone.remove(buffer_id)
                continue
            size = self.kept.pop(buffer_id, None)
            if size is None:
                raise PolicyError(f"a policy gave up buffer {buffer_id}, which is not free.")
            self.kept_bytes -= size
            ids.append(buffer_id)
        return ids


def _exact(nbytes: int) -> Request:
    """The request as a policy sees it: every storage buffer alike."""
    return _new(Request, (nbytes, Role.ACTIVATION, 0, True))
