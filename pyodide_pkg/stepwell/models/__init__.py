"""The architectures: one file each, one row each."""

from stepwell.models.llama import Llama

ARCHITECTURES: dict[str, type[Llama]] = {
    "llama": Llama,
}
