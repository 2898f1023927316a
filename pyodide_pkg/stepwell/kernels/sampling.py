"""Sampling: how an id is drawn, which the host (``decode/sampling.py``) and the GPU (``wgsl/sample.wgsl``) do alike.

1. The *distance* of an id is (largest logit - its logit) / temperature in steps of 1/32,768, rounded down, in f32
   arithmetic.  An id is out that is banned, that has no finite logit, or that is 32 temperatures away (all such ids
   together weigh less than 1e-8 of the largest).  Its *weight* is exp(-distance / 32,768).
2. The ``top_k`` nearest of them are kept, of equally near ones the smaller ids.
3. The nearest of those left are kept that make ``top_p`` of what all those left weigh, again smaller ids first.
4. They are walked in the order of their *ids* (which takes no sort); drawn is the first at which the weights add up to
   more than draw / 2^24 of their sum.  If no id was left in step 1, it is the smallest one that is not banned.

On the GPU that takes four to six launches, in a plan and ahead of the host like argmax.  The host draws one number per
token (``draw``, below 2^24, by the seed).  Temperature, k and p are in a small buffer that is written once per run, so
that only whether there are cuts is compiled in.

Distances are whole numbers that both sides agree on, so steps 1 and 2 are exact, and do not depend on the order in
which a GPU's threads come along.  The steps change a probability by a factor of at most 1 ± 3.1e-5.  Weights and their
sums are f32 on the GPU, to some 1e-5 of the sum: a boundary of step 3 or 4 that is nearer to the draw than that may
fall to the neighbour.
"""

import struct
from typing import NamedTuple

from stepwell.errors import BadRequest
from stepwell.kernels.tuning import Tuning
from stepwell.memory.buffer import Buffer
from stepwell.step.recorder import Constant, Recorder, Variant

STEPS = 1 << 15
"""Distances per temperature."""
BINS = 1 << 10
"""Bins of the histogram, of 1,024 distances each: together all that are less than 32 temperatures away."""
DRAWS = 1 << 24
"""Draws are whole numbers below it: those that an f32 can hold."""
LARGEST_VOCABULARY = 1 << 19
"""The most logits that can be sampled from on the GPU: the sums of a bin hold no more."""
SETTINGS_BYTES = 16
"""Size of the buffer of ``settings_bytes``."""
_UNITS = 1 << 18  # units of weight, in sums of whole numbers: at most exp(-1/32) short of 1 each, so 2^19 ids fit
_LARGEST_INVERSE = 2.0**100  # the largest 1 / temperature, as an f32: temperatures below that are greedy all the same
GLOBALS = {"bins": BINS, "steps": STEPS, "draws": DRAWS, "units": _UNITS}
"""The constants that the template knows as ``sampling``."""


class Cuts(NamedTuple):
    """Which of the two cuts there are; k and p themselves are in the settings."""

    top_k: bool
    top_p: bool


def inverse_of(temperature: float) -> float:
    """1 / ``temperature`` as an f32."""
    inverse: float = struct.unpack("<f", struct.pack("<f", min(1 / temperature, _LARGEST_INVERSE)))[0]
    return inverse


def settings_bytes(temperature: float, top_k: int, top_p: float) -> bytes:
    """The kernel's ``Settings``, constant over a run: the inverse temperature, p, k, and a word of padding."""
    return struct.pack("<ffII", inverse_of(temperature), top_p, min(top_k, LARGEST_VOCABULARY), 0)


class SampleOps:
    """Records the stages of ``sample.wgsl``."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def work_bytes(self) -> int:
        """Bytes of the workspace: parts, histograms, and where the cuts are."""
        return 4 * (3 * self.tuning.sample_parts + 4 * BINS + 6)

    def sample(
        self, rec: Recorder, logits: Buffer, settings: Buffer, work: Buffer, distances: Buffer, token: Buffer, *,
        size: int, ban: tuple[int, ...], cuts: Cuts,
    ) -> None:  # fmt: skip
        """token[0] = the id outside ``ban`` that the step's draw takes of logits[size], with the cuts of ``cuts``.

        ``work`` (``work_bytes``) and ``distances``[size] are workspaces.  Raises BadRequest for a ``size`` above
        LARGEST_VOCABULARY.
        """
        if size > LARGEST_VOCABULARY:
            raise BadRequest(
                f"a vocabulary of {size:,}; sampling on the GPU takes up to {LARGEST_VOCABULARY:,}. Ask for "
                "top_logits, then the host chooses."
            )
        parts, threads = self.tuning.sample_parts, self.tuning.sample_threads
        shared = (("size", size), ("parts", parts), ("threads", threads))

        def launch(stage: str, buffers: tuple[Buffer, ...], *constants: tuple[str, Constant]) -> None:
            variant = Variant("sample", (("stage", stage), *shared, *constants))
            workgroups = 1 if stage == "pick" else parts
            rec.launch(variant, (work, *buffers), (workgroups, 1, 1), "sample", (1,))

        banned = ("ban", ban)
        launch("tops", (logits,), banned)
        launch("distances", (distances, logits, settings), banned, ("counted", cuts.top_k or cuts.top_p))
        if cuts.top_k:
            launch("top_k", (distances, settings))
        if cuts.top_p:
            launch("top_p", (distances, settings), ("top_k", cuts.top_k))
        launch("sums", (distances,), ("top_k", cuts.top_k), ("top_p", cuts.top_p))
        launch("pick", (distances, token), ("fallback", smallest_of(ban)))


def smallest_of(ban: tuple[int, ...]) -> int:
    """The smallest id that is not in ``ban``."""
    return next(index for index in range(len(ban) + 1) if index not in ban)
