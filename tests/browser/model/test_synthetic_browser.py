"""Random weights in Chromium: the noise kernel word for word against numpy, its statistics, and models made of it."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from stepwell.kernels.layouts import LAYOUTS, MatrixLayout
from tests.browser.conftest import Lab
from tests.browser.kernels.kernel_lab import Case, KernelLab, poison
from tests.browser.kernels.test_kernels import TUNINGS

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True

N, K = 70, 96
DEVIATION = 0.02
Words = npt.NDArray[np.uint32]


class Noise(NamedTuple):
    format: str
    seed: int

    @property
    def layout(self) -> MatrixLayout:
        return LAYOUTS[self.format]


NOISES = [Noise(name, 7) for name in LAYOUTS] + [Noise("u4", 8)]


@pytest.fixture(scope="module")
def kernels(lab: Lab) -> KernelLab:
    return KernelLab(lab)


def noise_case(noise: Noise) -> Case:
    """A random matrix, and all its rows as the embedding reads them."""
    layout, blocks = noise.layout, K // 32
    quantised = "scales" if layout.quantised else ""
    buffers: dict[str, Any] = {
        "words": poison(blocks, layout.vectors, N, 4, dtype=np.uint32),
        "ids": np.arange(N, dtype=np.uint32),
        "x": poison(N, K),
    }
    if quantised:
        buffers["scales"] = poison(blocks, layout.scale_vectors, N, layout.scale_width, dtype=np.uint32)
    return Case(
        TUNINGS["split"],
        buffers,
        [("noise", ("w", DEVIATION), {}), ("embed", ("ids", "x", "w", N), {})],
        ("words", "x", *([quantised] if quantised else [])),
        {"w": (layout.name, N, K, "words", quantised)},
        position=noise.seed,
        rows=N,
    )


def scramble(value: Words) -> Words:
    h = value.copy()
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))


def drawn(noise: Noise) -> Words:
    """The words of every block [blocks][vectors + 1][N][4]: of its elements, and one vector more."""
    per, blocks = noise.layout.vectors + 1, K // 32
    block, vector, row, part = np.indices((blocks, per, N, 4), dtype=np.uint32)
    place = ((row * np.uint32(blocks) + block) * np.uint32(per) + vector) * np.uint32(4) + part
    return scramble(scramble(place) ^ scramble(np.array([noise.seed + 1], dtype=np.uint32)))


def named(noise: Noise) -> str:
    return f"{noise.format}-{noise.seed}"


@pytest.mark.parametrize("noise", NOISES, ids=named)
def test_every_word_is_the_hash_of_its_place(kernels: KernelLab, noise: Noise) -> None:
    """Exact, but for what WGSL leaves open in the rounding to f16."""
    _, got = kernels.run(noise_case, NOISES, noise)
    layout, bits = noise.layout, drawn(noise)
    reach = np.float32(DEVIATION * 3**0.5)
    if layout.quantised:
        np.testing.assert_array_equal(got["words"], bits[:, :-1])
        scales = got["scales"].transpose(0, 2, 1, 3).reshape(K // 32, N, -1)
        more = bits[:, -1]
        moment = (4**layout.bits - 1) / 12 + (0.25 if layout.offset else 0)
        size = np.float32(DEVIATION / moment**0.5)
        each = 2 if layout.minimum else 1
        for group in range(layout.groups):
            scale = np.where(more[..., 0] & (1 << group), -size, size)
            np.testing.assert_array_equal(scales[..., each * group].view(np.float32), scale)
            if layout.minimum:
                middle = np.float32((2**layout.bits - 1) / 2)
                np.testing.assert_array_equal(scales[..., each * group + 1].view(np.float32), scale * -middle)
        for word in range(layout.high_words):
            np.testing.assert_array_equal(scales[..., each * layout.groups + word], more[..., 1 + word])
    elif noise.format == "F32":
        values = ((bits[:, :-1] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)) * reach
        np.testing.assert_array_equal(got["words"].view(np.float32), values)
    else:
        halves = bits[:, :-1].view(np.uint16).astype(np.float32) * np.float32(2.0**-15) - np.float32(1)
        if noise.format == "BF16":
            expected = (halves * reach).view(np.uint32) >> np.uint32(16)
            np.testing.assert_array_equal(got["words"].view(np.uint16), expected)
        else:
            found = got["words"].view(np.float16).astype(np.float64)
            np.testing.assert_allclose(found, halves * reach, rtol=2.0**-10, atol=2.0**-24)


@pytest.mark.parametrize("noise", NOISES, ids=named)
def test_weights_are_centred_and_as_large_as_asked(kernels: KernelLab, noise: Noise) -> None:
    """By standard errors of 6,720 independent uniform weights: of the mean 1.2 %, of the deviation less than 1 %."""
    _, got = kernels.run(noise_case, NOISES, noise)
    x = got["x"].astype(np.float64)
    assert abs(x.mean()) < 5 * DEVIATION / x.size**0.5
    assert abs(x.std() / DEVIATION - 1) < 0.04
    assert np.abs(x).max() < 2 * DEVIATION
    # rows and columns are alike, too: by chance the mean of 70 is off by 12 %, that of 96 by 10 %
    for axis in (0, 1):
        assert np.abs(x.mean(axis=axis)).max() < 5 * DEVIATION / x.shape[axis] ** 0.5


def test_another_seed_gives_other_weights(kernels: KernelLab) -> None:
    first, second = (kernels.run(noise_case, NOISES, Noise("u4", seed))[1]["x"] for seed in (7, 8))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 5 / first.size**0.5


# ---- a model of it ------------------------------------------------------------------------------------------------

DECODE = """
from stepwell import BufferPool, open_device
from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.launch.launcher import Launcher
from stepwell.models.config import DecoderConfig
from stepwell.models.llama import DecoderModel

