"""What a run is asked to do: the request of the page, and the model, as its form takes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import SetupError
from stepwell.errors import BadRequest
from stepwell.options import OptionKind
from stepwell.page.request import RunRequest
from stepwell.page.run_options import RADIO, RUN_OPTIONS, RunOption, Where

if TYPE_CHECKING:
    from stepwell.models.synthetic import Synthetic


class Scenario(RunRequest):
    """One run: the options of ``RUN_OPTIONS``, and ``model``: a bundled model's id, a path, or
    ``synthetic:SHAPE[:FORMAT]``.  A ``workload`` takes the place of the model and its prompt.

    ``policy_options`` and ``launch`` are texts, as typed into the page's form.
    """

    def __init__(self, prompt: str = "", model: str = "smollm2", **options: Any) -> None:
        """Raises SetupError for a model that is not there and for everything that RunRequest refuses."""
        try:
            super().__init__(prompt=prompt, **options)
        except BadRequest as error:
            raise SetupError(str(error)) from error
        self.model = model
        if self.file is not None and not self.file.is_file():
            raise SetupError(f"{model}: no such file. Give the id of a bundled model (smollm2) or a path to a .gguf.")
        if self.is_synthetic:
            _synthetic(model)

    def but(self, **options: Any) -> "Scenario":
        """The same with other ``options``."""
        return Scenario(**{"model": self.model, **self.as_dict(), **options})

    @property
    def file(self) -> Path | None:
        """The model's path, when ``model`` is one rather than an id."""
        if self.workload is not None:
            return None
        is_path = self.model.endswith(".gguf") or "/" in self.model or "\\" in self.model
        return Path(self.model).expanduser().resolve() if is_path else None

    @property
    def is_synthetic(self) -> bool:
        """Whether ``model`` names random weights, which the page makes."""
        return self.workload is None and self.model.startswith("synthetic:")

    @property
    def is_bundled(self) -> bool:
        """Whether the model is to be found in the site."""
        return self.workload is None and self.file is None and not self.is_synthetic

    @property
    def radios(self) -> dict[str, str]:
        """The choices, which are made first."""
        model = self.workload or ("file" if self.file else self.model)
        if self.is_synthetic:
            model = _synthetic(model).choice
        return {"model": model} | {option.field: self._text(option) for option in self._asked if option.form == RADIO}

    @property
    def fields(self) -> dict[str, str]:
        """The text and number controls and the lists, as a person would type them; empty is the page's default."""
        values: dict[str, str] = {}
        for option in self._asked:
            value = getattr(self, option.name)
            if option.kind is OptionKind.VALUES:
                values |= {option.field + name: str(text) for name, text in value.items()}
            elif option.on and value:
                values[option.field] = option.on
            elif option.form in ("", RADIO) or option.kind is OptionKind.BOOL:
                continue
            elif not option.needs or getattr(self, option.needs):
                values[option.field] = self._text(option)
        return values | ({"format": _synthetic(self.model).kind} if self.is_synthetic else {})

    @property
    def switches(self) -> tuple[str, ...]:
        """The checkboxes that are on; all others are off."""
        boxes = [option for option in self._asked if option.kind is OptionKind.BOOL and not option.on]
        return tuple(option.field for option in boxes if getattr(self, option.name))

    @property
    def times_gpu(self) -> bool:
        """Whether the GPU's clock is read: then it should be a fine one."""
        return bool(self.gpu_time or self.kernel_times)

    @property
    def _asked(self) -> list[RunOption]:
        """The options that the form has for this kind of run."""
        kind = Where.MODEL if self.workload is None else Where.WORKLOAD
        return [option for option in RUN_OPTIONS.values() if option.where in (Where.ANY, kind)]

    def _text(self, option: RunOption) -> str:
        return option.write(getattr(self, option.name))


def kv_workload(model: str) -> str | None:
    """The workload that is all there is of a model, by the model's name; None: a model."""
    from stepwell.models.synthetic import KV_ONLY

    return KV_ONLY.get(model)


def _synthetic(name: str) -> "Synthetic":
    from stepwell.models.synthetic import Synthetic

    try:
        return Synthetic.named(name)
    except BadRequest as error:
        raise SetupError(str(error)) from error


def read_options(texts: Sequence[str], option: str = "--policy-option") -> dict[str, str]:
    """The ``name=value`` texts of an ``option`` of the command line."""
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise SetupError(f"{option} {text!r}: write it as name=value.")
        options[name.strip()] = value.strip()
    return options


def read_prompt(prompt: str | None, file: Path | None, *in_ids: object) -> str:
    """The one prompt of ``--prompt`` and ``--prompt-file``; empty if it is one of ``in_ids`` instead.

    ``in_ids`` are the values of ``--prompt-ids`` and ``--prompt-length``, None where not given.
    """
    if sum(given is not None for given in (prompt, file, *in_ids)) != 1:
        raise SetupError(
            "give the prompt either as --prompt TEXT or as --prompt-file FILE, --prompt-ids 1,2,3 or --prompt-length N."
        )
    if file is None:
        return prompt or ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file}: {error}") from error
