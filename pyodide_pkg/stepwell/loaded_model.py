"""A model on the GPU and how to talk to it."""

from dataclasses import dataclass

from stepwell.errors import BadFile
from stepwell.models.llama import Llama
from stepwell.text.chat import render_chat
from stepwell.text.tokenizer import Tokenizer
from stepwell.weights.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model's parts, and what the page is told of it."""

    name: str
    sha256: str | None
    file: GgufFile
    llama: Llama
    tokenizer: Tokenizer
    chat_template: str | None

    def prompt(self, text: str, *, raw: bool) -> str:
        """``text`` as a conversation's only message, by the model's template; as it is if ``raw`` or without one."""
        if raw or self.chat_template is None:
            return text
        return render_chat(
            self.chat_template,
            [{"role": "user", "content": text}],
            bos_token=self.tokenizer.bos_token,
            eos_token=self.tokenizer.eos_token,
        )

    def describe(self) -> dict[str, object]:
        config = self.llama.config
        types: dict[str, int] = {}
        for tensor in self.file.tensors.values():
            types[tensor.format.name] = types.get(tensor.format.name, 0) + 1
        return {
            "name": self.name,
            "sha256": self.sha256,
            "architecture": self.file.metadata["general.architecture"],
            "layers": config.n_layers,
            "kv_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "context_length": config.context_length,
            "bytes": self.file.size,
            "tensor_types": types,
            "has_chat_template": self.chat_template is not None,
        }


def check_vocabulary(tokenizer: Tokenizer, file: GgufFile) -> None:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and tokenizer.vocab_size > embedding.shape[-1]:
        raise BadFile(
            f"the vocabulary has {tokenizer.vocab_size:,} tokens, the token embedding {embedding.shape[-1]:,} rows."
        )
