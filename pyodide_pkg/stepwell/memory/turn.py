"""Steps take turns on a pool: from its first acquire to its submit, one of them has it to itself."""

from asyncio import Lock, Task, current_task
from collections.abc import Callable
from typing import Any

from stepwell.errors import PoolError
from stepwell.gpu.clock import now_ms


class Turn:
    """Whose step is under way: ``task`` holds ``lock``; None: nobody's."""

    __slots__ = ("lock", "task")

    def __init__(self) -> None:
        self.lock = Lock()
        self.task: Task[Any] | None = None

    @property
    def is_others(self) -> bool:
        """Whether a step of another task is under way."""
        return self.task is not None and self.task is not current_task()

    def give_back(self) -> None:
        """Let the next task have it."""
        self.task = None
        self.lock.release()


class PoolStep:
    """What ``BufferPool.step`` returns: ``async with`` waits for the turn, begins a run, and gives the turn back.

    ``as`` is given the time in ms (``now_ms``) when the turn came, before ``begin(session)``; without a session no run
    begins.
    """

    __slots__ = ("_begin", "_session", "_turn")

    def __init__(self, turn: Turn, begin: Callable[[int], None], session: int | None) -> None:
        self._turn, self._begin, self._session = turn, begin, session

    async def __aenter__(self) -> float:
        turn, task = self._turn, current_task()
        if task is not None and turn.task is task:  # it would wait for itself
            raise PoolError("a step within a step: submit the first one before the pool is asked for another.")
        await turn.lock.acquire()
        turn.task = task
        start = now_ms()
        if self._session is not None:
            try:
                self._begin(self._session)
            except BaseException:
                turn.give_back()
                raise
        return start

    async def __aexit__(self, *_: object) -> None:
        self._turn.give_back()
