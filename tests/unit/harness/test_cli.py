"""The command line: help, what is refused before a browser starts, exit codes, and how scenarios reach the form."""

import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from harness import RunError, SetupError
from harness.cli import app as cli
from harness.cli import demo
from harness.cli import page as cli_page
from harness.page import adapter
from harness.page.browser import AdapterProfile
from harness.page.scenario import Scenario, read_prompt
from stepwell.memory.policies import POLICIES
from tests.support.run_records import make_record, with_kernels

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize("command", ["site", "serve", "run", "demo", "compare", "ablate", "attach-cost", "setup"])
def test_every_command_has_help(command: str) -> None:
    shown = runner.invoke(cli.app, [command, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def test_run_offers_what_it_must() -> None:
    shown = runner.invoke(cli.app, ["run", "--help"]).output
    scenario = (
        "model prompt prompt-file raw tokens policy kv ban-eos ignore-eos seed temperature top-k top-p context stop"
    )
    scenario += " prompt-ids prompt-length workload from policy-option budget hard launch digest gpu-time trace"
    scenario += " tune tune-ms tuning no-tuned kv-type pool-trace"
    harness = "top-logits profile flag browser headed timeout json site"
    for option in f"{scenario} {harness}".split():
        assert f"--{option}" in shown


def test_commands_get_the_options_of_the_page_as_one_argument() -> None:
    got: list[tuple[int, cli_page.PageOptions]] = []

    @cli_page.with_page_options("headed", timeout=120.0)
    def command(tokens: int = 3, *, page: cli_page.PageOptions) -> None:
        got.append((tokens, page))

    app = Typer()
    app.command()(command)
    given = ["--tokens", "5", "--profile", "hardware", "--flag", "--a", "--flag", "--b", "--site", "dist"]
    assert runner.invoke(app, []).exit_code == 0
    assert runner.invoke(app, given).exit_code == 0
    assert runner.invoke(app, ["--headed"]).exit_code == 2
    flags = ["--a", "--b"]
    chosen = cli_page.PageOptions(profile=AdapterProfile.HARDWARE, flag=flags, timeout=120.0, built=Path("dist"))
    assert got == [(3, cli_page.PageOptions(timeout=120.0)), (5, chosen)]


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["harness", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    assert isinstance(code, int)
    return code


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The words with which a command with ``arguments`` is refused before a browser starts."""
    monkeypatch.setattr(cli_page, "open_page", lambda *_, **__: pytest.fail("a browser was started"))
    monkeypatch.setattr(cli_page.console, "width", 200, raising=False)
    assert exit_code(monkeypatch, *arguments) == 2
    return capsys.readouterr().err


REFUSED = {
    "policy": (["--prompt", "x", "--policy", "nope"], "adaptive"),
    "kv": (["--prompt", "x", "--kv", "endless"], "grow"),
    "kv_type": (["--prompt", "x", "--kv-type", "q8"], "f16"),
    "kv_type of a workload": (["--workload", "kv64", "--kv-type", "f16"], "kv_type is for a model; kv64 has no"),
    "no prompt": ([], "--prompt"),
    "two prompts": (["--prompt", "x", "--prompt-file", "y"], "--prompt-file"),
    "prompt file": (["--prompt-file", "/gone.txt"], "/gone.txt"),
    "eos": (["--prompt", "x", "--ban-eos", "--ignore-eos"], "exclude"),
    "model file": (["--prompt", "x", "--model", "/gone.gguf"], "/gone.gguf"),
    "tokens": (["--prompt", "x", "--tokens", "0"], "tokens"),
    "stop": (["--prompt", "x", "--stop", ""], "stop string"),
    "option": (["--nonsense"], "nonsense"),
    "workload": (["--workload", "kv9"], "kv64, kv16"),
    "workload with a prompt": (["--workload", "kv64", "--prompt", "x"], "kv64 has no prompt"),
    "start of a model": (["--prompt", "x", "--from", "9"], "for a workload"),
    "policy option": (["--prompt", "x", "--policy-option", "colour=red"], "no option 'colour'"),
    "policy option's form": (["--prompt", "x", "--policy-option", "window"], "name=value"),
    "policy option's value": (["--prompt", "x", "--policy-option", "window=0"], "window"),
    "budget": (["--prompt", "x", "--budget", "0"], "budget"),
    "launch option": (["--prompt", "x", "--launch", "speed=9"], "no option 'speed'. It has shared_pass"),
    "launch option's form": (["--prompt", "x", "--launch", "replay"], "--launch 'replay': write it as name=value"),
    "launch option's value": (["--prompt", "x", "--launch", "params=fast"], "one of auto, uniform_pool"),
    "top p": (["--prompt", "x", "--top-p", "0"], "top_p: 0.0; it must be a number above 0 and up to 1"),
    "two prompts in ids": (["--prompt-ids", "1", "--prompt-length", "2"], "--prompt-length"),
    "ids that are none": (
        ["--prompt-ids", "1,x"],
        "prompt_ids: '1,x'; it must be a list of integers, typed",
    ),
    "no ids": (["--prompt-ids", ""], "it must be a list of integers"),
    "a prompt of nothing": (["--prompt-length", "0"], "prompt-length"),
    "ids of a workload": (["--workload", "kv64", "--prompt-ids", "1"], "kv64 has no prompt"),
    "synthetic model": (["--prompt", "x", "--model", "synthetic:gpt-5"], "there are smollm2-135m, llama-3.2-1b"),
    "synthetic weights": (["--prompt", "x", "--model", "synthetic:smollm2-135m:Q9"], "there are F32, F16"),
    "kernels of a workload": (["--workload", "kv64", "--kernel-times"], "kv64 has no decode step"),
    "markdown of nothing": (["--prompt", "x", "--markdown", "x.md"], "--kernel-times: give both"),
    "tuning of a workload": (["--workload", "kv64", "--tune"], "kv64 has no products to tune"),
    "digest of a workload": (["--workload", "kv64", "--digest"], "kv64 has no logits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_options_are_refused_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = REFUSED[name]
    assert words in refusal(monkeypatch, capsys, "run", *arguments)


@pytest.mark.parametrize(("error", "code"), [(SetupError("no browser"), 2), (RunError("lost", "DeviceLost"), 1)])
def test_errors_become_exit_codes(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(cli_page, "open_page", fail)
    assert exit_code(monkeypatch, "run", "--prompt", "x") == code
    assert str(error) in capsys.readouterr().err


def test_a_built_site_is_served_without_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manifest.json").write_text('{"files": {}, "models": []}')
    monkeypatch.setattr(cli_page, "build_site", lambda **_: pytest.fail("a site was built"))
    served: list[Path] = []

    class Server:
        def __init__(self, root: Path) -> None:
            served.append(root)
            raise SetupError("enough")

    monkeypatch.setattr(cli_page, "SiteServer", Server)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    arguments = ["run", "--prompt", "x", "--site", str(tmp_path)]
    assert exit_code(monkeypatch, *arguments, "--model", str(model)) == 2
    assert served == [tmp_path]
    assert exit_code(monkeypatch, *arguments) == 2  # it has no smollm2
    assert served == [tmp_path]


class FakePage:
    """Stands for the page: remembers the scenarios, answers with records."""

    def __init__(self, *records: dict[str, Any]) -> None:
        self.records = list(records)
        self.scenarios: list[Scenario] = []

    def run(self, scenario: Scenario, on_text: Any = str, on_phase: Any = str) -> dict[str, Any]:
        self.scenarios.append(scenario)
        on_phase("[decoding]")
        on_text("Par")
        on_text("is")
        return self.records.pop(0)

    def trace(self) -> str:
        assert self.scenarios[-1].trace
        return '{"traceEvents":[]}'

    def pool_trace(self) -> str:
        assert self.scenarios[-1].pool_trace
        return "stepwell-trace 1 {}"

    def tuning(self) -> str:
        return "what was tuned"

    def tuned(self) -> dict[str, Any]:
        row = {
            "before": "norm",
            "after": "swiglu",
            "format": "u4",
            "k": 2048,
            "n": 16384,
            "spread": {"wide": 8, "per": 2},
        }
        choices = [row | {"us": 27.54, "default_us": 31.0}]
        outcome = {"products": 5, "measured": 4, "faster": 1, "complete": False, "choices": choices}
        return {"notices": ["a [kernel] was refused"], "outcome": outcome if self.scenarios[-1].tune else None}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def open_page(*_: object, tuning: Path | None = None) -> Iterator[tuple["FakePage", Any]]:
            self.remembered = cli_page.read_tuning(tuning)
            nothing = SimpleNamespace(start=lambda: None, stop=lambda: None, update=lambda text: None)
            yield self, nothing

        monkeypatch.setattr(cli_page, "open_page", open_page)


def test_what_was_tuned_is_kept_in_a_file_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(make_record([30]), make_record([30]), make_record([30]))
    page.install(monkeypatch)
    file = tmp_path / "cache" / "tuning.json"
    run = ["run", "--prompt", "Hi", "--tuning", str(file)]
    done = runner.invoke(cli.app, [*run, "--tune", "--tune-ms", "5000"])
    assert done.exit_code == 0, done.output
    assert "a [kernel] was refused" in done.stderr
    assert "tuning: 4 of 5 products measured; for 1 another way" in done.stderr
    assert "norm + swiglu, u4 [16,384 x 2,048]: 31.0 -> 27.5 us with wide 8, per 2" in done.stderr
    assert page.remembered is None
    assert file.read_text() == "what was tuned"
    assert page.scenarios[0].fields["tune_ms"] == "5000"
    assert page.scenarios[0].switches == ("tune",)
    file.write_bytes(b"\xffkept")
    runner.invoke(cli.app, run)
    assert page.remembered == "\N{REPLACEMENT CHARACTER}kept"
    assert file.read_bytes() == b"\xffkept"
    assert page.scenarios[1].switches == ()
    assert "tune_ms" not in page.scenarios[1].fields
    runner.invoke(cli.app, [*run, "--no-tuned"])
    assert page.scenarios[2].fields["launch-tuned"] == "false"


def test_run_writes_the_answer_and_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(make_record([30, 10]))
    page.install(monkeypatch)
    out = tmp_path / "o.json"
    arguments = [
        "run",
        "--prompt",
        "Hi",
        "--kv",
        "grow",
        "--kv-type",
        "f16",
        "--policy",
        "bucket",
        "--ban-eos",
        "--stop",
        "a",
        "--stop",
        "b",
    ]
    done = runner.invoke(cli.app, [*arguments, "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "Paris" in done.stdout
    assert page.scenarios == [Scenario("Hi", kv="grow", kv_type="f16", policy="bucket", ban_eos=True, stop=("a", "b"))]
    assert page.scenarios[0].fields["kv_type"] == "f16"
    assert out.is_file()


def test_launch_options_and_measures_reach_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(make_record([30, 10]), make_record([30, 10]))
    page.install(monkeypatch)
    out = tmp_path / "deep" / "trace.json"
    options = ["--launch", "replay=false", "--launch", "submit_every = 64", "--digest", "--gpu-time"]
    done = runner.invoke(cli.app, ["run", "--prompt", "Hi", *options, "--trace", str(out)])
    assert done.exit_code == 0, done.output
    asked = page.scenarios[0]
    assert asked == Scenario(
        "Hi", launch={"replay": "false", "submit_every": "64"}, digest=True, gpu_time=True, trace=True
    )
    assert {name: value for name, value in asked.fields.items() if name.startswith("launch-")} == {
        "launch-replay": "false",
        "launch-submit_every": "64",
    }
    assert set(asked.switches) == {"digest", "gpu_time", "trace"}
    assert out.read_text() == '{"traceEvents":[]}'
    assert runner.invoke(cli.app, ["run", "--prompt", "Hi"]).exit_code == 0  # and no trace is asked for
    assert page.scenarios[1].switches == ()


@pytest.mark.parametrize("name", ["a.trace", "a.trace.gz"])
def test_the_trace_of_the_pool_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(make_record([30, 10]))
    page.install(monkeypatch)
    out = tmp_path / "deep" / name
    done = runner.invoke(cli.app, ["run", "--prompt", "Hi", "--pool-trace", str(out)])
    assert done.exit_code == 0, done.output
    assert page.scenarios[0].switches == ("pool_trace",)
    assert f"what-if {out}" in done.output.replace("\n", "")
    data = out.read_bytes()
    assert (gzip.decompress(data) if name.endswith(".gz") else data) == b"stepwell-trace 1 {}"


def test_the_table_of_kernels_is_shown_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(with_kernels(make_record([30, 10])))
    page.install(monkeypatch)
    out = tmp_path / "deep" / "kernels.md"
    done = runner.invoke(cli.app, ["run", "--prompt", "Hi", "--kernel-times", "--markdown", str(out)])
    assert done.exit_code == 0, done.output
    assert page.scenarios == [Scenario("Hi", kernel_times=True)]
    assert page.scenarios[0].switches == ("kernel_times",)
    assert "GPU time per kernel" in done.output and "58% of the 4,150 GB/s" in done.output
    assert "| gate_up | matvec | 3072x16384 u4 | 32 |" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(("options", "fine"), [((), False), (("--gpu-time",), True), (("--kernel-times",), True)])
def test_a_browser_whose_gpu_is_timed_has_a_fine_clock(
    options: tuple[str, ...], fine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").write_text('{"files": {}, "models": []}')
    given: list[list[str]] = []

    def opened(profile: AdapterProfile, flags: list[str], **_: object) -> Any:
        given.append(flags)
        raise SetupError("enough")

    monkeypatch.setattr(cli_page, "open_browser", opened)
    arguments = ["run", "--prompt", "x", "--site", str(tmp_path), "--model", "synthetic:smollm2-135m", "--flag=--mine"]
    assert exit_code(monkeypatch, *arguments, *options) == 2
    assert given == [["--mine", *(["--enable-webgpu-developer-features"] if fine else [])]]


def test_a_cancelled_run_is_written_and_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePage({**make_record([30, 10]), "finish_reason": "cancelled"}).install(monkeypatch)
    out = tmp_path / "o.json"
    assert exit_code(monkeypatch, "run", "--prompt", "Hi", "--json", str(out)) == 1
    assert out.is_file()


def test_demo_compares_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [make_record([30, 10, 10], kv=s.kv, policy=s.policy) for s in demo.scenarios()]
    FakePage(*good).install(monkeypatch)
    done = runner.invoke(cli.app, ["demo", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "same 3 tokens" in done.output
    expected = {"static-adaptive.json", "grow-adaptive.json", "grow-bucket.json", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    good[1]["token_ids"][1] = 5
    FakePage(*good).install(monkeypatch)
    assert exit_code(monkeypatch, "demo", "--out", str(tmp_path)) == 1


def test_a_cancelled_demo_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePage({**make_record([30, 10]), "finish_reason": "cancelled"}).install(monkeypatch)
    assert exit_code(monkeypatch, "demo", "--out", str(tmp_path)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"static-adaptive.json", "report.html"}


def test_scenarios_reach_the_form(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    scenario = Scenario("p", model=str(model), context=99, stop=("\n\n", "a|b\\"), temperature=0.5)
    assert scenario.radios == {"model": "file", "kv": "static", "policy": "adaptive"}
    assert scenario.file == model
    assert scenario.fields["context"] == "99"
    assert scenario.fields["stop"] == r"\n\n|a\|b\\"
    assert Scenario("p").fields["context"] == ""
    assert Scenario("p").radios["model"] == "smollm2"
    for policy in POLICIES:
        assert Scenario("p", policy=policy).policy == policy


def test_what_the_form_would_refuse_is_no_scenario() -> None:
    for options, words in (
        ({"tokens": 0}, "tokens: 0; it must be a whole number, 1 or more"),
        ({"kv": "x"}, "kv: 'x'"),
    ):
        with pytest.raises(SetupError, match=words):
            Scenario("p", **options)


def test_a_workload_reaches_the_form() -> None:
    scenario = Scenario(workload="kv16", start=99, tokens=5, kv="grow", policy_options={"window": "4"}, budget_mib=1500)
    assert scenario.radios == {"model": "kv16", "kv": "grow", "policy": "adaptive"}
    assert scenario.fields == {"tokens": "5", "start": "99", "option-window": "4", "budget": "1500"}
    assert Scenario(workload="kv16").fields == {"tokens": "64", "start": "", "budget": ""}
    assert Scenario("p", policy_options={"window": "4"}).fields["option-window"] == "4"
    assert set(Scenario("p", raw=True, hard_budget=True).switches) == {"raw", "hard"}
    assert Scenario(workload="kv16", raw=True).switches == ()


def test_run_takes_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record([30, 10])
    record["scenario"] |= {"workload": "kv64", "start": 99}
    page = FakePage(record)
    page.install(monkeypatch)
    options = ["--policy-option", "window=4", "--budget", "9", "--hard"]
    done = runner.invoke(cli.app, ["run", "--workload", "kv64", "--from", "99", "--kv", "grow", *options])
    assert done.exit_code == 0, done.output
    assert "token 0 is the prefill of 99 positions" in done.output
    assert page.scenarios == [
        Scenario(workload="kv64", start=99, kv="grow", policy_options={"window": "4"}, budget_mib=9, hard_budget=True)
    ]


def test_a_synthetic_model_reaches_the_form() -> None:
    scenario = Scenario(model="synthetic:llama-3.2-1b:Q8_0", prompt_ids=(1, 2, 30))
    assert scenario.radios["model"] == "synthetic:llama-3.2-1b"
    fields = ("format", "prompt", "prompt_ids", "prompt_length")
    assert [scenario.fields[name] for name in fields] == ["Q8_0", "", "1,2,30", ""]
    assert (scenario.file, scenario.is_bundled, scenario.is_synthetic) == (None, False, True)
    plain = Scenario(model="synthetic:llama-3.2-1b", prompt_length=2048)
    assert [plain.fields[name] for name in fields] == ["Q4_0", "", "", "2048"]
    assert "format" not in Scenario("p").fields
    assert Scenario("p").is_bundled
    assert not Scenario(workload="kv64").is_bundled


def test_run_takes_prompts_in_ids_and_shapes_of_kv_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(*(make_record([30, 10]) for _ in range(3)))
    page.install(monkeypatch)
    arguments = (
        ["--prompt-ids", "1, 2,3"],
        ["--prompt-length", "9", "--model", "synthetic:smollm2-135m"],
        ["--model", "synthetic:qwen3.5-4b-kv", "--from", "7"],
    )
    for options in arguments:
        done = runner.invoke(cli.app, ["run", *options])
        assert done.exit_code == 0, done.output
    ids, length, kv = page.scenarios
    assert ids == Scenario(prompt_ids=(1, 2, 3))
    assert length == Scenario(model="synthetic:smollm2-135m", prompt_length=9)
    assert (kv.workload, kv.start) == ("kv16", 7)
    assert kv.radios["model"] == "kv16"


def test_a_prompt_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("  é\n", encoding="utf-8")
    assert read_prompt(None, path) == "  é\n"
    path.write_bytes(b"\xff")
    with pytest.raises(SetupError, match=r"p\.txt"):
        read_prompt(None, path)


class Probe:
    """A page whose adapter probe gives one answer after the other."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)

    def evaluate(self, _: str) -> dict[str, Any]:
        return self.answers.pop(0)


def found(vendor: str = "google", architecture: str = "swiftshader", wrong: int = 0) -> dict[str, Any]:
    values = [(i * 2654435761 % 2**32 * 3 + i) % 2**32 for i in range(256)]
    values[:wrong] = [value ^ 1 for value in values[:wrong]]
    return {"vendor": vendor, "architecture": architecture, "description": "", "is_fallback": False, "values": values}


NONE_YET = {"problem": "requestAdapter() found no adapter", "retry": True}


def assert_adapter(profile: AdapterProfile, *answers: dict[str, Any], patience_s: float = 20) -> adapter.Adapter:
    page: Any = Probe(*answers)
    return adapter.assert_adapter(page, profile, patience_s=patience_s, sleep=lambda _: None)


def test_an_adapter_that_is_late_is_waited_for() -> None:
    assert assert_adapter(AdapterProfile.SOFTWARE, NONE_YET, NONE_YET, found()).is_software
    hardware = assert_adapter(AdapterProfile.HARDWARE, NONE_YET, found(), found("nvidia", "hopper"))
    assert not hardware.is_software
    assert str(hardware) == "nvidia hopper (hardware)"


def test_the_hardware_profile_refuses_a_software_adapter() -> None:
    with pytest.raises(SetupError, match=r"hardware profile got google swiftshader.*VK_DRIVER_FILES"):
        assert_adapter(AdapterProfile.HARDWARE, found(), patience_s=0)


def test_an_adapter_that_computes_wrongly_is_refused() -> None:
    with pytest.raises(SetupError, match="3 of 256 values"):
        assert_adapter(AdapterProfile.HARDWARE, found("nvidia", "hopper", wrong=3))


def test_no_webgpu_is_not_waited_for() -> None:
    with pytest.raises(SetupError, match=r"no navigator\.gpu"):
        assert_adapter(AdapterProfile.SOFTWARE, {"problem": "this browser has no navigator.gpu"})
