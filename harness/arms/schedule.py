"""Arms and the order in which they run: what every comparison of the harness is made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

from harness import SetupError

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class Arm(Generic[Settings]):
    """One of the things that are compared: its ``name``, and the ``settings`` that it alone runs with."""

    name: str
    settings: Settings


class Turn(NamedTuple, Generic[Settings]):
    """A run that is due: its ``number`` and ``round`` (from 0), its ``start``, and its ``arm``."""

    number: int
    round: int
    start: int
    arm: Arm[Settings]


@dataclass(frozen=True, kw_only=True)
class Schedule(Generic[Settings]):
    """A plan of runs: each of ``arms`` at each of ``starts``, ``rounds`` times, ``steps`` steps each.

    The first ``skip`` steps of a run are warm-up and do not count.  Every round begins with another arm, so that drift
    of the machine falls on all arms alike.  SetupError where there is no arm, where two have one name (their figures
    would be mixed), or where no step counts.
    """

    arms: tuple[Arm[Settings], ...]
    rounds: int
    steps: int
    skip: int = 0
    starts: tuple[int, ...] = (0,)

    UNIT: ClassVar[str] = "steps"

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if not names:
            raise SetupError("there is no arm to run: name one or more.")
        if len(set(names)) < len(names):
            raise SetupError(f"an arm is named twice: {', '.join(names)}.")
        self._refuse_short()

    def _refuse_short(self) -> None:
        if self.steps <= self.skip:
            raise SetupError(
                f"{self.steps} {self.UNIT}, of which {self.skip} are warm-up: ask for {self.skip + 1} or more."
            )

    def __len__(self) -> int:
        return self.rounds * len(self.starts) * len(self.arms)

    def __iter__(self) -> Iterator[Turn[Settings]]:
        """Yield every turn in the order of running."""
        number = 0
        for round_ in range(self.rounds):
            first = round_ % len(self.arms)
            for start in self.starts:
                for arm in (*self.arms[first:], *self.arms[:first]):
                    yield Turn(number, round_, start, arm)
                    number += 1

    def progress(self, turn: Turn[Settings]) -> str:
        """The words for ``turn`` while it runs."""
        return f"{turn.number + 1} of {len(self)}: {turn.arm.name} from {turn.start:,}, round {turn.round + 1}"


def read_arms(text: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Split ``text``, the ``KIND:OPTION=VALUE;…,…`` of ``--arms``, into name, kind and options of each arm."""
    for name in filter(None, map(str.strip, text.split(","))):
        kind, _, rest = name.partition(":")
        options = {}
        for part in filter(None, map(str.strip, rest.split(";"))):
            option, _, value = part.partition("=")
            if not (option.strip() and value.strip()):
                raise SetupError(f"arm {name!r}: {part!r} is not name=value.")
            options[option.strip()] = value.strip()
        yield name, kind, options
