"""A model on the GPU and how to talk to it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stepwell.errors import BadFile, BadRequest, ContextFull, Unsupported
from stepwell.gpu.device import ByteSource
from stepwell.launch.launcher import Launcher
from stepwell.models import ARCHITECTURES
from stepwell.models.llama import DecoderModel
from stepwell.models.synthetic import Synthetic
from stepwell.page.outbox import Outbox
from stepwell.page.request import RunRequest
from stepwell.text.backends import MakeEncoder
from stepwell.text.chat import render_chat
from stepwell.text.detokenizer import Detokenizer
from stepwell.text.plain import PlainDetokenizer, PlainTokenizer
from stepwell.text.tokenizer import Tokenizer
from stepwell.weights.gguf import GgufFile, read_gguf


class TextOfIds(Protocol):
    """Makes text of token ids as they come."""

    def push(self, token_id: int) -> str:
        """The text that is complete with ``token_id``."""

    def finish(self) -> str:
        """The end of the text."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model's parts and its description; ``nbytes`` are those of its file, or of its buffers without one."""

    name: str
    sha256: str | None
    architecture: str
    nbytes: int
    tensor_types: Mapping[str, int]
    model: DecoderModel
    tokenizer: Tokenizer | PlainTokenizer
    chat_template: str | None

    def prompt(self, text: str, *, raw: bool) -> str:
        """``text`` as a conversation's only message, by the model's template; unchanged if ``raw`` or without one."""
        if raw or self.chat_template is None:
            return text
        return render_chat(
            self.chat_template,
            [{"role": "user", "content": text}],
            bos_token=self.tokenizer.bos_token,
            eos_token=self.tokenizer.eos_token,
        )

    def prompt_ids(self, request: RunRequest) -> list[int]:
        """The ids of the prompt: ``prompt_ids``, ``prompt_length`` pseudo-random ones, or those of the text.

        BadRequest for ids that the model does not have, ContextFull for more random ones than it has positions.
        """
        vocabulary, limit = self.model.config.vocab_size, self.model.config.context_length
        if request.prompt_ids is not None:
            if strange := [token_id for token_id in request.prompt_ids if not 0 <= token_id < vocabulary]:
                raise BadRequest(
                    f"prompt_ids has {strange[0]:,}; the ids of {self.name} go from 0 to {vocabulary - 1:,}."
                )
            return list(request.prompt_ids)
        if request.prompt_length is not None:
            if request.prompt_length > limit:
                raise ContextFull(f"a prompt of {request.prompt_length:,} tokens; {self.name} has {limit:,} positions.")
            draw = random.Random(request.seed).random
            return [int(draw() * vocabulary) for _ in range(request.prompt_length)]
        return self.tokenizer.encode(self.prompt(request.prompt, raw=request.raw))

    def detokenizer(self, *, skip_special: bool) -> TextOfIds:
        """A detokenizer for an answer."""
        if isinstance(self.tokenizer, PlainTokenizer):
            return PlainDetokenizer()
        return Detokenizer(self.tokenizer, skip_special=skip_special)

    def describe(self) -> dict[str, object]:
        """The description for the page, as plain data."""
        config = self.model.config
        return {
            "name": self.name,
            "sha256": self.sha256,
            "architecture": self.architecture,
            "layers": config.n_layers,
            "kv_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "context_length": config.context_length,
            "bytes": self.nbytes,
            "tensor_types": dict(self.tensor_types),
            "has_chat_template": self.chat_template is not None,
        }


async def load_model(
    described: Mapping[str, Any], source: ByteSource, launcher: Launcher, make_encoder: MakeEncoder, outbox: Outbox
) -> LoadedModel:
    """Load the GGUF file of the ``load`` message ``described``; ``outbox`` tells the page of the progress."""
    name = described["name"]
    file = await read_gguf(source)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise Unsupported(f"architecture {architecture!r} is not supported; there are {', '.join(ARCHITECTURES)}.")
    tokenizer = Tokenizer(file.metadata, make_encoder)
    outbox.enter("weights", f"Loading {name}")
    check_vocabulary(tokenizer, file)
    model = await ARCHITECTURES[architecture].load(file, source, launcher, outbox.progress("bytes"))
    template = file.metadata.get("tokenizer.chat_template")
    types: dict[str, int] = {}
    for tensor in file.tensors.values():
        types[tensor.format.name] = types.get(tensor.format.name, 0) + 1
    return LoadedModel(
        name, described.get("sha256"), architecture, file.size, types, model, tokenizer,
        template if isinstance(template, str) else None,
    )  # fmt: skip


async def make_model(synthetic: Synthetic, launcher: Launcher, outbox: Outbox) -> LoadedModel:
    """Make the weights of ``synthetic`` on the GPU; ``outbox`` tells the page of the progress."""
    outbox.enter("weights", f"Making {synthetic.name}")
    model = await synthetic.make(launcher, outbox.progress("bytes"))
    nbytes, types = synthetic.weight_plan.nbytes, synthetic.tensor_types
    return LoadedModel(synthetic.name, None, synthetic.architecture, nbytes, types, model, PlainTokenizer(), None)


def check_vocabulary(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Raise BadFile if ``tokenizer`` has more tokens than the embedding of ``file`` has rows."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and tokenizer.vocab_size > embedding.shape[-1]:
        raise BadFile(
            f"the vocabulary has {tokenizer.vocab_size:,} tokens, the token embedding {embedding.shape[-1]:,} rows."
        )
