"""Which generations may be under way at a time on one launcher."""

from stepwell.errors import BadRequest


class Exclusion:
    """The generations under way on one launcher, by session: any number, or one that takes the GPU's time.

    A device reports the passes of all that it does: those of another generation would count for its tokens.
    """

    def __init__(self) -> None:
        self._gpu_time: dict[int, bool] = {}  # by session: whether it takes the GPU's time

    def enter(self, session_id: int, gpu_time: bool) -> None:
        """Note the generation of a session.  BadRequest if another one is in its way."""
        others = [timed for other, timed in self._gpu_time.items() if other != session_id]
        if any(others) or (others and gpu_time):
            raise BadRequest(
                f"gpu_time is of all that the device does, and {len(others)} other generations are under way: let them "
                "end first, or leave it out."
            )
        self._gpu_time[session_id] = gpu_time

    def leave(self, session_id: int) -> None:
        """Note that the session generates no longer, if it did."""
        self._gpu_time.pop(session_id, None)
