"""The kernels: one Jinja2 WGSL template each in ``wgsl/``, one row each in ``KERNELS``.

A kernel finds the step's scalars (position, rows, length, draw) in immediates, or in a 16-byte uniform at binding 0
(``wgsl/step.wgsl``); everything else is a constant of its variant.  Which bindings and scalars it has is read from the
rendered WGSL, so both stand in one place.

``ops.py`` has the operations that a model records: they choose a variant and its grid by the adapter's ``Tuning``
(``tuning.py``; ``launch/selection.py`` makes it).  CPU adapters get ``quad`` kernels (four threads with many outputs
each, because there a 32-bit load is the unit of cost), GPUs ``split`` kernels, and for a decode step those of
``fused.py``: five launches per layer; launch options can choose otherwise.  ``products.py`` names the products of a
decode step for the autotuner.  ``layouts.py`` says how a matrix lies in GPU memory, ``kv.py`` where a layer's K and V
are and in which type, ``sampling.py`` how a token is sampled, on the GPU and on the host alike.

To add a kernel: write ``wgsl/<name>.wgsl``, add its row to ``KERNELS``, and a float64 reference with its tolerance
beside the test in ``tests/browser/kernels``.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from stepwell.errors import BadRequest
from stepwell.gpu.device import BindingType, Layout
from stepwell.gpu.program import STEP_BYTES, Scalar
from stepwell.kernels.layouts import LAYOUTS

if TYPE_CHECKING:
    import jinja2

KERNELS: Mapping[str, str] = {
    "repack": "GGUF blocks as they are in the file -> words and scales in the layout of matmul",
    "embed": "rows of the token embedding, dequantised",
    "rms_norm": "y = x / rms(x) * weight, per row",
    "matmul_quad": "y = x W^T over quantised W, optionally added to y, or SwiGLU of two halves of W: for CPU adapters",
    "matmul_split": "the same for GPUs",
    "matmul_tile": "the same for GPUs and many rows",
    "halve": "rows as f16, each divided by a power of two: for matmul_tile",
    "rope_append": "rotary embedding of q in place, of k into the KV cache; v into the KV cache",
    "attention_quad": "one chunk of softmax(q k^T / sqrt(d)) v, causal, grouped-query: for CPU adapters with subgroups",
    "attention_split": "the same for GPUs, and wherever subgroups are missing",
    "attention_merge": "the chunks of attention put together",
    "argmax": "the id of the largest logit that is not banned",
    "sample": "an id drawn from the softmax of the logits, cut to the top k and the nucleus p",
    "matvec": "one row of x times W^T, with the norm or merge before it and what comes after it: for GPUs",
    "rope_turns": "the rotation of the step's position, per pair of a head",
    "attention_decode": "one chunk of attention of one row: for GPUs",
    "noise": "random weights in the layout of matmul, for models without a file",
    "plain_read": "sums of what is read: the bandwidth of memory; without loads, the least that a launch can do",
    "kv_pattern": "writes and reads the buffers of the growing-KV workload, in integers that the host can foretell",
}
"""Every kernel by its name, and what it computes."""

_BINDING = re.compile(r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*(uniform|storage)\s*(?:,\s*(read_write|read))?\s*>")
_IMMEDIATE = re.compile(r"var<\s*immediate\s*>\s*\w+\s*:\s*(\w+)")


_COMMENT = re.compile(r"//.*")
_STEP = re.compile(r"var<\s*(uniform|immediate)\s*>\s*step\b")
_FIELDS = {"position": Scalar.POSITION, "rows": Scalar.ROWS, "length": Scalar.LENGTH, "draw": Scalar.DRAW}


@cache
def _environment() -> "jinja2.Environment":
    import jinja2  # here, not at the top: pages that only allocate never pay for it

    from stepwell.kernels.sampling import GLOBALS

    def source(name: str) -> str:
        return files("stepwell.kernels").joinpath("wgsl", name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # WGSL, not HTML
    )
    environment.globals["layouts"] = LAYOUTS
    environment.globals["sampling"] = GLOBALS
    return environment


def render(kernel: str, constants: Mapping[str, object]) -> str:
    """The WGSL of ``kernel`` with ``constants``, the names that its template knows.

    The constant ``immediates`` (default False) puts the step block in immediates instead of a uniform.  Raises
    BadRequest for a constant that is missing, of the wrong type, or no known choice.
    """
    import jinja2

    if kernel not in KERNELS:
        raise BadRequest(f"no kernel named {kernel!r}; there are {', '.join(KERNELS)}")
    try:
        return _environment().get_template(f"{kernel}.wgsl").render({"immediates": False, **constants})
    except (jinja2.UndefinedError, TypeError) as error:
        raise BadRequest(f"kernel {kernel}: {error}; the constants are {dict(constants)}") from error


def layout_of(wgsl: str) -> Layout:
    """The layout of the shader ``wgsl``, read from its declarations.

    The bindings of group 0 are numbered from 0 or 1 without gaps; the only immediates are the step block, a ``Step``.
    Raises BadRequest for a shader that declares anything else.
    """
    found = {int(number): (space, access) for number, space, access in _BINDING.findall(wgsl)}
    first = min(found, default=0)
    if first > 1 or sorted(found) != list(range(first, first + len(found))):
        raise BadRequest(f"bindings of group 0 are {sorted(found)}: number them from 0 or 1 without gaps")
    immediates = _IMMEDIATE.findall(wgsl)
    if immediates not in ([], ["Step"]):
        raise BadRequest(f"immediates of type {', '.join(immediates)}: the only ones are one Step (step.wgsl)")
    kinds = {
        ("uniform", ""): BindingType.UNIFORM,
        ("storage", "read"): BindingType.READ_ONLY_STORAGE,
        ("storage", ""): BindingType.READ_ONLY_STORAGE,
        ("storage", "read_write"): BindingType.STORAGE,
    }
    bindings = tuple(kinds[found[number]] for number in sorted(found))
    return Layout(bindings, first, STEP_BYTES if immediates else 0)


def fields_of(wgsl: str) -> Scalar | None:
    """The step's scalars that the shader ``wgsl`` reads; None if it has no step block at all."""
    code = _COMMENT.sub("", wgsl)
    if not _STEP.search(code):
        return None
    return Scalar(sum(field for name, field in _FIELDS.items() if f"step.{name}" in code))
