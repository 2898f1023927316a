"""What the autotuner found on an adapter, as text that a host keeps, and as the table that goes before the rules.

The text is JSON: a version and, for each adapter, its choices.  The version has two parts: that of this format, and a
hash of the kernels' templates, so that choices end with the kernels they were measured with.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from math import isfinite
from typing import Any, get_args

from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.tuning import ProductKey, Tiling
from stepwell.launch.selection import tuning_for
from stepwell.tuning.candidates import fits

FORMAT = 1
"""The version of the text."""
_KERNELS = ("matvec", "matmul_quad")
_PARTS = re.compile(r"{%\s*(?:import|include)\s*\"([\w.]+)\"")


@dataclass(frozen=True, slots=True)
class Choice:
    """A measured tiling, and microseconds per launch with it (``us``) and with the rule's (``default_us``)."""

    tiling: Tiling
    us: float
    default_us: float

    def row(self) -> dict[str, Any]:
        """The choice as plain data; the text and the page know its tiling as ``spread``."""
        return {"spread": asdict(self.tiling), "us": self.us, "default_us": self.default_us}


def template(name: str) -> str:
    """The text of the kernel template ``name``, a file name."""
    return files("stepwell.kernels").joinpath("wgsl", name).read_text(encoding="utf-8")


def kernels_version() -> str:
    """A hash of the templates of the kernels that are tuned, with all that these include: 16 hex digits."""
    texts: dict[str, str] = {}
    wanted = [f"{kernel}.wgsl" for kernel in _KERNELS]
    while wanted:
        name = wanted.pop()
        if name not in texts:
            texts[name] = template(name)
            wanted += _PARTS.findall(texts[name])
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def adapter_id(info: DeviceInfo) -> dict[str, object]:
    """The facts of ``info`` that tell adapters apart, as far as their speed goes."""
    names = ("vendor", "architecture", "description", "subgroup_size", "subgroup_max_size")
    return {name: getattr(info, name) for name in names}


class Remembered:
    """The choices of the adapter ``info``.

    ``tilings`` is the table in which a ``Tuning`` looks them up: it changes as they do.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self.choices: dict[ProductKey, Choice] = {}
        self.tilings: dict[ProductKey, Tiling] = {}
        self._info = info
        self._others: list[dict[str, Any]] = []  # entries of other adapters, as they were

    def read(self, text: str) -> list[str]:
        """Take the choices in ``text``, which the host kept; return a sentence on what cannot be used, if any."""
        try:
            document = json.loads(text)
            version, entries = (document["format"], document["kernels"]), document["adapters"]
            found = [(dict(entry["adapter"]), list(entry["choices"])) for entry in entries]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return [f"The remembered tuning cannot be read ({type(error).__name__}: {error}) and is ignored."]
        if version != (FORMAT, kernels_version()):
            return ["The remembered tuning is of another version of the kernels and is ignored: tune again."]
        own = adapter_id(self._info)
        self._others = [entry for entry, (adapter, _) in zip(entries, found, strict=True) if adapter != own]
        rows = [row for adapter, choices in found if adapter == own for row in choices]
        usable = {key: choice for key, choice in map(self._choice, rows) if key is not None and choice is not None}
        self.learn(usable)
        lost = len(rows) - len(usable)
        return [f"{lost} of {len(rows)} remembered choices cannot be used here and are ignored."] if lost else []

    def learn(self, measured: Mapping[ProductKey, Choice | None]) -> None:
        """Take the new choices in ``measured``; None forgets one: the rule's is the best."""
        for key, choice in measured.items():
            if choice is None:
                self.choices.pop(key, None)
                self.tilings.pop(key, None)
            else:
                self.choices[key], self.tilings[key] = choice, choice.tiling

    def text(self) -> str:
        """The text for the host to keep, with what it kept for other adapters."""
        own = {"adapter": adapter_id(self._info), "choices": self.rows(self.choices)}
        document = {"format": FORMAT, "kernels": kernels_version(), "adapters": [*self._others, own]}
        return json.dumps(document, indent=1)

    def rows(self, keys: Iterable[ProductKey]) -> list[dict[str, Any]]:
        """The choices for those of ``keys`` that have one, as plain data."""
        return [{**key._asdict(), **self.choices[key].row()} for key in keys if key in self.choices]

    def _choice(self, row: Mapping[str, Any]) -> tuple[ProductKey | None, Choice | None]:
        """The key and choice in a row of the document; None, None for a choice that this device cannot run."""
        try:
            key = ProductKey(*(_typed(row[name], kind) for name, kind in ProductKey.__annotations__.items()))
            tiling = Tiling(**{field.name: _typed(row["spread"][field.name], field.type) for field in fields(Tiling)})
            times = [_time(row[name]) for name in ("us", "default_us")]
        except (TypeError, KeyError, ValueError):
            return None, None
        tuning = replace(tuning_for(self._info), subgroup=key.subgroup if key.kernel == "matvec" else 0)
        if key.kernel not in _KERNELS or not fits(key, tiling, tuning):
            return None, None
        return key, Choice(tiling, *times)


def _typed(value: Any, kind: Any) -> Any:
    """``value``, if it is of type ``kind``, or one of a Literal's; else a TypeError."""
    if (value not in allowed) if (allowed := get_args(kind)) else (type(value) is not kind):
        raise TypeError(value)
    return value


def _time(value: Any) -> float:
    """``value``, if it is a time in microseconds; else a TypeError."""
    if type(value) is not float or not isfinite(value) or value <= 0:
        raise TypeError(value)
    return value
