"""Synthetic models without a browser: published shapes, what is refused before anything is made, runs by ids."""

import asyncio
import json
import math
from typing import Any

import pytest

from harness.page import record as records
from stepwell.errors import BadRequest, MissingCapability, OutOfMemory, Unsupported
from stepwell.gpu.device import BufferUsage, Device
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import DEFAULT_LIMITS
from stepwell.kernels.layouts import LAYOUT_OF_FORMAT
from stepwell.models import synthetic
from stepwell.models.config import DecoderConfig, expected_tensors
from stepwell.models.synthetic import KV_ONLY, SHAPES, Shape, Synthetic
from stepwell.page.frontend import Frontend
from stepwell.page.request import RunRequest
from stepwell.weights.synthetic import plan_weights

HOST = '{"browser": "CPython", "cross_origin_isolated": true, "timer_resolution_us": 1, "pyodide": "none"}'
VOCAB = 320
TINY = Shape(
    "Tiny",
    "llama",
    DecoderConfig(
        hidden_size=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ffn_size=96,
        vocab_size=VOCAB,
        context_length=256,
        rope_theta=10_000.0,
        rope_dim=16,
        rms_eps=1e-5,
        tied_embeddings=True,
    ),
)
NOTHING = dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)


class Page:
    """A frontend on a FakeDevice, and what it says."""

    def __init__(self, device: FakeDevice | None = None) -> None:
        self.device = device or FakeDevice(log_limit=0)
        self.messages: list[dict[str, Any]] = []

        async def opener() -> Device:
            return self.device

        self.frontend = Frontend(lambda text: self.messages.append(json.loads(text)), HOST, lambda _: list, opener)

    def play(self, model: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Load a model and run some requests; their records."""

        async def play() -> None:
            if not self.messages:
                await self.frontend.open()
            await self.frontend.load_synthetic(json.dumps({"kind": "synthetic", "name": model}))
            for request in requests:
                await self.frontend.run(json.dumps(request))

        asyncio.run(play())
        return [records.check(message["record"]) for message in self.of("done")]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]


# ---- the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("phi-4-mini", 3_836_021_760),
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(shape: str, parameters: int) -> None:
    """Those of the checkpoints' safetensors metadata."""
    assert sum(math.prod(tensor) for tensor in expected_tensors(SHAPES[shape].config).values()) == parameters


def test_a_plan_counts_every_weight_once() -> None:
    model = Synthetic("llama-3.2-1b")
    plan = model.weight_plan
    weights = sum(math.prod(tensor) for tensor in expected_tensors(model.config).values() if len(tensor) == 2)
    assert sum(n * k for _, n, k in plan.matrices) == weights
    assert plan.nbytes == sum(plan.buffers.values()) == weights * 5 // 8 + 4 * 33 * 2048  # u4: 4 bits, an f32 per 32
    assert plan.nbytes_in(LAYOUT_OF_FORMAT["Q6_K"]) == Synthetic("llama-3.2-1b", "Q6_K").weight_plan.nbytes
    assert [names for names, *_ in plan.matrices if "output" in names] == [("token_embd", "output")]
    assert model.tensor_types == {"Q4_0": 1 + 16 * 7, "F32": 33}


def test_names() -> None:
    assert Synthetic.named("synthetic:tiny") == Synthetic("tiny", "Q4_0")
    assert Synthetic.named("synthetic:tiny:Q4_1").name == "synthetic:tiny:Q4_1"
    assert Synthetic.named("synthetic:tiny:Q4_0").name == "synthetic:tiny"
    assert Synthetic.named("synthetic:tiny:Q8_0").choice == "synthetic:tiny"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("synthetic:gpt-5", "no synthetic model 'gpt-5'; there are smollm2-135m, llama-3.2-1b, llama-3.2-3b"),
        ("synthetic:tiny:Q9", "weights of type 'Q9'; there are F32, F16"),
        ("synthetic:tiny:", "weights of type ''"),
        ("smollm2", "not the name of a synthetic model"),
        *((name, f"run the workload {workload}") for name, workload in KV_ONLY.items()),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Synthetic.named(name)


def test_what_the_device_cannot_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(MissingCapability) as caught:
        Synthetic("llama-3.2-3b").check(DEFAULT_LIMITS)
    text = str(caught.value)
    assert "maxStorageBufferBindingSize: 197,001,216 needed, the adapter has 134,217,728." in text
    assert "synthetic:llama-3.2-3b has token_embd in one buffer" in text
    assert "synthetic:smollm2-135m, synthetic:llama-3.2-1b" in text
    fitting = "would fit: synthetic:smollm2-135m:Q8_0, synthetic:smollm2-135m, synth"
    with pytest.raises(MissingCapability, match=fitting):
        Synthetic("llama-3.2-1b", "Q8_0").check(DEFAULT_LIMITS)
    small = {"maxStorageBufferBindingSize": 1 << 30, "maxBufferSize": 1 << 10}
    with pytest.raises(MissingCapability, match=r"maxBufferSize: 10,240 needed.*would fit: none"):
        Synthetic("tiny").check(small)
    Synthetic("llama-3.2-3b").check({"maxStorageBufferBindingSize": 1 << 30, "maxBufferSize": 1 << 30})


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(Unsupported, match="w has rows of 48 weights; multiples of 32"):
        plan_weights("Q4_0", {"w.weight": (48, 8)}, {"w": ("w.weight",)}, {})
    with pytest.raises(Unsupported, match="weights of type 'Q2_K'"):
        plan_weights("Q2_K", {}, {}, {})


# ---- through the frontend ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYOUT_OF_FORMAT)
def test_every_format_is_made_and_described(kind: str) -> None:
    page = Page()
    assert page.play(f"synthetic:tiny:{kind}") == []
    assert page.of("error") == []
    (model,) = (message["model"] for message in page.of("model"))
    plan = Synthetic("tiny", kind).weight_plan
    assert model["bytes"] == plan.nbytes
    assert (model["sha256"], model["architecture"], model["layers"]) == (None, "llama", 2)
    assert sum(model["tensor_types"].values()) == len(expected_tensors(TINY.config))
    assert model["has_chat_template"] is False
    progress = [message for message in page.of("progress") if message["phase"] == "weights"]
    assert [(m["done"], m["total"], m["unit"]) for m in progress][-1] == (plan.nbytes, plan.nbytes, "bytes")
    page.frontend.close()
    assert page.device.table_sizes() == NOTHING


def test_the_page_is_told_what_there_is() -> None:
    page = Page()
    asyncio.run(page.frontend.open())
    (environment,) = page.of("environment")
    assert [entry["name"] for entry in environment["synthetic"]] == [f"synthetic:{shape}" for shape in SHAPES]
    for entry in environment["synthetic"]:
        assert next(iter(entry["sizes"])) == "Q4_0"
        assert set(entry["sizes"]) == set(LAYOUT_OF_FORMAT)
        assert entry["sizes"]["F32"] > 6 * entry["sizes"]["Q4_0"]


def test_progress_comes_by_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.weights.synthetic.BATCH_BYTES", 1)
    monkeypatch.setattr("stepwell.page.outbox._PROGRESS_MS", 0)
    page = Page()
    page.play("synthetic:tiny")
    done = [message["done"] for message in page.of("progress")]
    assert done == sorted(done)
    assert len(done) == len(set(done)) == 9  # matrices


def test_a_refused_model_makes_nothing_and_leaves_the_present_one() -> None:
    page = Page()
    page.play("synthetic:tiny")
    before = page.device.table_sizes()
    page.play("synthetic:llama-3.2-3b")
    (error,) = page.of("error")
    assert (error["code"], error["phase"]) == ("MissingCapability", "weights")
    assert page.device.table_sizes() == before
    assert len(page.play("synthetic:gpt-5", {"prompt": "Hi", "tokens": 2})) == 1
    assert page.of("done")[0]["record"]["scenario"]["model"] == "synthetic:tiny"


class Failing(FakeDevice):
    """Has no memory for the buffer with this number."""

    def __init__(self, number: int) -> None:
        super().__init__(log_limit=0)
        self.left = number

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        if self.left == 0:
            self.fail_next_create = OutOfMemory
        self.left -= 1
        return super().create_buffer(size, usage, label)


@pytest.mark.parametrize("number", [0, 1, 7, 20])
def test_a_model_that_does_not_fit_leaves_nothing_behind(number: int) -> None:
    page = Page(Failing(number))
    page.play("synthetic:tiny", {"prompt": "Hi"})
    assert [error["code"] for error in page.of("error")] == ["OutOfMemory", "BadRequest"]
    assert page.device.table_sizes()["buffers"] == 0
    page.frontend.close()
    assert page.device.table_sizes() == NOTHING


def test_a_run_gives_a_record_whose_text_is_its_ids() -> None:
    page = Page()
    (record,) = page.play("synthetic:tiny:Q4_1", {"prompt": "Hé", "tokens": 3, "ban_eos": True})
    assert page.of("error") == []
    assert record["scenario"]["model"] == "synthetic:tiny:Q4_1"
    assert record["scenario"]["sha256"] is None
    assert record["prompt_ids"] == list("Hé".encode())
    assert record["text"] == "".join(f"<{token_id}>" for token_id in record["token_ids"])
    assert record["finish_reason"] == "length"


def test_ids_as_they_are_and_ids_by_number() -> None:
    page = Page()
    by_id = {"prompt_ids": [1, 319, 0], "tokens": 2}
    by_number = {"prompt_length": 40, "tokens": 2}
    ids, first, again, other = page.play("synthetic:tiny", by_id, by_number, by_number, {**by_number, "seed": 1})
    assert page.of("error") == []
    assert ids["prompt_ids"] == ids["scenario"]["prompt_ids"] == [1, 319, 0]
    assert first["prompt_ids"] == again["prompt_ids"] != other["prompt_ids"]
    assert first["scenario"]["prompt_length"] == len(first["prompt_ids"]) == 40
    assert first["scenario"]["context"] == 42
    assert len(set(first["prompt_ids"])) > 20
    assert all(0 <= token_id < VOCAB for token_id in first["prompt_ids"])


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        ({"prompt_ids": [3, VOCAB]}, "BadRequest", "prompt_ids has 320; the ids of synthetic:tiny go from 0 to 319."),
        ({"prompt_ids": [-1]}, "BadRequest", "prompt_ids has -1"),
        ({"prompt_length": 257}, "ContextFull", "a prompt of 257 tokens; synthetic:tiny has 256 positions."),
        ({"prompt_ids": []}, "BadRequest", "prompt_ids asks for no token"),
        ({"prompt_length": 0}, "BadRequest", "prompt_length: 0; it must be a whole number, 1 or more"),
        ({"prompt_ids": [1], "prompt_length": 4}, "BadRequest", "has prompt_ids and prompt_length: give one"),
        ({"prompt": "Hi", "prompt_ids": [1]}, "BadRequest", "has prompt and prompt_ids: give one"),
        ({"prompt_ids": ["1"]}, "BadRequest", "it must be a list of integers"),
        ({"prompt_ids": [True]}, "BadRequest", "it must be a list of integers"),
        ({"tokens": 3}, "BadRequest", "no prompt"),
    ],
)
def test_prompts_that_are_none(request_: dict[str, Any], code: str, message: str) -> None:
    page = Page()
    assert page.play("synthetic:tiny", request_) == []
    (error,) = page.of("error")
    assert error["code"] == code
    assert message in error["message"]


def test_prompts_in_ids_round_trip() -> None:
    for text in ('{"prompt_ids": [3, 4]}', '{"prompt_length": 9}'):
        request = RunRequest.from_json(text)
        assert RunRequest.from_json(json.dumps(request.as_dict())) == request
    assert RunRequest.from_json('{"prompt_ids": [3, 4]}').prompt_ids == (3, 4)


def test_the_tables_agree() -> None:
    assert synthetic.DEFAULT_FORMAT in LAYOUT_OF_FORMAT
    assert all(shape.architecture in synthetic.ARCHITECTURES for shape in SHAPES.values())
