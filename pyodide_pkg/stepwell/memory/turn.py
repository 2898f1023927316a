"""Steps take turns on a pool: from its first acquire to its submit, one of them has it to itself."""

from asyncio import Lock, Task, current_task
from collections.abc import Callable
from typing import Any

from stepwell.errors import PoolError
from stepwell.gpu.clock import now_ms


class Turn:
    """Whose step is under way: that of the task that took the turn last and has not given it back."""

    __slots__ = ("_lock", "_task")

    def __init__(self) -> None:
        self._lock = Lock()
        self._task: Task[Any] | None = None

    @property
    def is_others(self) -> bool:
        """Whether a step of another task is under way."""
        return self._task is not None and self._task is not current_task()

    async def take(self) -> None:
        """Wait for the turn.  PoolError if the task has it already: it would wait for itself."""
        task = current_task()
        if self._task is task:
            raise PoolError("a step within a step: submit the first one before the pool is asked for another.")
        await self._lock.acquire()
        self._task = task

    def give_back(self) -> None:
        """Let the next one have it."""
        self._task = None
        self._lock.release()


class PoolStep:
    """What ``BufferPool.step`` returns: ``async with`` takes the turn, calls ``begin`` and gives the turn back.

    ``as`` is given the time in ms (``now_ms``) at which the turn came, before ``begin``.
    """

    __slots__ = ("_begin", "_turn")

    def __init__(self, turn: Turn, begin: Callable[[], None]) -> None:
        self._turn, self._begin = turn, begin

    async def __aenter__(self) -> float:
        await self._turn.take()
        start = now_ms()
        try:
            self._begin()
        except BaseException:
            self._turn.give_back()
            raise
        return start

    async def __aexit__(self, *_: object) -> None:
        self._turn.give_back()
