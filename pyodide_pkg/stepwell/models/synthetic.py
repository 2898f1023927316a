"""Models of published shapes with random weights: full-size decode can be timed with nothing to download.

A name is ``synthetic:SHAPE`` or ``synthetic:SHAPE:FORMAT``, where the format is a tensor format of files: the matrices
get the layout in which it lies in GPU memory (kernels/layouts.py).

Shapes are those of the ``config.json`` on Hugging Face, as also found in:
    HuggingFaceTB/SmolLM2-135M         its GGUF file, which is our demo model
    meta-llama/Llama-3.2-1B and -3B    torchtune, models/llama3_2/_model_builders.py
    microsoft/Phi-4-mini-instruct      transformers, models/phi3 (partial rotary factor 0.75)
The factors that divide the frequencies of rotation are left out: they would turn random vectors by other angles.  So no
sequence is read anew when it outgrows an original context.

There is no tokenizer: a prompt's bytes are its ids, the answer is its ids in angle brackets, and no id ends it
(``text/plain.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stepwell.errors import BadRequest, MissingCapability
from stepwell.gpu.device import Progress
from stepwell.kernels.layouts import LAYOUT_OF_FORMAT
from stepwell.launch.launcher import Launcher
from stepwell.models import ARCHITECTURES
from stepwell.models.config import DecoderConfig, expected_tensors
from stepwell.models.llama import DecoderModel, weight_plan
from stepwell.models.phi3 import Phi3Config, attention_factor
from stepwell.weights.synthetic import WeightPlan

PREFIX = "synthetic:"
"""How the name of a synthetic model begins."""
DEFAULT_FORMAT = "Q4_0"
"""The tensor format of a name without one."""
_LIMITS = ("maxStorageBufferBindingSize", "maxBufferSize")


@dataclass(frozen=True, slots=True)
class Shape:
    """A published shape: its title, its row of ARCHITECTURES, and its config."""

    title: str
    architecture: str
    config: DecoderConfig


def _llama_3_2(layers: int, hidden: int, heads: int, head_dim: int) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=hidden,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=8,
        head_dim=head_dim,
        ffn_size=8192,
        vocab_size=128_256,
        context_length=131_072,
        rope_theta=500_000.0,
        rope_dim=head_dim,
        rms_eps=1e-5,
        tied_embeddings=True,
    )


SHAPES: dict[str, Shape] = {
    "smollm2-135m": Shape(
        "SmolLM2-135M",
        "llama",
        DecoderConfig(
            hidden_size=576,
            n_layers=30,
            n_heads=9,
            n_kv_heads=3,
            head_dim=64,
            ffn_size=1536,
            vocab_size=49_152,
            context_length=8192,
            rope_theta=100_000.0,
            rope_dim=64,
            rms_eps=1e-5,
            tied_embeddings=True,
        ),
    ),
    "llama-3.2-1b": Shape("Llama-3.2-1B", "llama", _llama_3_2(16, 2048, 32, 64)),
    "llama-3.2-3b": Shape("Llama-3.2-3B", "llama", _llama_3_2(28, 3072, 24, 128)),
    "phi-4-mini": Shape(
        "Phi-4-mini",
        "phi3",
        Phi3Config(
            hidden_size=3072,
            n_layers=32,
            n_heads=24,
            n_kv_heads=8,
            head_dim=128,
            ffn_size=8192,
            vocab_size=200_064,
            context_length=131_072,
            rope_theta=10_000.0,
            rope_dim=96,
            rms_eps=1e-5,
            tied_embeddings=True,
            rope_scale=attention_factor(131_072, 4096),
            sliding_window=262_144,
        ),
    ),
}
"""The shapes by name."""

KV_ONLY: Mapping[str, str] = {f"{PREFIX}qwen3.5-4b-kv": "kv16"}
"""Names of models of which only the KV cache is there, and its workload (decode/kv_pattern.py)."""


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A synthetic model: the name of its ``shape``, and the tensor format ``kind`` of its weights."""

    shape: str
    kind: str = DEFAULT_FORMAT

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise BadRequest(f"there is no synthetic model {self.shape!r}; there are {', '.join(SHAPES)}.")
        if self.kind not in LAYOUT_OF_FORMAT:
            raise BadRequest(f"no synthetic weights of type {self.kind!r}; there are {', '.join(LAYOUT_OF_FORMAT)}.")

    @classmethod
    def named(cls, name: str) -> "Synthetic":
        """The model that ``name`` means.  Raises BadRequest if it means none, or a KV cache only."""
        if name in KV_ONLY:
            raise BadRequest(f"{name} is a KV cache without a model: run the workload {KV_ONLY[name]}.")
        shape, colon, kind = name.removeprefix(PREFIX).partition(":")
        if not name.startswith(PREFIX):
            raise BadRequest(f"{name!r} is not the name of a synthetic model: write {PREFIX}SHAPE.")
        return cls(shape, kind) if colon else cls(shape)

    @property
    def choice(self) -> str:
        """The name without the format."""
        return f"{PREFIX}{self.shape}"

    @property
    def name(self) -> str:
        """The shortest name of the model."""
        return self.choice + (f":{self.kind}" if self.kind != DEFAULT_FORMAT else "")

    @property
    def architecture(self) -> str:
        """Its architecture: a key of ARCHITECTURES."""
        return SHAPES[self.shape].architecture

    @property
    def config(self) -> DecoderConfig:
        """The config of its shape."""
        return SHAPES[self.shape].config

    @property
    def weight_plan(self) -> WeightPlan:
        """What its weights are made of."""
        return weight_plan(self.config, self.kind)

    @property
    def tensor_types(self) -> dict[str, int]:
        """Tensors that a file of this model would have, by type."""
        shapes = expected_tensors(self.config).values()
        matrices = sum(len(shape) > 1 for shape in shapes)
        types = {self.kind: matrices}
        types["F32"] = types.get("F32", 0) + len(shapes) - matrices
        return types

    def lacks(self, limits: Mapping[str, int]) -> tuple[str, str, int] | None:
        """The limit that a buffer of this model exceeds, the buffer, and its bytes; None: the model fits ``limits``."""
        buffers = self.weight_plan.buffers
        largest = max(buffers, key=lambda name: buffers[name])
        for limit in _LIMITS:
            if buffers[largest] > limits[limit]:
                return limit, largest, buffers[largest]
        return None

    def check(self, limits: Mapping[str, int]) -> None:
        """Raise MissingCapability, with what would fit, if ``limits`` do not allow the largest matrix in one buffer."""
        if (lack := self.lacks(limits)) is None:
            return
        limit, buffer, nbytes = lack
        others = [Synthetic(shape, kind) for shape in SHAPES for kind in dict.fromkeys((self.kind, DEFAULT_FORMAT))]
        fitting = [other.name for other in others if other.lacks(limits) is None]
        advice = f"Synthetic models that would fit: {', '.join(fitting) or 'none'}."
        raise MissingCapability(limit, nbytes, limits[limit], f"{self.name} has {buffer} in one buffer. {advice}")

    async def make(self, launcher: Launcher, progress: Progress | None = None) -> DecoderModel:
        """Make the weights on the GPU.  Raises as ``check`` does, and what the pool and the device raise."""
        self.check(launcher.device.info.limits)
        return await ARCHITECTURES[self.architecture].synthetic(self.config, self.kind, launcher, progress)
