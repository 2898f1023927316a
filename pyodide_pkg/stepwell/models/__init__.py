"""The architectures: one file each, one row each."""

from stepwell.models.llama import Llama
from stepwell.models.phi3 import Phi3

ARCHITECTURES: dict[str, type[Llama]] = {
    "llama": Llama,
    "phi3": Phi3,
}
