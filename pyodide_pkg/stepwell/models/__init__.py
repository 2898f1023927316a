"""The architectures: one file each, one row of ``ARCHITECTURES`` each.

An architecture is a config (``config.py``: read from a GGUF file's metadata, it names the tensors) and a
``DecoderModel`` (``llama.py``: its weights on the GPU).  ``steps.py`` records the steps of all of them, with the
kernels of a launcher: ``model.steps(launcher)``.

``phi3.py`` has what differs in Phi-3: fused q|k|v and gate|up tensors, heads rotated by halves, partial rotation,
LongRoPE and a window of positions.  Rows of q and k are laid out for pairs of neighbours when they are repacked, so
kernels know only these.  Factors that divide the frequencies of rotation (Llama 3 has one set, LongRoPE two) go into
the tables of ``rope.py``; LongRoPE's stretch is a constant of the kernels.  Which set counts follows the length of the
sequence, as in transformers: the steps of a prompt go by its end, a decode step by its own, and a session that outgrows
the original context reads all of it once more, because its cached keys have the other rotations.

``synthetic.py`` has published shapes for random weights.  ``tests/support/tiny_architectures.py`` has a tiny model of
each kind; ``tests/data/architectures`` holds what transformers computes for them.
"""

from stepwell.models.llama import DecoderModel
from stepwell.models.phi3 import Phi3

ARCHITECTURES: dict[str, type[DecoderModel]] = {
    "llama": DecoderModel,
    "phi3": Phi3,
}
"""The class of each architecture, by its name in a GGUF file."""
