"""The request of a ``run`` message: what to run, by the rows of ``RUN_OPTIONS``, checked on arrival."""

import json
from types import SimpleNamespace
from typing import Any

from stepwell.decode.sampling import Sampling
from stepwell.errors import BadRequest
from stepwell.launch.options import LaunchOptions
from stepwell.memory.policies import make_policy
from stepwell.options import check_options
from stepwell.page.run_options import RUN_OPTIONS, Where
from stepwell.replay.kv_shapes import KV_WORKLOADS


class RunRequest(SimpleNamespace):
    """A value for every run option, as an attribute of its name: ``request.kv_type``."""

    def __init__(self, **given: object) -> None:
        """Take the options that are ``given``; None, or none, is the default.

        Raises BadRequest for an unknown option, a value of the wrong type or out of range, an option for other runs
        than this one (``RunOption.lacks``), two prompts, and what the policy or the launch options refuse.
        """
        asked = check_options(RUN_OPTIONS.values(), {k: v for k, v in given.items() if v is not None}, "request")
        super().__init__(**{name: option.default for name, option in RUN_OPTIONS.items()} | asked)
        self._check_kind()
        self._check_prompt()
        make_policy(self.policy, **self.policy_options)
        _ = self.launch_options

    @classmethod
    def from_json(cls, text: str) -> "RunRequest":
        """The request of a message.  Raises BadRequest as above, and without a prompt or a workload."""
        given = json.loads(text)
        if all(given.get(name) is None for name in ("workload", "prompt", "prompt_ids", "prompt_length")):
            raise BadRequest("the request has no prompt: write something.")
        return cls(**given)

    def _check_kind(self) -> None:
        """Check that there is a model or a known workload, and no option that only the other has."""
        if self.workload is not None and self.workload not in KV_WORKLOADS:
            raise BadRequest(f"there is no workload named {self.workload!r}. Choose one of {', '.join(KV_WORKLOADS)}.")
        kind, runs = (Where.MODEL, "a model") if self.workload is None else (Where.WORKLOAD, self.workload)
        for name, option in RUN_OPTIONS.items():
            strange = option.where not in (Where.ANY, kind)
            if strange and option.lacks and getattr(self, name) != option.default:
                raise BadRequest(f"{name} is for a {option.where}; {runs} has no {option.lacks}: leave it out.")
        if self.ban_eos and self.ignore_eos:
            raise BadRequest("ban_eos and ignore_eos exclude each other.")

    def _check_prompt(self) -> None:
        """Check that a model gets one prompt, and that it has ids."""
        in_ids = [name for name in ("prompt_ids", "prompt_length") if getattr(self, name) is not None]
        if len(prompts := ["prompt"] * bool(self.prompt) + in_ids) > 1:
            raise BadRequest(f"the request has {' and '.join(prompts)}: give one of them.")
        if self.prompt_ids == ():
            raise BadRequest("prompt_ids asks for no token: give at least 1.")
        if "" in self.stop:
            raise BadRequest("a stop string is empty: every answer would end before it began.")

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    @property
    def budget_bytes(self) -> int | None:
        """The pool's budget; None: no limit."""
        return None if self.budget_mib is None else self.budget_mib << 20

    @property
    def launch_options(self) -> LaunchOptions:
        """The launch options.  Raises BadRequest for a ``launch`` that holds others."""
        return LaunchOptions.from_dict(self.launch)

    def as_dict(self) -> dict[str, Any]:
        """Every option, for the record."""
        return {name: getattr(self, name) for name in RUN_OPTIONS}
