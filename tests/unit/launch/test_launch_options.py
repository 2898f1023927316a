"""Launch options: what is checked, how texts are read, the environment's bound, and the arms of the ablation."""

from dataclasses import fields
from itertools import pairwise

import pytest

from stepwell.errors import BadRequest
from stepwell.launch.options import ABLATION, OPTIONS, VARIANTS_VARIABLE, LaunchOptions, Params


def test_the_table_is_the_dataclass() -> None:
    assert [option.name for option in OPTIONS] == [field.name for field in fields(LaunchOptions)]
    assert {option.name: option.default for option in OPTIONS} == LaunchOptions().as_dict()
    assert all(option.summary for option in OPTIONS)


def test_texts_are_read_as_typed_into_a_form() -> None:
    texts = {"replay": "False", "submit_every": "64", "submit_every_ms": "2", "params": "call_site"}
    options = LaunchOptions.from_dict({**texts, "readback_depth": None})
    assert options == LaunchOptions(replay=False, submit_every=64, submit_every_ms=2.0, params=Params.CALL_SITE)
    assert type(options.submit_every_ms) is float
    assert options.changes() == {"replay": False, "submit_every": 64, "submit_every_ms": 2.0, "params": "call_site"}
    assert LaunchOptions.from_dict(options.as_dict()) == options
    assert LaunchOptions.from_dict({}).changes() == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replya": True}, "no option 'replya'. It has shared_pass, "),
        ({"replay": 1}, "launch, option replay: 1; it must be true or false"),
        ({"replay": "yes"}, "replay: 'yes'"),
        ({"submit_every": 1.5}, "submit_every: 1.5; it must be a whole number"),
        ({"submit_every": True}, "submit_every: True"),
        ({"submit_every": "many"}, "'many'"),
        ({"submit_every_ms": -1}, "from 0 to 60,000"),
        ({"submit_every_ms": float("nan")}, "nan; it must be a number from 0 to 60,000"),
        ({"submit_every_ms": "inf"}, "'inf'; it must be a number"),
        ({"params": "registers"}, "one of auto, uniform_pool, call_site, immediates"),
        ({"readback_depth": 65}, "from 0 to 64"),
        ({"bind_groups": 0}, "from 1 to 1,048,576"),
        ({"variants_per_node": -1}, "from 0 to 65,536"),
    ],
)
def test_what_is_not_allowed_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        LaunchOptions.from_dict(values)
    assert words in str(caught.value)


def test_the_constructor_checks_too() -> None:
    with pytest.raises(BadRequest, match="readback_depth: -1"):
        LaunchOptions(readback_depth=-1)
    assert LaunchOptions(submit_every=-3).submit_every == -3


def test_the_environment_bounds_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIANTS_VARIABLE, raising=False)
    assert LaunchOptions().variants_bound == 4
    monkeypatch.setenv(VARIANTS_VARIABLE, "9")
    assert LaunchOptions().variants_bound == 9
    assert LaunchOptions(variants_per_node=0).variants_bound == 0
    monkeypatch.setenv(VARIANTS_VARIABLE, "many")
    with pytest.raises(BadRequest, match=r"\$STEPWELL_KERNEL_VARIANTS_PER_NODE, .*: 'many'"):
        _ = LaunchOptions().variants_bound


def test_every_arm_adds_one_switch() -> None:
    names = [name for name, _ in ABLATION]
    assert names == [
        "main", "+shared pass", "+bind-group cache", "+skip uploads", "+periodic submission", "+immediates",
        "+plan replay", "+readback K=4",
    ]  # fmt: skip
    arms = [options.as_dict() for _, options in ABLATION]
    for before, after in pairwise(arms):
        assert sum(before[name] != after[name] for name in before) == 1
    main = ABLATION[0][1]
    assert not (main.shared_pass or main.bind_group_cache or main.skip_uploads or main.replay)
    assert (main.params, main.readback_depth) == (Params.UNIFORM_POOL, 0)
    assert len({options for _, options in ABLATION}) == len(ABLATION)