async def main(args):
    device = await open_device()
    try:
        pool = BufferPool(device)
        launcher = Launcher(device, pool)
        reports = []
        model = await DecoderModel.synthetic(
            DecoderConfig(**args["config"]), args["kind"], launcher, lambda done, total: reports.append([done, total]))
        session = DecodeSession(model, launcher, kv="static", context=64)
        generation = Generation(max_tokens=args["steps"], top_logits=args["config"]["vocab_size"])
        steps = []
        async for event in session.generate(args["prompt"], generation):
            steps.append([event.id, [logit for _, logit in sorted(event.top_logits)]])
        session.close()
        model.close()
        launcher.close()
        pool.close()
        return {"steps": steps, "reports": reports, "left": device.table_sizes()["buffers"]}
    finally:
        device.close()
"""
CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 32,
    "ffn_size": 512,
    "vocab_size": 997,
    "context_length": 256,
    "rope_theta": 10_000.0,
    "rope_dim": 32,
    "rms_eps": 1e-5,
    "tied_embeddings": True,
}


STEPS = 12


def decode(lab: Lab, kind: str) -> dict[str, Any]:
    result: dict[str, Any] = lab.run(DECODE, config=CONFIG, kind=kind, prompt=[5, 300, 17, 17, 42, 99, 3], steps=STEPS)
    return result


def test_a_synthetic_model_decodes_the_same_twice(lab: Lab) -> None:
    first, second = decode(lab, "Q4_0"), decode(lab, "Q4_0")
    assert first == second
    assert first["left"] == 0
    done, total = first["reports"][-1]
    assert done == total > 0


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_a_synthetic_model_is_no_constant(lab: Lab, kind: str) -> None:
    """The matrices have random weights, so one token does not follow on all; logits keep the size of products."""
    steps = decode(lab, kind)["steps"]
    logits = np.array([logits for _, logits in steps])
    assert len({token_id for token_id, _ in steps}) > 2
    assert logits.shape == (STEPS, CONFIG["vocab_size"])
    assert ((logits.std(axis=1) > 0.8) & (logits.std(axis=1) < 1.2)).all()
    assert np.abs(logits.mean(axis=1)).max() < 0.15  # by chance 0.03
