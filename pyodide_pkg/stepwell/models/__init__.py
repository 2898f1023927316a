"""The architectures: one file each, one row each."""

from stepwell.models.llama import DecoderModel
from stepwell.models.phi3 import Phi3

ARCHITECTURES: dict[str, type[DecoderModel]] = {
    "llama": DecoderModel,
    "phi3": Phi3,
}
